"""The journal of a run: what is done to each block, kept until all is done and saved.

It is a directory `.NAME.partial` beside the directory NAME that the run will write: a manifest, and
a safetensors file for each block, each written beside its place and renamed when it is whole.
"""

import hashlib
import logging
import re
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from mrp_lightning.errors import JournalError, SaveError
from mrp_lightning.files import (
    flush,
    hidden_beside,
    make_directories,
    move_durably,
    not_ours,
    output_path,
)
from mrp_lightning.journal.block_record import BlockRecord
from mrp_lightning.journal.manifest import (
    NAME,
    Entry,
    Fingerprint,
    Manifest,
    digest,
    plain,
)
from mrp_lightning.journal.same import differences

log = logging.getLogger(__name__)

_LOCK = ".lock"
_BLANK_BYTES = 4096
_BLOCK = re.compile(r"block-\d{5,}\.safetensors(?P<part>\.partial)?")


class Journal:
    """The journal of one run, which this process holds until `close`. Made by `Journal.open`.

    Attributes:
        path: The directory.
        manifest: What is in it.
    """

    def __init__(self, path: Path, manifest: Manifest, lock: FileLock) -> None:
        self.path, self.manifest, self._lock = path, manifest, lock
        self._damaged: set[int] = set()
        # Less what the run took before.
        self._start, self._cpu_start = time.monotonic(), time.process_time()

    @classmethod
    def open(
        cls,
        beside: str | PathLike[str],
        fingerprint: Fingerprint,
        *,
        resume: bool = True,
        about: Mapping[str, Any] | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> Self:
        """Start the journal of a run, or go on with one of the same fingerprint.

        Args:
            beside: The directory that the run will write.
            fingerprint: What decides the result.
            resume: Whether to go on with a journal that is there. Otherwise it is removed.
            about: What to keep about the run; see `Manifest`.
            defaults: The defaults of settings, by name: a journal that was begun before a setting
                existed was begun with its default.

        Raises:
            JournalError: A live process holds it, it is damaged, or it is of another run: all
                differences are named.
            SaveError: It cannot be written, or files of others stand where its own are to be.
        """
        path = journal_path(beside)
        if path.is_symlink():
            raise SaveError(f"The journal {path} is a link, and is not followed. Move it away.")
        try:
            make_directories(path)
            lock = FileLock(path / _LOCK)
            lock.acquire(timeout=0)
        except Timeout as error:
            raise _in_use(path) from error
        except OSError as error:
            raise SaveError(f"The journal {path} cannot be written: {error}.") from error
        try:
            _refuse_others(path)
            journal = cls(path, Manifest(plain(fingerprint), plain(about or {})), lock)
            if resume and (path / NAME).exists():
                journal._go_on(defaults or {})
            else:
                journal._start_afresh()
        except BaseException:
            lock.release()
            raise
        return journal

    def __contains__(self, step: int) -> bool:
        """Whether a step is done, and what was done is whole."""
        return step in self.manifest.entries and step not in self._damaged

    def read(self, step: int) -> BlockRecord | None:
        """Read the record of a step; it is `None` while the step is still to be done."""
        return BlockRecord.load(self.file(step)) if step in self else None

    def file(self, step: int) -> Path:
        """The file of a step that is done."""
        return self.path / self.manifest.entries[step].file

    def write(self, step: int, record: BlockRecord) -> None:
        """Keep what was done in a step: a block of the walk, or after all the layers outside.

        Raises:
            SaveError: It cannot be written. What was kept before is whole.
        """
        record = record.on_cpu()
        file = self.path / f"block-{step:05}.safetensors"
        partial = file.with_name(f"{file.name}.partial")
        try:
            partial.unlink(missing_ok=True)  # a link would be followed
            record.save(partial)
            entry = Entry(file.name, _sha256(partial), digest(sorted(record.weights.items())))
            move_durably(partial, file)
            self._keep(step, entry)
            self.manifest.seconds = time.monotonic() - self._start
            self.manifest.cpu_seconds = time.process_time() - self._cpu_start
            self.manifest.save(self.path)
        except (OSError, SafetensorError) as error:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise SaveError(
                f"{record.name or 'What was done'} is pruned, but could not be kept in the journal "
                f"{self.path}: {error}. Make room there, and start the same run again: it goes on "
                "at this block."
            ) from error

    def allocate(self, allocation: dict[str, dict[str, float]]) -> None:
        """Keep how the sparsity is spread over blocks and layers."""
        self.manifest.allocation = allocation
        self._save_manifest()

    def close(self) -> None:
        """Let another process go on with it."""
        self._lock.release()

    def remove(self) -> None:
        """Delete it, when all is done and saved; not while another process goes on with it."""
        _remove(self.path, self._lock)

    def __enter__(self) -> "Journal":
        """Hold it in this context."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let go of it."""
        self.close()

    def _go_on(self, defaults: Mapping[str, Any]) -> None:
        before = Manifest.load(self.path)
        found = differences(before.fingerprint, self.manifest.fingerprint, lambda _: defaults)
        if found:
            listed = "\n".join(f"  {difference}" for difference in found)
            raise JournalError(
                f"{self.path} is the journal of an unfinished run, {len(before.entries)} blocks "
                "far, with other settings than this one. Set `resume: false` to give it up and "
                "start afresh, name another `save_dir`, or go on with the settings it was started "
                "with. "
                f"What differs:\n{listed}"
            )
        before.about = self.manifest.about
        self.manifest = before
        self._start -= before.seconds
        self._cpu_start -= before.cpu_seconds
        for step, entry in before.entries.items():
            file = self.path / entry.file
            if not file.is_file() or _sha256(file) != entry.sha256:
                log.warning("%s is damaged or missing. Its block is pruned again.", file)
                self._damaged.add(step)

    def _keep(self, step: int, entry: Entry) -> None:
        """Take an entry in. If it differs from the damaged one before, what follows is void."""
        before = self.manifest.entries.get(step)
        if before is not None and before.weights != entry.weights:
            void = [later for later in self.manifest.entries if later > step]
            for later in void:
                del self.manifest.entries[later]
            if void:
                log.warning("The block came out otherwise. Those after it are pruned again.")
        self.manifest.entries[step] = entry
        self._damaged.discard(step)

    def _start_afresh(self) -> None:
        blocks = _blocks(self.path)
        (self.path / NAME).unlink(missing_ok=True)  # first: what it does not name is nothing
        for file in blocks:
            file.unlink()
        self._save_manifest()

    def _save_manifest(self) -> None:
        try:
            self.manifest.save(self.path)
        except OSError as error:
            raise SaveError(f"The journal {self.path} cannot be written: {error}.") from error


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
    if not (path / _LOCK).exists():
        return
    lock = FileLock(path / _LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise _in_use(path) from error
    except OSError as error:
        raise SaveError(f"The journal {path} cannot be written: {error}.") from error
    lock.release()


def remove_journal(beside: str | PathLike[str]) -> None:
    """Delete the journal of a run that is done, but not while another process holds it."""
    path = journal_path(beside)
    if path.is_dir():
        _remove(path, FileLock(path / _LOCK))


def _remove(path: Path, lock: FileLock) -> None:
    with suppress(Timeout, OSError):
        lock.acquire(timeout=0)
        blocks = _blocks(path)
        (path / NAME).unlink(missing_ok=True)  # first: what it does not name is nothing
        flush(path)
        for file in blocks:
            file.unlink()
        others = set(not_ours(path)) - {_LOCK, f"{NAME}.partial"}
        if others:
            log.warning("%s is not ours, and stays in %s.", ", ".join(sorted(others)), path)
        else:
            shutil.rmtree(path, ignore_errors=True)
        lock.release(force=True)


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


def _refuse_others(path: Path) -> None:
    """Refuse a directory in which files of others stand where a journal would write its blocks."""
    ours = _blocks(path)
    names = [f.name for f in path.iterdir() if _BLOCK.fullmatch(f.name) and f not in ours]
    if names:
        raise SaveError(
            f"The journal {path} cannot be written: {', '.join(sorted(names))} in it is not ours. "
            "Move it away."
        )


def _in_use(path: Path) -> JournalError:
    return JournalError(
        f"Another process is making this run: it holds the journal {path}. Wait for it, end it, or "
        "name another `save_dir`."
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
