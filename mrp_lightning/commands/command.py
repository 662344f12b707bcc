"""The parser of commands, checks before torch is loaded, and the exit after a mistake."""

import argparse
import errno
import inspect
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from safetensors import SafetensorError

from mrp_lightning import errors
from mrp_lightning.environment import require_extra, without_noise
from mrp_lightning.errors import DataError, OptionError
from mrp_lightning.models.locations import find_gguf, require_model
from mrp_lightning.storage.files import output_path
from mrp_lightning.storage.outputs import check_output_dir
from mrp_lightning.text.documents import TABLES, divided, documents_of_files, expanded, paths_of
from mrp_lightning.upstream.other_names import option_named, options_of

_USER_ERRORS: tuple[Any, ...] = (
    *(
        error
        for _, error in inspect.getmembers(errors, inspect.isclass)
        if issubclass(error, Exception) and not issubclass(error, Warning)
    ),
    OSError,  # files that are not there, exist already, or cannot be written: a full disk, too
    SafetensorError,
    UnicodeDecodeError,  # a configuration that is no text
)
"""The errors that a user can correct; each is shown as a line, without a traceback."""

_FEWEST_BYTES = 8
"""The fewest bytes of text that is held out: of tokens, which are no more, eight are needed."""
_SHORT = 2**20
"""The bytes of files that are read to count their text; more is enough in any case."""


@contextmanager
def exit_on_mistake(interrupted: str = "interrupted") -> Iterator[None]:
    """Exit with a message on the terminal if the block raises an error that a user can correct.

    Noise of other packages is silenced in the block.

    Args:
        interrupted: The line that is written after Ctrl-C.

    Raises:
        SystemExit: With `MISTAKE`; with `FAILED` after a `ParityError`; with the status of an
            interrupted process after Ctrl-C.
    """
    try:
        with without_noise():
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


def _message(mistake: BaseException) -> str:
    """Format an error. ENOENT without a file name means that the working directory is gone."""
    of_disk = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
    if type(mistake) is OSError and mistake.filename and mistake.errno in of_disk:
        file = mistake.filename2 or mistake.filename
        step = "Make room there, or name a directory on another disk."
        return f"{file} cannot be written: {mistake.strerror}. {step}"
    if isinstance(mistake, PermissionError) and mistake.errno == errno.EACCES and mistake.filename:
        return f"{mistake.filename}: permission denied. Change its permissions, or name another."
    is_named = not isinstance(mistake, FileNotFoundError) or mistake.filename is not None
    if not is_named and getattr(mistake, "errno", None) == errno.ENOENT:
        return "the working directory was deleted. Change to one that exists."
    return str(mistake)


class CommandParser(argparse.ArgumentParser):
    """argparse's parser, which raises its errors as `OptionError` and takes no abbreviations.

    An abbreviation may become ambiguous in a later version. `prog` is the command as it is typed.

    Attributes:
        takes_model: Whether the command has MODEL, or `--model` in its place.
    """

    takes_model = False

    def __init__(self, prog: str, description: str) -> None:
        raw, filled = argparse.RawDescriptionHelpFormatter, argparse.HelpFormatter
        formatter = raw if "\n" in description else filled
        super().__init__(prog, None, description, formatter_class=formatter, allow_abbrev=False)
        self.exit_on_error = False

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse a command line, in which options and other arguments may be mixed.

        Raises:
            OptionError: An option is unknown, with the nearest one; or a value is missing or wrong.
        """
        args = sys.argv[1:] if args is None else args
        known = list(options_of(self))
        for name in [arg.partition("=")[0] for arg in args if arg.startswith("--")]:
            if name not in known:
                raise OptionError(f"there is no option `{name}`. {nearest(name, known)}")
        try:
            options, others = self.parse_known_intermixed_args(args, namespace)
        except argparse.ArgumentError as error:
            raise OptionError(error.message, error.argument_name) from error
        if others:
            self.error(f"`{' '.join(others)}` is of no option")
        if self.takes_model:
            models = [model for model in (options.model, options.named_model) if model]
            if len(models) != 1:
                self.error("give MODEL once, as it is or by `--model`")
            options.model = models[0]
        return options

    def by_option(self, options: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
        """Return the values of arguments by the names of their options."""
        return {option_named(self, name) or name: getattr(options, name) for name in names}

    def error(self, message: str) -> NoReturn:
        """Raise an `OptionError` with argparse's message."""
        raise OptionError(f"{message}; see `{self.prog} --help`.")

    @contextmanager
    def options_in_messages(self) -> Iterator[None]:
        """Name the option in errors of this context that are about one of its arguments."""
        try:
            yield
        except errors.ArgumentError as error:
            if error.argument is not None:
                error.argument = option_named(self, error.argument) or error.argument
            raise


def nearest(name: str, names: Sequence[str]) -> str:
    """Return a hint: the name that is nearest, else all names."""
    matches = [known for known in names if known.startswith(name)]
    matches = matches if len(matches) == 1 else get_close_matches(name, names, n=1)
    return f"Did you mean `{matches[0]}`?" if matches else f"There are {', '.join(names)}."


def add_model_options(parser: CommandParser) -> None:
    """Add the argument MODEL, its other form `--model`, and the options for reading the model."""
    parser.takes_model = True
    option = parser.add_argument
    option("model", nargs="?", metavar="MODEL", help="a model directory, hub id or GGUF file")
    option("--model", dest="named_model", metavar="MODEL", help="the same")
    option("--gguf-file", metavar="NAME", help="the GGUF file in that directory")
    option("--revision", help="branch, tag or commit on the hub")
    option("--trust-remote-code", action="store_true", help="run the model's own code")


def number_from(least: int) -> Callable[[str | int], int]:
    """Return an argument type for whole numbers ≥ `least`."""

    def number(text: str | int) -> int:
        # `int` alone would accept "1_000", " 7" and "-1"; a decimal text has none of these.
        if not str(text).isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a number from {least}, got {text!r}")
        return int(text)

    return number


def check_model(source: str, gguf_file: str | None = None) -> None:
    """Raise if there is no such model, or the packages are missing that read it.

    Raises:
        DependencyError: A GGUF file cannot be read. `require_model` raises more.
    """
    if gguf_file is None:
        require_model(source)
    if gguf_file or find_gguf(source):
        require_extra("gguf", f"Reading {Path(gguf_file or source).name}")


def check_directory(source: str | Path, argument: str) -> None:
    """Raise a FileNotFoundError if there is no such directory; its content is checked later."""
    if not Path(source).expanduser().exists():
        raise FileNotFoundError(
            f"`{argument}`: there is no directory {source}. Give a model's, with its config.json."
        )


def check_output(path: str | Path | None, *, overwrite: bool) -> None:
    """Raise if `--out` names what may not be written; see `check_output_dir`.

    The checksums of what may be replaced are read later.
    """
    if path is None or overwrite:
        return
    try:
        check_output_dir(path, argument="--out")
    except FileExistsError as error:
        # A process that was killed after its result was saved left it.
        if not (unfinished := unfinished_directory(output_path(path))).is_dir():
            raise
        raise FileExistsError(
            f"{error} A distillation to it was ended before its last step, and left {unfinished}: "
            "its command goes on from there with `--overwrite`, and removes it."
        ) from error


def unfinished_directory(out: Path) -> Path:
    """Return the directory of an unfinished distillation, whose result is to be in `out`."""
    return out.parent / f".{out.name}.distilling"


def check_text(files: Sequence[str] | None, column: str | None) -> None:
    """Raise if the files of `--text`, of which a tenth is held out, are missing or too short.

    Raises:
        DataError: The held-out text has fewer bytes than the fewest tokens, or is no text.
        DependencyError: The files hold tables, and `datasets` is not installed.
        MissingFileError: Names match no file.
    """
    if not files or "-" in files:
        return
    text_files = expanded({"train_files": paths_of(files)})["train_files"]
    if any(file.suffix.lower() in TABLES for file in text_files):
        require_extra("data", "Reading tables")
        return  # a package reads them, and takes its time to load
    if sum(file.stat().st_size for file in text_files) > _SHORT:
        return
    # A conversation has at least a byte for each of its own: its template adds to it.
    texts = documents_of_files(text_files, column or "text", "train_files", str)
    held_out = sum(len(text.strip().encode()) for text in divided(texts)[1])
    if held_out < _FEWEST_BYTES:
        whole = sum(len(text.encode()) for text in texts)
        raise DataError(
            f"the text has {whole:,} bytes, of which a tenth is held out: too few to evaluate on. "
            "Give some thousand words.",
            "train_files",
        )
