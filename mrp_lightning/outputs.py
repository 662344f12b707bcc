"""Directories that are written aside, and moved into place when they are whole.

What a directory held before is replaced only if it was all ours, and nobody else's, by its manifest
(`files.MANIFEST`); it is deleted only when the new one is in its place, and on the disk.
"""

import glob
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from mrp_lightning.destinations import check_content, check_place, check_room
from mrp_lightning.files import (
    MANIFEST,
    flush,
    hidden_beside,
    make_directories,
    output_path,
    start_manifest,
    write_manifest,
)

log = logging.getLogger(__name__)

_STAGING = ".staging"


def check_output_dir(
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    argument: str = "save_dir",
    sources: Iterable[str | os.PathLike[str]] = (),
    num_bytes: int = 0,
) -> None:
    """Refuse an output directory that cannot be written, or that would cost data, before any work.

    Args:
        path: The directory that will be written; it and those above it need not exist. A symbolic
            link stands for what it points to, and `~` for the home directory.
        overwrite: Whether a directory that is there may be replaced, if it holds nothing but what
            this package wrote, by the checksums in its manifest. That reads 1 GB/s or so.
        argument: The name that the user knows this path by.
        sources: Directories that are read, and must stay.
        num_bytes: How much will be written.

    Raises:
        FileExistsError: A file stands there or where a directory above it is needed; the directory
            is not empty, and `overwrite` is false or it holds files of others, or changed ones,
            which are named; it is a mount point; it is, or holds, the working directory, the home
            or a source; or another process is writing it.
        PermissionError: The directory cannot be made, or not be replaced.
        OptionError: The disk has not enough room.
    """
    path = output_path(path)
    check_place(path, argument, sources)
    path = path.resolve()
    check_content(path, argument, overwrite=overwrite)
    check_room(path, argument, num_bytes)
    if os.path.lexists(_lock_file(path)):
        try:
            with _held(path, argument, timeout=0):
                pass
        except Timeout as error:
            raise FileExistsError(
                f"`{argument}`: another process is writing {path}. Wait for it, end it, or name "
                "another directory."
            ) from error


@contextmanager
def save_directory(
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    argument: str = "save_dir",
    sources: Iterable[str | os.PathLike[str]] = (),
) -> Iterator[Path]:
    """Give an empty directory beside `path` that becomes `path` when the block ends well.

    When the block raises, that directory is removed and `path` is as it was. While another process
    writes `path`, it waits. The files get the permissions that the umask gives to new ones; a
    directory that is replaced keeps its own. All is on the disk before what it replaces is deleted,
    and before this returns. The arguments are those of `check_output_dir`.

    Raises:
        FileExistsError: `check_output_dir` refuses `path`, before the block or after it.
        PermissionError: The same.
        OSError: A directory that was replaced could not be put back after a failure; the message
            says where it is.
    """
    path, sources = output_path(path), [output_path(source) for source in sources]
    check_place(path, argument, sources)
    link, path = path, path.resolve()
    make_directories(path.parent)
    with _held(path, argument):
        check_content(path, argument, overwrite=overwrite)
        check_room(path, argument, 0)
        _remove_abandoned(path)
        staging = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=_STAGING, dir=path.parent))
        try:
            start_manifest(staging)
            yield staging
            flush(staging)  # or fail, if it was deleted
            check_place(link, argument, sources)
            check_content(path, argument, overwrite=overwrite)
            write_manifest(staging)
            _give_permissions(staging, path)
            for written in (*staging.rglob("*"), staging):
                flush(written)
            _move_into_place(staging, path)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def _lock_file(path: Path) -> Path:
    return hidden_beside(path, ".lock")


@contextmanager
def _held(path: Path, argument: str, timeout: float = -1) -> Iterator[None]:
    """Let no other process write a directory meanwhile; wait for one that does.

    Raises:
        Timeout: Another one still does after `timeout` seconds, if that is not negative.
        PermissionError: Something else stands where the lock is to be.
    """
    file = _lock_file(path)
    lock = FileLock(file)
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            if timeout < 0:
                log.warning("Waiting for another process, which is writing %s.", path)
            lock.acquire(timeout=timeout)
    except Timeout:
        raise
    except (OSError, RuntimeError) as error:
        raise PermissionError(
            f"`{argument}`: {path} cannot be locked by {file} ({error}). Move that away, or name "
            "another directory."
        ) from error
    try:
        yield
    finally:
        if file.is_file() and not file.stat().st_size:  # or else it is another program's
            file.unlink()  # while it is held: whoever waits for it makes a new one
        lock.release()


def _remove_abandoned(path: Path) -> None:
    """Remove what killed processes left half-written for a directory, whose lock is held."""
    for staging in path.parent.glob(f".{glob.escape(path.name)}.*{_STAGING}"):
        with suppress(OSError):
            staging.rmdir()  # one that was killed before it could be marked
        if not staging.is_symlink() and (staging / MANIFEST).is_file():
            shutil.rmtree(staging, ignore_errors=True)


def _give_permissions(staging: Path, path: Path) -> None:
    """Undo that temporary directories, and the files of safetensors, are private.

    A directory that is replaced gives its own mode, and its group if it passes that on.
    """
    umask = os.umask(0)
    os.umask(umask)
    mode, group = 0o777 & ~umask, None
    if path.is_dir():
        mode = stat.S_IMODE(path.stat().st_mode)
        group = path.stat().st_gid if mode & stat.S_ISGID else None
    for file in (*staging.rglob("*"), staging):
        if group is not None:
            with suppress(PermissionError):  # who is not in the group may not give it
                os.chown(file, -1, group)
        usual = (0o777 if file.is_dir() else 0o666) & ~umask
        file.chmod(mode if file == staging else usual)


def _move_into_place(staging: Path, path: Path) -> None:
    """Rename `staging` to `path`; what stood there is deleted when the rename is on the disk."""
    if not path.exists():
        staging.rename(path)
        flush(path.parent)
        return
    beside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".old", dir=path.parent))
    old = beside / path.name
    try:
        path.rename(old)
        flush(beside)
        staging.rename(path)
        flush(path.parent)
    except BaseException as error:
        if os.path.lexists(old) and (staging.exists() or not os.path.lexists(path)):
            _put_back(old, path, error)
        with suppress(OSError):
            beside.rmdir()  # unless what was there before is in it
        raise
    shutil.rmtree(beside, ignore_errors=True)


def _put_back(old: Path, path: Path, reason: BaseException) -> None:
    """Rename `old` to `path` again, or say where it stays."""
    try:
        if os.path.lexists(path):
            raise FileExistsError(f"something stands at {path}")
        old.rename(path)
    except OSError as error:
        raise OSError(
            f"{path} could be neither replaced ({reason!r}) nor put back ({error}). What it held "
            f"is in {old}: move it to {path}."
        ) from reason
