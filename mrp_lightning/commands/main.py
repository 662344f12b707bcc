"""The command line: LightningCLI (`predict` prunes, `test` gives perplexity), and what it lacks."""

import inspect
import sys
from importlib import import_module
from typing import Any

from mrp_lightning import errors
from mrp_lightning.environment import extra

# What a user can put right: shown as a line, not as a traceback.
_USER_ERRORS: tuple[Any, ...] = (
    *(
        error
        for _, error in inspect.getmembers(errors, inspect.isclass)
        if issubclass(error, Exception) and not issubclass(error, Warning)
    ),
    FileExistsError,
    FileNotFoundError,
    PermissionError,
)


# Each is `main` of a module of this package, loaded when it is asked for.
_COMMANDS = ("layers", "zeroshot", "report", "sweep")


def main(args: list[str] | None = None) -> None:
    """Run the command line; a mistake of the user's ends it with one line and status 2."""
    given = sys.argv[1:] if args is None else args
    try:
        if given and given[0] in _COMMANDS:
            import_module(f"mrp_lightning.commands.{given[0]}").main(given[1:])
        else:
            with extra("cli", "This command"):
                import jsonargparse  # noqa: F401
            from mrp_lightning.loop.cli import PruningCLI

            PruningCLI(args)
    except Exception as error:
        message = _user_error(error)
        if message is None:
            raise
        sys.stderr.write(f"error: {message}\n")
        raise SystemExit(2) from error


def _user_error(error: BaseException | None) -> BaseException | None:
    """The user's mistake behind an error; jsonargparse wraps what a constructor raises."""
    while error is not None and not isinstance(error, _USER_ERRORS):
        error = error.__cause__
    return error
