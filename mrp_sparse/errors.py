"""The errors of packed weights, by kind."""


class PatternError(ValueError):
    """`sparsity` or `pattern` is missing, malformed, or does not fit a layer."""


class TargetError(ValueError):
    """Layers or blocks that were asked for do not exist, or cannot be pruned as they are."""


class FormatError(ValueError):
    """A checkpoint cannot be read as what it says it is: missing, damaged or unknown content."""


class OptionError(ValueError):
    """An option has a value that it cannot have."""


def first_line(error: Exception) -> str:
    """Return the class of a library's error and the first line of its message, if it has one."""
    kind = type(error).__name__
    lines = str(error).strip().splitlines()
    return f"{kind}: {lines[0]}" if lines else kind
