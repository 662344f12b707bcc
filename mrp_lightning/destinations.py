"""What stands where an output is to be written, and is refused before any work."""

import os
import shutil
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

from mrp_lightning.errors import OptionError
from mrp_lightning.files import MANIFEST, hidden_beside, not_ours, output_path

_REPORTS = ("pruning_report.json", "export_report.json", "evaluation.json")


def check_place(path: Path, argument: str, sources: Iterable[str | os.PathLike[str]]) -> None:
    """Refuse a path that is no directory, or one that is needed."""
    _require_directory(path, argument)
    path = path.resolve()
    if path.is_mount():
        raise FileExistsError(
            f"`{argument}`: {path} is a mount point, which cannot be replaced as a whole. Name a "
            "directory in it."
        )
    hidden_beside(path, "")  # whose name has to be one
    places = {output_path("."): "the working directory", Path.home(): "the home directory"}
    places |= {output_path(source): "what is read" for source in sources}
    for place, what in places.items():
        place = place.resolve()
        if path == place or path in place.parents:
            holds = "is" if path == place else "holds"
            raise FileExistsError(
                f"`{argument}`: {path} {holds} {what}, {place}. Name a new directory."
            )


def _require_directory(path: Path, argument: str) -> None:
    """Refuse an output directory where something else stands, or above it."""
    for needed in (_existing(path.parent), path):
        if os.path.lexists(needed) and not needed.is_dir():
            kind = "a link that leads nowhere" if not needed.exists() else "a file"
            raise FileExistsError(
                f"`{argument}` {path}: expected a directory, but {needed} is {kind}. Name another "
                "directory, or move it away."
            )


def require_writable(path: str | os.PathLike[str], argument: str) -> None:
    """Refuse a directory that results cannot be added to, made where it is not there.

    Raises:
        FileExistsError: Something else stands there, or it is the root of all files.
        PermissionError: It cannot be made, or not be written.
    """
    path = output_path(path)
    _require_directory(path, argument)
    path = path.resolve()
    if path == path.parent:
        raise FileExistsError(f"`{argument}`: {path} is the root of all files. Name a directory.")
    _probe(_existing(path), path, argument)


def _probe(above: Path, path: Path, argument: str) -> None:
    """Try to make a directory, which says more than permissions do."""
    try:
        Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".probe", dir=above)).rmdir()
    except OSError as error:
        raise PermissionError(
            f"`{argument}`: {path} cannot be made in {above} ({error.strerror}). Name another "
            "directory."
        ) from error


def _existing(path: Path) -> Path:
    """The nearest directory, or file, that is there."""
    return next(above for above in (path, *path.parents) if os.path.lexists(above))


def check_content(path: Path, argument: str, *, overwrite: bool) -> None:
    """Refuse to replace a directory with content, unless it is ours and may be replaced."""
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
        older = ""
        if not (path / MANIFEST).exists() and any((path / name).exists() for name in _REPORTS):
            older = f" It has no {MANIFEST} with checksums: an older version may have written it."
        raise FileExistsError(
            f"`{argument}`: {path} holds what mrp-lightning did not write, or what was changed "
            f"since, so it is not replaced: {', '.join(others[:5])}{more}.{older} Name another "
            "directory, or move these away."
        )


def check_room(path: Path, argument: str, num_bytes: int) -> None:
    """Try to make a directory, and ask for free space."""
    above = _existing(path.parent)
    _probe(above, path, argument)
    if path.is_dir():
        sticky = above.stat().st_mode & stat.S_ISVTX
        may_rename = not sticky or os.geteuid() in (0, above.stat().st_uid, path.stat().st_uid)
        if not may_rename or not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(
                f"`{argument}`: {path} cannot be replaced: it, or {above} with its sticky bit, "
                "belongs to another user, or may not be written. Name another directory."
            )
    free = shutil.disk_usage(above).free
    if num_bytes > free:
        raise OptionError(
            f"`{argument}`: {path} will take {num_bytes / 1e9:.2f} GB, but the disk has "
            f"{free / 1e9:.2f} GB left. Make room, or name a directory on another disk."
        )
