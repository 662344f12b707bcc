"""Write files atomically, and keep manifests of the files that this package wrote.

Each directory that this package writes into has a manifest with the checksums of the written files.
A file that is not listed, or has another checksum, belongs to the user.
"""

import errno
import hashlib
import json
import os
import re
import reprlib
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex

from safetensors import SafetensorError

from mrp_lightning.errors import OptionError

MANIFEST = ".mrp_files.json"
"""The name of a manifest: `{"format_version": 1, "files": {name: SHA-256}}`, with names relative to
its directory. While a file is replaced, its entry holds two checksums, separated by a space.
"""

_PARTIAL = re.compile(r"\..+\.[0-9a-f]{8}\.partial")
"""Matches the names of files that `save_text` has not finished."""

_NAME_MAX, _ADDED = 255, 25
"""The most bytes of a file name, and those that are added to the name of a directory."""

OTHER_WEIGHTS = "module.safetensors"
"""The name of the file with a LightningModule's weights outside of its Hugging Face model."""


def output_path(path: str | os.PathLike[str]) -> Path:
    """Return a user's path as an absolute one, with the home directory in place of `~`.

    Call it once, at the start, so that a later change of the working directory has no effect. An
    OptionError is raised for a path that is invalid in every file system.
    """
    shown = reprlib.repr(os.fspath(path))
    if not os.fspath(path):
        raise OptionError("'' cannot be a path. Name a directory; `.` is the working directory.")
    if "\0" in os.fspath(path):
        raise OptionError(f"{shown} cannot be a path: it holds a NUL. Leave that out.")
    try:
        path = Path(path).expanduser()
    except RuntimeError as error:
        raise OptionError(
            f"{shown} begins with the home directory of a user whom this machine does not know. "
            "Write that directory in full."
        ) from error
    if (size := max((len(os.fsencode(name)) for name in path.parts), default=0)) > _NAME_MAX:
        raise OptionError(
            f"{shown} cannot be a path: a name in it has {size} bytes, more than {_NAME_MAX}."
        )
    try:
        return path.absolute()
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{path}: the working directory was deleted. Change to one that exists."
        ) from error


def hidden_sibling(path: Path, suffix: str) -> Path:
    """Return the hidden path `.NAME` + suffix next to a path, for its lock or unfinished content.

    An OptionError is raised for the root, which has no name, and for more than 230 bytes.
    """
    size, most = len(os.fsencode(path.name)), _NAME_MAX - _ADDED
    if not 0 < size <= most:
        problem = f"a name of {size} bytes, more than {most}" if size else "no name"
        raise OptionError(
            f"{reprlib.repr(str(path))} cannot be written: it has {problem}, and unfinished files "
            "lie next to it, under that name and more. Name another directory."
        )
    return path.with_name(f".{path.name}{suffix}")


def visible_files(directory: Path) -> Iterator[Path]:
    """Yield the files in a directory and below it, but no hidden ones or those in hidden ones."""
    for file in directory.rglob("*"):
        hidden = any(part.startswith(".") for part in file.relative_to(directory).parts)
        if file.is_file() and not hidden:
            yield file


def save_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file as UTF-8 atomically: readers see either the old or the new content.

    Parent directories are created. If writing fails, the old content stays and nothing else is
    left; afterwards the content is on the disk, also after a power failure. The file gets the
    default permissions of the umask. A link at the path is replaced, not followed.
    """
    path = Path(path)
    make_directories(path.parent)
    # In the same directory, since a rename is atomic within one file system only. A random name,
    # since two processes may write the same file.
    partial = path.with_name(f".{path.name}.{token_hex(4)}.partial")
    try:
        with naming(partial), partial.open("x", encoding="utf-8") as file:  # follows no link
            file.write(text)
        move_durably(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def save_ours(path: str | os.PathLike[str], text: str, *, adds: bool = False) -> None:
    """Write a file as `save_text` does, and enter it in the manifest of its directory.

    If the text only `adds` to the existing text, a file that the user wrote or changed is not
    entered, and remains the user's.
    """
    path = Path(path)
    if adds and os.path.lexists(path) and _why_not_ours(path):
        save_text(path, text)
        return
    listed = _read(path.parent / MANIFEST)
    earlier, new = listed.get(path.name, ""), hashlib.sha256(text.encode()).hexdigest()
    # Both checksums are entered first: whenever the process is killed, the file has one of them.
    make_directories(path.parent)
    _write(path.parent, {**listed, path.name: f"{earlier} {new}".strip()})
    save_text(path, text)
    _write(path.parent, {**listed, path.name: new})


def check_output_file(
    path: str | os.PathLike[str], argument: str, remedy: str = "move it away"
) -> None:
    """Raise a `FileExistsError` for a directory, or a file that others wrote or changed.

    `remedy` ends the message, after "Name another file, or".
    """
    path = Path(path)
    if path.is_dir():
        raise FileExistsError(f"`{argument}`: expected a file, but {path} is a directory.")
    if os.path.lexists(path) and (reason := _why_not_ours(path)):
        raise FileExistsError(
            f"`{argument}`: {path} exists and {reason}. Name another file, or {remedy}."
        )


def write_manifest(directory: Path) -> None:
    """Write the manifest of a directory: the SHA-256 of each file in it and below.

    An earlier manifest is replaced, so that all of these files count as written by this package.
    """
    files = [file for file in directory.rglob("*") if file.is_file() and file.name != MANIFEST]
    _write(directory, {file.relative_to(directory).as_posix(): sha256_of(file) for file in files})


def _why_not_ours(path: Path, digest: str | None = None) -> str:
    """Return why a file may not be replaced; empty if it has one of the checksums in `digest`.

    By default these are the ones in the manifest of the file's directory.
    """
    digest = digest or _read(path.parent / MANIFEST).get(path.name)
    if digest is None:
        return "is not known to be written by mrp-lightning"
    # The type comes first: a link or a pipe is never opened.
    if not stat.S_ISREG(path.lstat().st_mode) or sha256_of(path) not in digest.split():
        return "was changed since mrp-lightning wrote it"
    return ""


def not_ours(directory: Path) -> list[str]:
    """Return the files and empty directories below a directory that differ from its manifests."""
    # Manifests of subdirectories count, too: each lists names relative to its own directory.
    listed: dict[Path, str] = {}
    manifests = list(directory.rglob(MANIFEST))
    for manifest in manifests:
        listed |= {manifest.parent / name: digest for name, digest in _read(manifest).items()}
    others = []
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        is_ours = path in manifests or _PARTIAL.fullmatch(path.name)  # of a process that was killed
        if is_ours and path.is_file() and not path.is_symlink():
            continue
        if path not in listed:
            is_tree = path.is_dir() and not path.is_symlink()
            if not (is_tree and any(path.iterdir())):
                others.append(name)
        elif _why_not_ours(path, listed[path]):
            others.append(f"{name} (changed)")
    return others


def differing(directory: Path, files: Iterable[Path]) -> list[str]:
    """Return the names of files in a directory whose content is not that of its manifest.

    Links are followed, as in the hub's cache, where each file is one.
    """
    listed = _read(directory / MANIFEST)
    names = {file.relative_to(directory).as_posix(): file for file in files}
    return [n for n, file in names.items() if sha256_of(file) not in listed.get(n, "").split()]


def make_directories(path: Path) -> None:
    """Create a directory and its parents durably: they survive a crash of the machine."""
    # A new directory is an entry of its parent, and survives a crash only once the parent is
    # flushed. `missing` is computed before `mkdir` creates the directories.
    missing = [above for above in (path, *path.parents) if not above.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for made in missing:
        flush(made.parent)


def move_durably(partial: Path, path: Path) -> None:
    """Rename a complete file to `path` durably: it survives a crash of the machine."""
    # 1. The content reaches the disk.
    # 2. The name changes, atomically.
    # 3. The new entry reaches the disk. With 2 before 1, a power failure could leave the name with
    #    an empty file.
    flush(partial)
    partial.replace(path)
    flush(path.parent)


def flush(path: Path) -> None:
    """Flush a file, or the entries of a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the name of a file to an `OSError` in this context that has none, as those of `fsync`.

    A `SafetensorError` becomes an `OSError`, too.
    """
    try:
        yield
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error), str(path)) from error
    except OSError as error:
        # Subclasses are caught by type further up, and would lose it here.
        if type(error) is not OSError or error.filename is not None:
            raise
        reason = error.strerror or str(error)  # numpy's error for a short write has no errno
        raise OSError(error.errno or errno.EIO, reason, str(path)) from error


def _read(manifest: Path) -> dict[str, str]:
    """Return the checksums that a manifest lists, by file; none if it cannot be read."""
    try:
        # `lstat`: a link could lead to another manifest, and opening a pipe would block. An
        # unreadable manifest lists nothing, so that all files count as the user's.
        if not stat.S_ISREG(manifest.lstat().st_mode):
            return {}
        files = json.loads(manifest.read_text("utf-8"))["files"]
        return {str(name): str(digest) for name, digest in files.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


def _write(directory: Path, listed: Mapping[str, str]) -> None:
    content = {"format_version": 1, "files": dict(sorted(listed.items()))}
    save_text(directory / MANIFEST, json.dumps(content, indent=1) + "\n")


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
