"""Write directories under a temporary name, and move them into place when they are complete."""

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

from mrp_lightning.errors import OptionError
from mrp_lightning.storage.files import (
    MANIFEST,
    flush,
    hidden_sibling,
    make_directories,
    move_durably,
    naming,
    not_ours,
    output_path,
    write_manifest,
)

log = logging.getLogger(__name__)

_Path = str | os.PathLike[str]
_LOCK, _STAGING, _OLD = ".lock", ".staging", ".old"


def _check_replaceable(path: Path, argument: str, sources: Iterable[_Path]) -> None:
    """Raise for a file, a mount point, or a directory that holds a source or where the user is."""
    _require_directory(path, argument)
    path = path.resolve()
    if path.is_mount():
        raise FileExistsError(
            f"`{argument}`: {path} is a mount point, which cannot be replaced as a whole. Name a "
            "directory in it."
        )
    hidden_sibling(path, "")  # raises for a path without a valid name
    # All paths are compared after links are resolved: a link to a source is the source. A parent of
    # a needed directory is refused as well, since it is replaced with all that it holds.
    needed = {output_path("."): "the working directory", Path.home(): "the home directory"}
    needed |= {output_path(source): "the source" for source in sources}
    for directory, role in needed.items():
        directory = directory.resolve()
        if path == directory or path in directory.parents:
            holds = "is" if path == directory else "holds"
            raise FileExistsError(
                f"`{argument}`: {path} {holds} {role}, {directory}. Name a new directory."
            )


def _require_directory(path: Path, argument: str) -> None:
    """Raise if an output path, or one of its parents, exists and is no directory."""
    for needed in (_existing(path.parent), path):
        if os.path.lexists(needed) and not needed.is_dir():
            kind = "a link that leads nowhere" if not needed.exists() else "a file"
            raise FileExistsError(
                f"`{argument}` {path}: expected a directory, but {needed} is {kind}. Name another "
                "directory, or move it away."
            )


def require_writable(path: str | os.PathLike[str], argument: str) -> None:
    """Raise unless results can be added to a directory, or the directory be created.

    Raises:
        FileExistsError: The path is no directory, or the root of all files.
        PermissionError: The directory cannot be created or written.
    """
    path = output_path(path)
    _require_directory(path, argument)
    path = path.resolve()
    if path == path.parent:
        raise FileExistsError(f"`{argument}`: {path} is the root of all files. Name a directory.")
    _probe(_existing(path), path, argument)


def _probe(above: Path, path: Path, argument: str) -> None:
    """Raise unless a file without a name can be made in the directory `above` a path."""
    try:
        # Only an attempt shows read-only mounts, quotas and access lists.
        tempfile.TemporaryFile(dir=above).close()
    except OSError as error:
        raise PermissionError(
            f"`{argument}`: {path} cannot be made in {above} ({error.strerror}). Name another "
            "directory."
        ) from error


def _existing(path: Path) -> Path:
    """Return the path or its nearest parent that exists; so does a link that leads nowhere."""
    return next(above for above in (path, *path.parents) if os.path.lexists(above))


def check_content(path: Path, argument: str, *, overwrite: bool) -> None:
    """Raise a `FileExistsError` for a directory with content that may not be replaced.

    With `overwrite`, that is one with files that others wrote or changed, which the message names.
    """
    if not path.is_dir() or not any(path.iterdir()):
        return
    if not overwrite:
        allow = "--overwrite" if argument.startswith("-") else "overwrite: true"
        raise FileExistsError(
            f"`{argument}`: {path} exists and is not empty. "
            f"Name another directory, or allow it to be replaced with `{allow}`."
        )
    if others := not_ours(path):
        more = f" and {len(others) - 5} more" if len(others) > 5 else ""
        raise FileExistsError(
            f"`{argument}`: {path} holds what mrp-lightning did not write, or what was changed "
            f"since, so it is not replaced: {', '.join(others[:5])}{more}. Name another "
            "directory, or move these away."
        )


def _check_room(path: Path, argument: str, num_bytes: int) -> None:
    """Raise if a path cannot be created or replaced in its parent, or the disk is too full."""
    above = _existing(path.parent)
    _probe(above, path, argument)
    if path.is_dir() and not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError(
            f"`{argument}`: {path} cannot be replaced: it may not be written. Name another "
            "directory."
        )
    free = shutil.disk_usage(above).free
    if num_bytes > free:
        raise OptionError(
            f"`{argument}`: {path} will take {num_bytes / 1e9:.2f} GB, but the disk has "
            f"{free / 1e9:.2f} GB left. Make room, or name a directory on another disk."
        )


def check_output_dir(
    path: _Path,
    *,
    overwrite: bool = False,
    argument: str = "save_dir",
    sources: Iterable[_Path] = (),
    num_bytes: int = 0,
) -> None:
    """Check, before any work, that an output directory can be written without loss of data.

    If a process was killed while it replaced the directory, the old content is put back first.

    Args:
        path: The directory to write; neither it nor its parents need exist. A symbolic link is
            resolved, and `~` is the home directory.
        overwrite: Whether an existing directory may be replaced, if this package wrote all of its
            content, by the checksums in its manifest. The check reads about 1 GB/s.
        argument: The name of the argument with the path, for messages.
        sources: Directories that are read, and must not be replaced.
        num_bytes: Number of bytes that will be written.

    Raises:
        FileExistsError: The path or a parent of it is a file; the directory may not be replaced,
            by `check_content` or as a whole; or another process is writing it.
        PermissionError: The directory cannot be created, replaced or locked.
        OptionError: The disk has too little free space, or the path is invalid.
    """
    path = output_path(path)
    _check_replaceable(path, argument, sources)
    path = path.resolve()
    if os.path.lexists(hidden_sibling(path, _LOCK)) or _set_aside(path):
        try:
            with _held(path, argument, timeout=0):
                _restore(path)  # before the check of the content, which it may change
        except Timeout as error:
            raise FileExistsError(
                f"`{argument}`: another process is writing {path}. Wait for it, end it, or name "
                "another directory."
            ) from error
    check_content(path, argument, overwrite=overwrite)
    _check_room(path, argument, num_bytes)


@contextmanager
def save_directory(
    path: _Path,
    *,
    overwrite: bool = False,
    argument: str = "save_dir",
    sources: Iterable[_Path] = (),
) -> Iterator[Path]:
    """Yield an empty directory that becomes `path` when the context ends without an error.

    After an error in the context, that directory is removed and `path` is unchanged. While another
    process writes `path`, this function waits. If one was killed while it replaced `path`, the old
    content is put back first. Files get the default permissions of the umask; a replaced directory
    keeps its own. All content is on the disk before the replaced directory is deleted, and before
    the context ends. The arguments and errors are those of `check_output_dir`, whose checks of
    content are repeated at the end.

    Raises:
        OSError: The content could not be written to the disk; or a replaced directory could not be
            restored after a failure, and the message names its new path.
    """
    path, sources = output_path(path), [output_path(source) for source in sources]
    _check_replaceable(path, argument, sources)
    link, path = path, path.resolve()
    make_directories(path.parent)
    with _held(path, argument):
        _restore(path)
        check_content(path, argument, overwrite=overwrite)
        _check_room(path, argument, 0)
        with _staged(path) as staging:
            with naming(path):
                yield staging
            # 1. The checks are repeated: hours may have passed since the start, and a file that a
            #    user has put there meanwhile must not be deleted.
            # 2. The manifest is written last, when the files are final.
            # 3. All content is on the disk before the rename makes it visible.
            flush(staging)  # raises if the directory was deleted
            _check_replaceable(link, argument, sources)
            check_content(path, argument, overwrite=overwrite)
            write_manifest(staging)
            _give_permissions(staging, path)
            for written in (*staging.rglob("*"), staging):
                flush(written)
            _move_into_place(staging, path)


def check_output_file(path: Path, argument: str) -> None:
    """Check, before any work, that `save_file` can write a file.

    Raises:
        FileExistsError: A parent of the path is a file.
        PermissionError: The file, or the directory that it is in, cannot be created.
    """
    _require_directory(path.parent, argument)
    _probe(_existing(path.parent), path, argument)


@contextmanager
def save_file(path: Path, *, argument: str) -> Iterator[Path]:
    """Yield the path of a file to write, which becomes `path` when the context ends without error.

    After an error, the file is removed and `path` is unchanged. Leftovers of killed processes are
    removed by the next call for `path`. While another process writes `path`, this function waits.

    The path is resolved, and an existing file is replaced; `argument` named it, for messages.
    """
    make_directories(path.parent)
    with _held(path, argument), _staged(path) as staging:
        with naming(path):
            yield staging / path.name
        move_durably(staging / path.name, path)


@contextmanager
def _staged(path: Path) -> Iterator[Path]:
    """Yield a new directory beside a locked output path; it is removed when the context ends."""
    _remove_abandoned(path)
    staging = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=_STAGING, dir=path.parent))
    try:
        write_manifest(staging)  # marks it as ours
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def _held(path: Path, argument: str, timeout: float = -1) -> Iterator[None]:
    """Lock an output path; wait `timeout` seconds for another process, without end if negative."""
    file = hidden_sibling(path, _LOCK)
    lock = FileLock(file)
    try:
        try:
            # A first attempt without waiting shows whether a message is due.
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
        if file.is_file() and not file.stat().st_size:  # else the file is another program's
            file.unlink()  # before the release: a waiting process creates a new file
        lock.release()


def _remove_abandoned(path: Path) -> None:
    """Remove the incomplete directories of killed processes; the lock must be held."""
    # The lock is held, so a staging directory of this path belongs to no living process.
    for staging in path.parent.glob(f".{glob.escape(path.name)}.*{_STAGING}"):
        # A process that was killed before it marked the directory left an empty one.
        is_marked = (staging / MANIFEST).is_file() or not not_ours(staging)
        if not staging.is_symlink() and is_marked:
            shutil.rmtree(staging, ignore_errors=True)


def _set_aside(path: Path) -> list[Path]:
    """Return the directories in which `_move_into_place` puts what `path` held."""
    candidates = path.parent.glob(f".{glob.escape(path.name)}.????????{_OLD}")
    return [aside for aside in candidates if aside.is_dir() and not aside.is_symlink()]


def _restore(path: Path) -> None:
    """Put back what a killed process moved aside; the lock must be held.

    If `path` exists, the old content may be its only copy: it stays, and a warning names its path.
    """
    newest_first = sorted(_set_aside(path), key=lambda aside: -aside.stat().st_mtime_ns)
    for aside in newest_first:
        old = aside / path.name
        if old.is_dir() and not os.path.lexists(path):
            old.rename(path)
            flush(path.parent)
            log.warning("Put %s back, which a process was replacing when it was killed.", path)
        with suppress(OSError):
            aside.rmdir()  # fails if it still holds the old directory
        if os.path.lexists(old):
            _warn_of(old, path)


def _warn_of(old: Path, path: Path) -> None:
    log.warning("%s still holds what %s held before. Move it away, or delete it.", old, path)


def _give_permissions(staging: Path, path: Path) -> None:
    """Give temporary, private files the default permissions, and `staging` the mode of `path`."""
    # The umask can only be read by setting it; it is restored at once.
    umask = os.umask(0)
    os.umask(umask)
    for file in (*staging.rglob("*"), staging):
        file.chmod((0o777 if file.is_dir() else 0o666) & ~umask)
    if path.is_dir():
        staging.chmod(stat.S_IMODE(path.stat().st_mode))


def _move_into_place(staging: Path, path: Path) -> None:
    """Rename `staging` to `path`, and then the old content, if there is any, to `staging`."""
    if not path.exists():
        staging.rename(path)
        flush(path.parent)
        return
    # A directory with content cannot be replaced by one rename. Two are needed, and between them
    # `path` does not exist; the old content then lies in `aside`, from which `_restore` puts it
    # back after a kill. Only when the second rename is on the disk it gets the name of `staging`,
    # whose content may be deleted.
    aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=_OLD, dir=path.parent))
    old = aside / path.name
    flush(path.parent)  # else a power failure could lose `aside`, and what is moved there
    try:
        path.rename(old)
        flush(aside)
        staging.rename(path)
        flush(path.parent)
    except BaseException as error:
        # Put back only if the new content did not arrive: an error after the second rename, as in a
        # flush, leaves it at `path`.
        if os.path.lexists(old) and (staging.exists() or not os.path.lexists(path)):
            _put_back(old, path, error)
        elif os.path.lexists(old):
            _warn_of(old, path)
        with suppress(OSError):
            aside.rmdir()  # fails if it still holds the old directory
        raise
    with suppress(OSError):
        old.rename(staging)
        aside.rmdir()


def _put_back(old: Path, path: Path, reason: BaseException) -> None:
    """Rename `old` to `path` again, or raise with its path."""
    try:
        if os.path.lexists(path):
            raise FileExistsError(f"something stands at {path}")
        old.rename(path)
    except OSError as error:
        raise OSError(
            f"{path} could be neither replaced ({reason!r}) nor put back ({error}). What it held "
            f"is in {old}: move it to {path}."
        ) from reason
