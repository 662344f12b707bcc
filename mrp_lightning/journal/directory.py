"""The directory of a journal: where it lies, who holds it, and what in it is a journal's."""

import logging
import re
import shutil
from contextlib import suppress
from os import PathLike
from pathlib import Path

from filelock import FileLock, Timeout

from mrp_lightning.errors import JournalError, SaveError
from mrp_lightning.files import flush, hidden_beside, not_ours, output_path
from mrp_lightning.journal.block_record import BlockRecord
from mrp_lightning.journal.manifest import NAME, Manifest

log = logging.getLogger(__name__)

_LOCK = ".lock"
_BLANK_BYTES = 4096
_BLOCK = re.compile(r"block-\d{5,}\.safetensors(?P<part>\.partial)?")


def journal_path(beside: str | PathLike[str]) -> Path:
    """Where the journal lies of a run that writes a directory."""
    return hidden_beside(output_path(beside).resolve(), ".partial")


def require_free(beside: str | PathLike[str]) -> None:
    """Refuse a run while another process makes it.

    Raises:
        JournalError: One does.
        SaveError: Something else stands where its lock is to be.
    """
    path = journal_path(beside)
    if (path / _LOCK).exists():
        hold(path).release()


def remove_journal(beside: str | PathLike[str]) -> None:
    """Delete the journal of a run that is done, but not while another process holds it."""
    path = journal_path(beside)
    if path.is_dir():
        remove(path, FileLock(path / _LOCK))


def hold(path: Path) -> FileLock:
    """Let no other process take the journal in a directory until its lock is released.

    Raises:
        JournalError: Another one holds it.
        SaveError: The directory cannot be written.
    """
    try:
        lock = FileLock(path / _LOCK)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise JournalError(
            f"Another process is making this run: it holds the journal {path}. Wait for it, end "
            "it, or name another `save_dir`."
        ) from error
    except OSError as error:
        raise SaveError(f"The journal {path} cannot be written: {error}.") from error
    return lock


def remove(path: Path, lock: FileLock) -> None:
    """Delete a journal, unless another process has its lock; what is not ours stays."""
    with suppress(Timeout, OSError):
        lock.acquire(timeout=0)
        empty(path)
        others = set(not_ours(path)) - {_LOCK, f"{NAME}.partial"}
        if others:
            log.warning("%s is not ours, and stays in %s.", ", ".join(sorted(others)), path)
        else:
            shutil.rmtree(path, ignore_errors=True)
        lock.release(force=True)


def empty(path: Path) -> None:
    """Delete what a journal wrote."""
    blocks = _blocks(path)
    (path / NAME).unlink(missing_ok=True)  # first: what it does not name is nothing
    flush(path)
    for file in blocks:
        file.unlink()


def refuse_others(path: Path) -> None:
    """Refuse a directory in which files of others stand where a journal would write its blocks."""
    ours = _blocks(path)
    names = [f.name for f in path.iterdir() if _BLOCK.fullmatch(f.name) and f not in ours]
    if names:
        raise SaveError(
            f"The journal {path} cannot be written: {', '.join(sorted(names))} in it is not ours. "
            "Move it away."
        )


def _blocks(path: Path) -> list[Path]:
    """The files that a journal wrote for its blocks: all others in its directory are not ours.

    They are listed in its manifest, or are records by their content, whole or torn; or they are to
    be one, and hold nothing yet: a power cut may leave zeros where a file was being written.
    """
    try:
        listed = {entry.file for entry in Manifest.load(path).entries.values()}
    except (JournalError, OSError):
        listed = set()
    return [
        file
        for file in path.iterdir()
        if (kind := _BLOCK.fullmatch(file.name)) is not None
        and file.is_file()
        and not file.is_symlink()
        and (file.name in listed or BlockRecord.is_in(file) or (kind["part"] and _is_blank(file)))
    ]


def _is_blank(file: Path) -> bool:
    """Whether a file begins with nothing but zeros, or is empty."""
    with file.open("rb") as content:
        return not any(content.read(_BLANK_BYTES))
