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
    """Refuse an output directory that holds something, or that cannot be made.

    Args:
        path: The directory that will be written.
        overwrite: Whether what is there may be replaced.
        argument: What the user calls this path, for the message.

    Raises:
        FileExistsError: It is a file, or a directory that is not empty and `overwrite` is false.
        PermissionError: It cannot be written.
    """
    path = Path(path)
    if path.is_file():
        raise FileExistsError(f"`{argument}`: expected a directory, but {path} is a file.")
    if not overwrite and path.is_dir() and any(path.iterdir()):
        allow = "--overwrite" if argument.startswith("-") else "overwrite: true"
        raise FileExistsError(
            f"`{argument}`: {path} exists and is not empty. "
            f"Name another directory, or allow it to be replaced with `{allow}`."
        )
    parent = path.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not os.access(parent, os.W_OK):
        raise PermissionError(f"`{argument}`: {path} cannot be made, {parent} is not writable.")


@contextmanager
def save_directory(
    path: str | os.PathLike[str], *, overwrite: bool = False, argument: str = "save_dir"
) -> Iterator[Path]:
    """Give a temporary directory beside `path` that becomes `path` when the block ends well.

    When the block raises, the temporary directory is removed and `path` is as it was.

    Raises:
        FileExistsError: See `check_output_dir`.
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

    Args:
        path: The file; its directory is made.
        text: The content.
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
    """The text of a JSON file. Numbers that are not finite, which JSON lacks, become null."""
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
    old = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".old", dir=path.parent))
    path.rename(old / path.name)
    try:
        staging.rename(path)
    except BaseException:
        (old / path.name).rename(path)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)
