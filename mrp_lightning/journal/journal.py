"""The journal of a run: what is done to each block, kept until all is done and saved.

It is a directory `.NAME.partial` beside the directory NAME that the run will write: a manifest, and
a safetensors file for each block, each written beside its place and renamed when it is whole.
"""

import hashlib
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from filelock import FileLock
from safetensors import SafetensorError

from mrp_lightning.errors import JournalError, SaveError
from mrp_lightning.files import (
    make_directories,
    move_durably,
)
from mrp_lightning.journal.block_record import BlockRecord
from mrp_lightning.journal.directory import empty, hold, journal_path, refuse_others, remove
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
        except OSError as error:
            raise SaveError(f"The journal {path} cannot be written: {error}.") from error
        lock = hold(path)
        try:
            refuse_others(path)
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
        remove(self.path, self._lock)

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
        empty(self.path)
        self._save_manifest()

    def _save_manifest(self) -> None:
        try:
            self.manifest.save(self.path)
        except OSError as error:
            raise SaveError(f"The journal {self.path} cannot be written: {error}.") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
