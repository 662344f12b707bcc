"""Code that all commands share: options, the parser, and the exit after a correctable error."""

import argparse
import errno
import inspect
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from safetensors import SafetensorError

from mrp_lightning import errors
from mrp_lightning.environment import extra

_USER_ERRORS: tuple[Any, ...] = (
    *(
        error
        for _, error in inspect.getmembers(errors, inspect.isclass)
        if issubclass(error, Exception) and not issubclass(error, Warning)
    ),
    OSError,  # files that are not there, exist already, or cannot be written: a full disk, too
    SafetensorError,
)
"""The errors that a user can correct; each is shown as a line, without a traceback."""


@contextmanager
def exit_on_mistake(interrupted: str = "interrupted") -> Iterator[None]:
    """Exit with one line on the terminal if the block raises an error that a user can correct.

    Args:
        interrupted: The line that is written after Ctrl-C.

    Raises:
        SystemExit: With `MISTAKE`; with `FAILED` after a `ParityError`; with the status of an
            interrupted process after Ctrl-C.
    """
    try:
        yield
    except KeyboardInterrupt:
        sys.stderr.write(f"{interrupted}\n")
        raise SystemExit(errors.ended_by(signal.SIGINT)) from None
    except Exception as error:
        mistake: BaseException | None = error
        while mistake is not None and not isinstance(mistake, _USER_ERRORS):
            mistake = mistake.__cause__  # jsonargparse wraps what a constructor raises
        if mistake is None:
            raise
        sys.stderr.write(f"error: {_message(mistake)}\n")
        # A `ParityError` is no mistake of the user's: by the status, scripts distinguish a wrong
        # export from a wrong option.
        failed = isinstance(mistake, errors.ParityError)
        raise SystemExit(errors.FAILED if failed else errors.MISTAKE) from error


_NEXT_STEPS = {
    errno.ENOSPC: "Make room there, or name a directory on another disk.",
    errno.EDQUOT: "Make room there, or name a directory on another disk.",
    errno.EIO: "The disk is full or fails: make room, or name a directory on another one.",
}
"""The next step after an error of the system that is about a disk."""


def _message(mistake: BaseException) -> str:
    """Format an error. ENOENT without a file name means that the working directory is gone."""
    if type(mistake) is OSError and mistake.filename and mistake.errno in _NEXT_STEPS:
        file = mistake.filename2 or mistake.filename
        return f"{file} cannot be written: {mistake.strerror}. {_NEXT_STEPS[mistake.errno]}"
    if isinstance(mistake, PermissionError) and mistake.errno == errno.EACCES and mistake.filename:
        return f"{mistake.filename}: permission denied. Change its permissions, or name another."
    is_named = not isinstance(mistake, FileNotFoundError) or mistake.filename is not None
    if not is_named and getattr(mistake, "errno", None) == errno.ENOENT:
        return "the working directory was deleted. Change to one that exists."
    return str(mistake)


def make_parser(prog: str, description: str) -> Any:
    """Return the parser of a command, without options; `prog` is the command's name as typed.

    Raises:
        DependencyError: jsonargparse is not installed.
    """
    with extra("cli", "The command line"):
        from mrp_lightning.commands.parser import Parser
    raw, filled = argparse.RawDescriptionHelpFormatter, argparse.HelpFormatter
    formatter = raw if "\n" in description else filled
    return Parser(prog=prog, description=description, formatter_class=formatter)


def add_model_options(parser: Any) -> None:
    """Add MODEL, or `--model`, and the options for reading it; see `Parser.model_first`."""
    parser.model_first = True
    option = parser.add_argument
    option("model", metavar="MODEL", help="a model directory, hub id or GGUF file")
    option("--gguf-file", metavar="NAME", help="the GGUF file in that directory")
    option("--revision", help="branch, tag or commit on the hub")
    option("--trust-remote-code", action="store_true", help="run the model's own code")


def number_from(least: int) -> Callable[[str | int], int]:
    """Return an argument type for whole numbers ≥ `least`."""

    def number(text: str | int) -> int:  # jsonargparse calls it with the default, too
        # `int` alone would accept "1_000", " 7" and "-1"; a decimal text has none of these.
        if not str(text).isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a number from {least}, got {text!r}")
        return int(text)

    return number
