"""How the error of a library is told in a message of ours."""


def first_line(error: Exception) -> str:
    """The kind of an error, and the first line of what it says, if it says anything."""
    kind = type(error).__name__
    lines = str(error).strip().splitlines()
    return f"{kind}: {lines[0]}" if lines else kind
