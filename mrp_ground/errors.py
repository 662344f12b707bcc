"""Errors by kind. Most of them name the argument that they are about."""


class ArgumentError(ValueError):
    """An argument cannot be used as it is.

    Attributes:
        argument: The name of the argument, which precedes the message. A command line sets it to
            the option as it is typed. `None` if the message is about several, or names it itself.
    """

    def __init__(self, message: str = "", argument: str | None = None) -> None:
        super().__init__(message)
        self.argument = argument

    def __str__(self) -> str:
        message = super().__str__()
        return message if self.argument is None else f"`{self.argument}`: {message}"


class PatternError(ArgumentError):
    """`sparsity` or `pattern` is missing or malformed, or does not fit a layer or its weights."""


class TargetError(ArgumentError):
    """Requested layers or blocks do not exist, or cannot be pruned or packed as they are."""


class FormatError(ArgumentError):
    """A checkpoint, another file or a tensor has missing, damaged or unknown content."""


class OptionError(ArgumentError):
    """An option or argument is unknown, missing, out of range, contradictory or not usable here."""


def first_line(error: Exception) -> str:
    """Return the class of a library's error and the first line of its message, if it has one."""
    kind = type(error).__name__
    lines = str(error).strip().splitlines()
    return f"{kind}: {lines[0]}" if lines else kind


def counted(number: float, noun: str) -> str:
    """Return a number with its noun, such as `1 layer` and `1,024 layers`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"
