"""Errors by kind, and the exit statuses of commands."""

from mrp_sparse.errors import ArgumentError as ArgumentError
from mrp_sparse.errors import FormatError as FormatError
from mrp_sparse.errors import OptionError as OptionError
from mrp_sparse.errors import PatternError as PatternError
from mrp_sparse.errors import TargetError as TargetError
from mrp_sparse.errors import first_line as first_line

FAILED, MISTAKE = 1, 2
"""Exit statuses: the command failed; its arguments are wrong."""


def ended_by(signal: int) -> int:
    """Return the exit status of a process that a signal ends, as shells report it."""
    return 128 + signal


class MethodError(ArgumentError):
    """`method` is not one that exists, or cannot be used with the given pattern."""


class HessianError(ValueError):
    """The Hessian is not usable: no tokens, NaN or Inf, all zero, or not positive definite."""


class StrategyError(ArgumentError):
    """The trainer spreads the model or the data over processes in a way that is not supported."""


class DataError(ArgumentError):
    """Text or batches cannot be used: none, too short, of an unknown form, without a tokenizer."""


class MissingFileError(ArgumentError, FileNotFoundError):
    """An argument names a file that does not exist."""


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


class DependencyError(ImportError):
    """A package that a command needs is not installed, or is hidden by another of its name."""


class NumericalWarning(UserWarning):
    """A result is valid but less accurate than asked for, or took more damping than asked for."""


ERROR_OF_ARGUMENT = {"sparsity": PatternError, "pattern": PatternError, "method": MethodError}
"""The error of a public argument that has a class of its own; all others are `OptionError`."""
