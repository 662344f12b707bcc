"""The journal of a run: what is done to each block, kept until all is done and saved."""

import hashlib
import logging
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError

from mrp_lightning.errors import FormatError, JournalError, SaveError
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
    differences,
    digest,
    plain,
)
from mrp_lightning.json_files import as_dataclass
from mrp_lightning.processes import Processes
from mrp_lightning.records.report import PruningReport
from mrp_lightning.targets.layers import Layer

if TYPE_CHECKING:
    from mrp_lightning.models.streaming import StreamedBlocks

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


class SharedJournal:
    """A `Journal` that all processes use alike, and that lies on the disk of the first one.

    What is asked of it, all processes ask in the same order. Only a run with as many processes can
    go on with it, since sums over other shares of the data are rounded otherwise.

    Args:
        journal: The journal, in the first process; `None` in the others.
        processes: The processes.

    Attributes:
        manifest: What is in it, as it was when it was opened.
    """

    manifest: Manifest

    def __init__(self, journal: Journal | None, processes: Processes) -> None:
        self._journal, self._processes = journal, processes
        self.manifest = processes.all(None if journal is None else journal.manifest)[0]

    def __contains__(self, step: int) -> bool:
        """Whether a step is done, and what was done is whole."""
        done: bool = self._processes.all(self._journal is not None and step in self._journal)[0]
        return done

    def read(self, step: int) -> BlockRecord | None:
        """The record of a step, `None` if it is still to be done."""
        mine = None if self._journal is None else self._journal.read(step)
        about = None
        if mine is not None:
            kinds = {name: (weight.shape, weight.dtype) for name, weight in mine.weights.items()}
            about = replace(mine, weights={}), kinds
        about = self._processes.all(about)[0]
        if about is None:
            return None
        record, kinds = about
        for name, (shape, dtype) in kinds.items():
            weight = torch.empty(shape, dtype=dtype) if mine is None else mine.weights[name]
            weight = weight.to(self._processes.device)
            record.weights[name] = self._processes.like_first_(weight)
        return record

    def write(self, step: int, record: BlockRecord) -> None:
        """Keep what was done in a step."""
        if self._journal is not None:
            self._journal.write(step, record)

    def allocate(self, allocation: dict[str, dict[str, float]]) -> None:
        """Keep how the sparsity is spread over blocks and layers."""
        if self._journal is not None:
            self._journal.allocate(allocation)

    def remove(self) -> None:
        """Delete it, when all is done and saved."""
        if self._journal is not None:
            self._journal.remove()


class StreamedJournal(Journal):
    """A journal whose shards hold whole blocks, each as a file of the checkpoint is to hold it.

    Attributes:
        streamed: The blocks, which are read from the shards once these are written.
    """

    streamed: "StreamedBlocks"

    def read(self, step: int) -> BlockRecord | None:
        """The record of a step, `None` if it is still to be done."""
        record = super().read(step)
        if record is None or record.name not in self.streamed.blocks:
            return record
        told = {field.name: getattr(record, field.name) for field in fields(record)}
        return _StreamedRecord(**told, journal=self, step=step)

    def write(self, step: int, record: BlockRecord) -> None:
        """Keep what was done in a step, with all that the block holds; the block is pinned.

        Raises:
            SaveError: It cannot be written. What was kept before is whole.
        """
        if record.name not in self.streamed.blocks:
            super().write(step, record)
            return
        super().write(step, replace(record, weights=self.streamed.tensors(record.name)))
        self.streamed.read_from(record.name, self.file(step))


@dataclass(frozen=True, eq=False, kw_only=True)
class _StreamedRecord(BlockRecord):
    journal: StreamedJournal
    step: int

    def restore(
        self,
        layers: Sequence[Layer],
        before: Callable[[Layer], None],
        beside: Sequence[Layer] = (),
    ) -> None:
        """Let the block hold what the entry does, now and whenever it is read."""
        for layer in [*self.pruned(layers), *beside]:
            before(layer)
        self.journal.streamed.take(self.name, self.weights)
        self.journal.streamed.read_from(self.name, self.journal.file(self.step))


def find_journal(path: str | PathLike[str]) -> Path | None:
    """The journal that a path is, or that lies beside where it will be; `None` if there is none."""
    path = Path(path)
    if path.name.startswith(".") and path.name.endswith(".partial") and (path / NAME).is_file():
        return path
    beside = journal_path(path)
    return beside if not path.exists() and (beside / NAME).is_file() else None


def unfinished_report(journal: Path) -> tuple[PruningReport, str]:
    """Read the report of a run that is not complete, and in words how far it is.

    Raises:
        JournalError: The journal is damaged, or of another version of mrp-lightning.
    """
    manifest = Manifest.load(journal)
    try:
        about = as_dataclass(_About, manifest.about, f"`about` of {journal / NAME}", "prune again")
    except FormatError as error:
        raise JournalError(str(error)) from error
    report = PruningReport(
        about.config,
        seconds=manifest.seconds,
        versions=about.versions,
        provenance=about.provenance,
        model_weights=about.model_weights,
    )
    for _, entry in sorted(manifest.entries.items()):
        try:
            record = BlockRecord.load(journal / entry.file)
        except (OSError, SafetensorError, FormatError) as error:
            raise JournalError(
                f"{journal / entry.file} is damaged ({error}). The run makes it again when it goes "
                "on."
            ) from error
        report.layers += record.rows
        report.blocks += [] if record.block is None else [record.block]
    return report, f"{len(manifest.entries)} of {about.blocks} blocks are pruned so far"


@dataclass(kw_only=True)
class _About:
    """What a manifest tells of the run, beside its layers, of which a report is made."""

    config: dict[str, Any]
    versions: dict[str, str]
    provenance: dict[str, Any]
    blocks: int
    model_weights: int | None = None
