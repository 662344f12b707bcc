"""Errors by kind, and the exit statuses of commands."""

from mrp_ground.errors import ArgumentError as ArgumentError
from mrp_ground.errors import FormatError as FormatError
from mrp_ground.errors import OptionError as OptionError
from mrp_ground.errors import PatternError as PatternError
from mrp_ground.errors import TargetError as TargetError
from mrp_ground.errors import counted as counted
from mrp_ground.errors import first_line as first_line

FAILED, MISTAKE = 1, 2
"""Exit statuses: an export does not compute what its source does, or another process has ended; and
an error that a user can correct, such as a wrong argument (see `exit_on_mistake`)."""


def ended_by(signal: int) -> int:
    """Return the exit status of a process that a signal ended: 128 plus its number."""
    return 128 + signal


class MethodError(ArgumentError):
    """`method` does not exist, or cannot be combined with the pattern or another option."""


class HessianError(ValueError):
    """A Hessian or the inputs that it sums up are unusable, or lead to a weight out of range.

    Causes are a wrong shape or dtype, no tokens, NaN or Inf, and a matrix that is zero, not
    symmetric or not positive definite.
    """


class StrategyError(ArgumentError):
    """The trainer's strategy distributes the model or the data in an unsupported way."""


class DataError(ArgumentError):
    """Text or batches are missing, too short or malformed, or there is no tokenizer for them."""


class MissingFileError(ArgumentError, FileNotFoundError):
    """An argument names a file that does not exist."""


class ParityError(ValueError):
    """An exported checkpoint does not compute what its source computes."""


class SaveError(OSError):
    """A journal, a checkpoint, or a pruned model, which is still in memory, was not written."""


class JournalError(ValueError):
    """The journal of an unfinished run belongs to another run, is damaged, or is in use."""


class OutOfMemoryError(RuntimeError):
    """Memory did not suffice to calibrate or to prune; the message names the next step."""


class ProcessError(RuntimeError):
    """One of several processes that prune together has ended, or cannot be reached."""


class DependencyError(ImportError):
    """A required package is not installed."""


class NumericalWarning(UserWarning):
    """A result is valid, but less accurate than requested, or needed more damping."""


ERROR_OF_ARGUMENT = {"sparsity": PatternError, "pattern": PatternError, "method": MethodError}
"""The class of the errors of each public argument; `OptionError` for all others."""
