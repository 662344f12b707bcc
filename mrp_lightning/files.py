"""Writing files and directories: beside the target, and moved into place when they are whole."""

import glob
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from filelock import FileLock, Timeout

from mrp_lightning.errors import OptionError

_STAGING = ".staging"
_LOCK = ".lock"


OURS = (
    *("config.json", "generation_config.json"),
    *("model*.safetensors", "model.safetensors.index.json"),
    *("tokenizer*.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "chat_template.*"),
    *("preprocessor_config.json", "processor_config.json"),
    *("pruning_report.json", "export_report.json", "evaluation.json", "run.json"),
    *("report.html", "report-figures/*.png"),
)
"""The files that this package writes into any directory. Others are in a report, as `files`."""

BESIDE = "module.safetensors"
"""The weights that a LightningModule has beside the one Hugging Face model that is saved."""


def output_path(path: str | os.PathLike[str]) -> Path:
    """The path that a user named, also in YAML, where no shell puts the home in place of a `~`."""
    return Path(path).expanduser()


def check_output_dir(
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    argument: str = "save_dir",
    sources: Iterable[str | os.PathLike[str]] = (),
    num_bytes: int = 0,
    ours: Sequence[str] = OURS,
) -> None:
    """Refuse an output directory that cannot be written, or that would cost data, before any work.

    Args:
        path: The directory that will be written; it and those above it need not exist. A symbolic
            link stands for what it points to, and `~` for the home directory.
        overwrite: Whether a directory that is there may be replaced, if it holds nothing but what
            this package writes: files that its reports list, and those that `ours` names.
        argument: The name that the user knows this path by.
        sources: Directories that are read, and must stay.
        num_bytes: How much will be written.
        ours: Names of files that may be replaced, with shell wildcards.

    Raises:
        FileExistsError: A file stands there or where a directory above it is needed; the directory
            is not empty, and `overwrite` is false or it holds other files, which are named; it is a
            mount point; or it is, or holds, the working directory, the home or a source.
        PermissionError: The directory cannot be made.
        OptionError: The disk has not enough room.
    """
    path = output_path(path)
    above = path.absolute().parent
    while not os.path.lexists(above):
        above = above.parent
    for needed in (above, path):
        if os.path.lexists(needed) and not needed.is_dir():
            raise FileExistsError(
                f"`{argument}` {path}: expected a directory, but {needed} is a file. Name another "
                "directory, or move the file away."
            )
    path = path.resolve()
    if path.is_mount():
        raise FileExistsError(
            f"`{argument}`: {path} is a mount point, which cannot be replaced as a whole. Name a "
            "directory in it."
        )
    places = {Path.cwd(): "the working directory", Path.home(): "the home directory"}
    places |= {Path(source).expanduser(): "what is read" for source in sources}
    for place, what in places.items():
        place = place.resolve()
        if path == place or path in place.parents:
            holds = "is" if path == place else "holds"
            raise FileExistsError(
                f"`{argument}`: {path} {holds} {what}, {place}. Name a new directory."
            )
    if path.is_dir() and any(path.iterdir()):
        _check_replaceable(path, ours, overwrite=overwrite, argument=argument)
    _check_room(above.resolve(), path, argument, num_bytes)


def _check_replaceable(path: Path, ours: Sequence[str], *, overwrite: bool, argument: str) -> None:
    if not overwrite:
        allow = "--overwrite" if argument.startswith("-") else "overwrite: true"
        raise FileExistsError(
            f"`{argument}`: {path} exists and is not empty. "
            f"Name another directory, or allow it to be replaced with `{allow}`."
        )
    if others := _others(path, ours):
        more = f" and {len(others) - 5} more" if len(others) > 5 else ""
        raise FileExistsError(
            f"`{argument}`: {path} holds what mrp-lightning did not write, so it is not replaced: "
            f"{', '.join(others[:5])}{more}. Name another directory, or move these away."
        )


def _others(path: Path, ours: Sequence[str]) -> list[str]:
    """Files and empty directories in a directory that this package did not write."""
    listed: set[str] = set()
    for name in ("pruning_report.json", "export_report.json"):
        with suppress(OSError, ValueError, AttributeError, TypeError):
            listed |= set(json.loads((path / name).read_text("utf-8")).get("files", ()))
    others = []
    for file in sorted(path.rglob("*")):
        name = file.relative_to(path).as_posix()
        if file.is_dir() and not file.is_symlink() and any(file.iterdir()):
            continue
        is_ours = name in listed or any(fnmatchcase(name, pattern) for pattern in ours)
        if not is_ours and not (name == "README.md" and _is_card(file)):
            others.append(name)
    return others


def _is_card(file: Path) -> bool:
    """Whether this is the card of a model that was pruned or packed."""
    return "mrp-lightning" in file.read_text("utf-8", "replace")


def _check_room(above: Path, path: Path, argument: str, num_bytes: int) -> None:
    """Try to make a directory, which says more than permissions do, and ask for free space."""
    try:
        Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".probe", dir=above)).rmdir()
    except OSError as error:
        raise PermissionError(
            f"`{argument}`: {path} cannot be made in {above} ({error.strerror}). Name another "
            "directory."
        ) from error
    free = shutil.disk_usage(above).free
    if num_bytes > free:
        raise OptionError(
            f"`{argument}`: {path} will take {num_bytes / 1e9:.2f} GB, but the disk has "
            f"{free / 1e9:.2f} GB left. Make room, or name a directory on another disk."
        )


@contextmanager
def save_directory(
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    argument: str = "save_dir",
    sources: Iterable[str | os.PathLike[str]] = (),
    ours: Sequence[str] = OURS,
) -> Iterator[Path]:
    """Give an empty directory beside `path` that becomes `path` when the block ends well.

    When the block raises, that directory is removed and `path` is as it was. The files get the
    permissions that the umask gives to new ones. The arguments are those of `check_output_dir`.

    Raises:
        FileExistsError: `check_output_dir` refuses `path`, before the block or after it.
        PermissionError: The same.
        OSError: A directory that was replaced could not be put back after a failure; the message
            says where it is.
    """
    refuse = partial(
        check_output_dir, overwrite=overwrite, argument=argument, sources=list(sources), ours=ours
    )
    refuse(path)
    path = output_path(path).resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(path)
    staging = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=_STAGING, dir=path.parent))
    lock = FileLock(staging / _LOCK)
    lock.acquire()
    try:
        yield staging
        refuse(path)
        lock.release()
        (staging / _LOCK).unlink(missing_ok=True)
        _make_readable(staging)
        _move_into_place(staging, path)
    finally:
        lock.release()
        shutil.rmtree(staging, ignore_errors=True)


def _remove_abandoned(path: Path) -> None:
    """Remove the directories that killed processes left half-written for this one."""
    for staging in path.parent.glob(f".{glob.escape(path.name)}.*{_STAGING}"):
        lock = FileLock(staging / _LOCK)
        with suppress(Timeout, OSError):
            lock.acquire(timeout=0)  # a process that is alive holds it
            shutil.rmtree(staging)
            lock.release()


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


def visible_files(directory: Path) -> Iterator[Path]:
    """All files in a directory and below it but hidden ones."""
    for file in directory.rglob("*"):
        hidden = any(part.startswith(".") for part in file.relative_to(directory).parts)
        if file.is_file() and not hidden:
            yield file


def save_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file as UTF-8 in one step: whoever reads it meanwhile sees old or new content.

    The directories above it are made. When writing fails, the old content stays and nothing else
    is left behind. The file gets the permissions that the umask gives to new ones.

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


def move_durably(partial: Path, path: Path) -> None:
    """Rename a file that is whole to `path`, so that it also survives that the machine goes down.

    Raises:
        OSError: It cannot be written through to the disk, or renamed.
    """
    _flush(partial)
    partial.replace(path)
    _flush(path.parent)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
