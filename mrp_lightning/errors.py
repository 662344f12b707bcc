"""The errors that users meet, by kind, so that they can be told apart in code and by a shell."""

FAILED, MISTAKE = 1, 2
"""Exit statuses: what was asked for could not be done; what was asked for cannot be."""


def ended_by(signal: int) -> int:
    """The exit status of a process that a signal ends, as shells have it."""
    return 128 + signal


def first_line(error: Exception) -> str:
    """The kind of a library's error, and the first line of what it says, if it says anything."""
    kind = type(error).__name__
    lines = str(error).strip().splitlines()
    return f"{kind}: {lines[0]}" if lines else kind


class PatternError(ValueError):
    """`sparsity` or `pattern` is missing, malformed, or does not fit a layer."""


class MethodError(ValueError):
    """`method` is not one that exists, or cannot be used with the given pattern."""


class HessianError(ValueError):
    """The Hessian is not usable: no tokens, NaN or Inf, all zero, or not positive definite."""


class TargetError(ValueError):
    """Layers or blocks that were asked for do not exist, or cannot be pruned as they are."""


class StrategyError(ValueError):
    """The trainer spreads the model or the data over processes in a way that is not supported."""


class DataError(ValueError):
    """Text or batches cannot be used: none, too short, of an unknown form, without a tokenizer."""


class FormatError(ValueError):
    """A checkpoint cannot be read as what it says it is: missing, damaged or unknown content."""


class ParityError(ValueError):
    """An exported checkpoint does not compute what its source computes."""


class SaveError(OSError):
    """A pruned model could not be written; it is still in memory, and can be saved elsewhere."""


class JournalError(ValueError):
    """The journal of an unfinished run is of another run, damaged, or in use by a live process."""


class OutOfMemoryError(RuntimeError):
    """There was not enough memory to calibrate or to prune; the message says what to lower."""


class ProcessError(RuntimeError):
    """One of several processes that prune together has ended, or cannot be reached."""


class OptionError(ValueError):
    """An option has a value that it cannot have."""


class DependencyError(ImportError):
    """A package that a command needs is not installed, or is hidden by another of its name."""


class NumericalWarning(UserWarning):
    """A result is valid but less accurate than asked for, or took more damping than asked for."""
