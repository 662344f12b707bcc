"""Writing files and directories: beside the target, and moved into place when they are whole."""

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def check_output_dir(
    path: str | os.PathLike[str], *, overwrite: bool = False, argument: str = "save_dir"
) -> None:
    """Refuse an output directory that holds something, or that cannot be made, before any work.

    Args:
        path: The directory that will be written; it and those above it need not exist.
        overwrite: Whether a directory that is there may be replaced.
        argument: What the user calls this path, for the message.

    Raises:
        FileExistsError: A file stands there or where a directory above it is needed, the
            directory is not empty and `overwrite` is false, or it is a mount point.
        PermissionError: The directory that it would be made in cannot be written.
    """
    path = Path(path)
    above = path.absolute().parent
    while not os.path.lexists(above):
        above = above.parent
    for needed in (above, path):
        if os.path.lexists(needed) and not needed.is_dir():
            raise FileExistsError(
                f"`{argument}` {path}: expected a directory, but {needed} is a file. Name another "
                "directory, or move the file away."
            )
    if path.is_mount():
        raise FileExistsError(
            f"`{argument}`: {path} is a mount point, which cannot be replaced as a whole. Name a "
            "directory in it."
        )
    if not overwrite and path.is_dir() and any(path.iterdir()):
        allow = "--overwrite" if argument.startswith("-") else "overwrite: true"
        raise FileExistsError(
            f"`{argument}`: {path} exists and is not empty. "
            f"Name another directory, or allow it to be replaced with `{allow}`."
        )
    if not os.access(above, os.W_OK):
        raise PermissionError(
            f"`{argument}`: {path} cannot be made, {above} is not writable. Name another directory."
        )


@contextmanager
def save_directory(
    path: str | os.PathLike[str], *, overwrite: bool = False, argument: str = "save_dir"
) -> Iterator[Path]:
    """Give a temporary directory beside `path` that becomes `path` when the block ends well.

    When the block raises, the temporary directory is removed and `path` is as it was. What is
    written gets the permissions that the umask gives to new files.

    Args:
        path: The directory that will be written; those above it are made.
        overwrite: Whether a directory that is there may be replaced, as a whole.
        argument: What the user calls this path, for messages.

    Yields:
        The temporary directory, which is empty.

    Raises:
        FileExistsError: `check_output_dir` refuses `path`, before the block or after it.
        PermissionError: The same.
        OSError: What was replaced could not be put back after a failure; it says where it is.
    """
    path = Path(path).absolute()
    check_output_dir(path, overwrite=overwrite, argument=argument)
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent))
    try:
        yield staging
        check_output_dir(path, overwrite=overwrite, argument=argument)
        _make_readable(staging)
        _move_into_place(staging, path)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def save_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file in one step: whoever reads it meanwhile sees the old or the new content.

    When that fails, the old content stays and nothing else is left behind. The file gets the
    permissions that the umask gives to new files.

    Args:
        path: The file; the directories above it are made.
        text: The content, written as UTF-8.

    Raises:
        OSError: The file cannot be written.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def as_json(content: Any) -> str:
    """The text of a JSON file, indented, with a newline at its end.

    Args:
        content: Mappings, lists and tuples of strings, numbers, bools and `None`. Numbers that are
            not finite, which JSON lacks, become null.

    Raises:
        TypeError: There is something else in it.
    """
    return json.dumps(_finite(content), indent=2, allow_nan=False) + "\n"


def _finite(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def _make_readable(directory: Path) -> None:
    """Undo that temporary directories, and the files of safetensors, are private."""
    umask = os.umask(0)
    os.umask(umask)
    directory.chmod(0o777 & ~umask)
    for file in directory.rglob("*"):
        file.chmod((0o777 if file.is_dir() else 0o666) & ~umask)


def _move_into_place(staging: Path, path: Path) -> None:
    """Rename `staging` to `path`; what stood there is deleted only after the rename."""
    if not path.exists():
        staging.rename(path)
        return
    beside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".old", dir=path.parent))
    old = beside / path.name
    try:
        path.rename(old)
        staging.rename(path)
    except BaseException as error:
        if os.path.lexists(old) and staging.exists():
            _put_back(old, path, error)
        shutil.rmtree(beside, ignore_errors=True)
        raise
    shutil.rmtree(beside, ignore_errors=True)


def _put_back(old: Path, path: Path, reason: BaseException) -> None:
    """Rename `old` to `path` again, or say where it stays."""
    try:
        old.rename(path)
    except OSError as error:
        raise OSError(
            f"{path} could be neither replaced ({reason!r}) nor put back ({error}). What it held "
            f"is in {old}: move it to {path}."
        ) from reason
