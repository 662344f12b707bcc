"""The journal of a run: the result of each finished block, until the model is saved."""

import logging
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mrp_lightning.errors import JournalError, SaveError, counted
from mrp_lightning.journal.manifest import (
    NAME,
    WEIGHTS,
    Entry,
    Fingerprint,
    Manifest,
    differences,
    digest,
)
from mrp_lightning.processes import ALONE, Processes
from mrp_lightning.records.block_result import BlockResult
from mrp_lightning.records.grid_file import load_parameters
from mrp_lightning.storage.files import (
    flush,
    hidden_sibling,
    make_directories,
    move_durably,
    output_path,
    sha256_of,
)
from mrp_lightning.targets.layers import Layer

if TYPE_CHECKING:
    from mrp_lightning.models.streaming import StreamedBlocks

log = logging.getLogger(__name__)

_LOCK = ".lock"
_OWN = re.compile(
    r"(manifest\.json|(block-\d{5,}(-grid)?|kept-[a-z0-9]+)\.safetensors)(\.partial)?"
    r"|\.tmp\w{6}"
)
"""Matches the names of a journal's files; those of `.tmp` are unfinished ones of safetensors."""


def journal_path(save_dir: str | PathLike[str]) -> Path:
    """Return the path of the journal of a run into `save_dir`: `.NAME.partial` next to it."""
    return hidden_sibling(output_path(save_dir).resolve(), ".partial")


def require_free(save_dir: str | PathLike[str]) -> None:
    """Raise if another process holds the journal of a run; see `_hold`."""
    path = journal_path(save_dir)
    # Without a lock file nobody holds the journal, and there may be no directory to lock yet.
    if (path / _LOCK).exists():
        _hold(path).release()


def remove_journal(save_dir: str | PathLike[str]) -> None:
    """Delete the journal of a finished run, unless another process holds it."""
    path = journal_path(save_dir)
    if path.is_dir():
        _remove(path, FileLock(path / _LOCK))


def _unwritable(path: Path, error: Exception) -> SaveError:
    return SaveError(
        f"The journal {path} cannot be written: {error}. Make room there, or name another "
        "`save_dir`."
    )


def _hold(path: Path) -> FileLock:
    """Return the taken lock of a journal; raise a `JournalError` if another process holds it."""
    try:
        lock = FileLock(path / _LOCK)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise JournalError(
            f"Another process is making this run: it holds the journal {path}. Wait for it, end "
            "it, or name another `save_dir`."
        ) from error
    except OSError as error:
        raise _unwritable(path, error) from error
    return lock


def _remove(path: Path, lock: FileLock) -> None:
    """Delete a journal's files, and its directory if nothing else is in it, unless it is locked."""
    with suppress(Timeout, OSError):
        lock.acquire(timeout=0)
        _empty(path)
        # The lock is held to the end: no run starts in a directory that is being emptied.
        others = sorted(file.name for file in path.iterdir() if file.name != _LOCK)
        if others:
            log.warning("%s is not ours, and stays in %s.", ", ".join(others), path)
        else:
            shutil.rmtree(path, ignore_errors=True)
        lock.release(force=True)


def _empty(path: Path) -> None:
    """Delete the files of a journal but its lock, which must be held; links are not followed."""
    (path / NAME).unlink(missing_ok=True)  # first: blocks count only if the manifest names them
    # Invariant: no manifest on the disk names a deleted file. After a power failure in between,
    # files are left that nothing names.
    flush(path)
    for file in path.iterdir():
        if _OWN.fullmatch(file.name) and not file.is_dir():
            file.unlink()


class Journal(AbstractContextManager["Journal"]):
    """The journal of one run, locked from `Journal.open` until `close`.

    The files are on the disk of process 0. All processes call `in`, `read`, `restore`, `write` and
    `kept` in the same order. In processes other than 0, `manifest` is that at the time of opening.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        lock: FileLock | None,
        processes: Processes = ALONE,
        streamed: "StreamedBlocks | None" = None,
    ) -> None:
        self.path, self.manifest, self._lock = path, manifest, lock
        self._processes, self._streamed = processes, streamed
        self._damaged: set[int] = set()
        # `_go_on` moves these start times back by the durations of earlier runs.
        self._start, self._cpu_start = time.monotonic(), time.process_time()

    @classmethod
    def open(
        cls,
        save_dir: str | PathLike[str],
        fingerprint: Fingerprint,
        *,
        resume: bool = True,
        about: Mapping[str, Any] | None = None,
        processes: Processes = ALONE,
        streamed: "StreamedBlocks | None" = None,
    ) -> Self:
        """Start the journal of a run, or resume one of the same fingerprint.

        The number of processes must be the same: sums over other shares round differently.

        Args:
            save_dir: The directory that the run will write.
            fingerprint: The facts that decide the result.
            resume: Whether an existing journal is resumed. Otherwise a new one replaces it.
            about: Facts about the run for its report; see `Manifest`.
            processes: The processes of the run; all of them must call this.
            streamed: The blocks that stay in files; see `write`.

        Raises:
            JournalError: A live process holds the journal; its manifest is damaged, and it has
                blocks; or it is of another run, and has blocks or differs in the weights of the
                model. The message names all differences.
            SaveError: The journal cannot be written, or is a link.
        """
        path = journal_path(save_dir)
        # Only process 0 reads the disk; the others receive the manifest, at the end below.
        if processes.rank:
            return cls(path, processes.all(None)[0], None, processes)
        if path.is_symlink():
            raise SaveError(f"The journal {path} is a link, and is not followed. Move it away.")
        try:
            make_directories(path)
        except OSError as error:
            raise _unwritable(path, error) from error
        # From here on the lock is held: any error has to release it.
        lock = _hold(path)
        try:
            journal = cls(path, Manifest.new(fingerprint, about or {}), lock, processes, streamed)
            if resume and (path / NAME).exists():
                journal._go_on()
            else:
                journal._start_afresh()
            processes.all(journal.manifest)
        except BaseException:
            lock.release()
            raise
        return journal

    def __contains__(self, step: int) -> bool:
        """Return whether a step is done and its files are undamaged, the same in all processes."""
        # Process 0 decides for all: the manifests of the others are as old as the opening.
        is_whole = step in self.manifest.shards and step not in self._damaged
        return bool(self._processes.all(is_whole)[0])

    def read(self, step: int) -> BlockResult | None:
        """Read the result of a step, `None` if the step is not done or its files are damaged.

        Weights are on the CPU; with several processes, on the device of `Processes`.
        """
        if step not in self:
            return None
        result = None if self._processes.rank else self._load(step)
        if self._processes.size == 1:
            return result
        # The weights follow one by one, since all of them may not fit into a message.
        stored = {} if result is None else result.weights
        # Shapes and dtypes go first, so that the others can make the tensors to receive into.
        kinds = {name: (weight.shape, weight.dtype) for name, weight in stored.items()}
        header = None if result is None else (replace(result, weights={}), kinds)
        result, kinds = self._processes.all(header)[0]
        weights = {}
        for name, (shape, dtype) in kinds.items():
            weight = stored[name] if stored else torch.empty(shape, dtype=dtype)
            weight = weight.to(self._processes.device)
            weights[name] = self._processes.like_first_(weight)
        return replace(result, weights=weights)

    def restore(
        self,
        step: int,
        layers: Sequence[Layer],
        before_change: Callable[[Layer], None],
        tuned: Sequence[Layer] = (),
    ) -> BlockResult | None:
        """Write the result of a step into its layers by `BlockResult.restore`, and return it.

        A streamed block is read from its shard from then on. The result is that of `read`.
        """
        result = self.read(step)
        if result is None:
            return None
        if (streamed := self._streamed_of(result)) is not None:
            for layer in [*result.pruned(layers), *tuned]:
                before_change(layer)
            streamed.take(result.name, result.weights)
            streamed.read_from(result.name, self.file(step))
        else:
            result.restore(layers, before_change, tuned)
        return result

    def _streamed_of(self, result: BlockResult) -> "StreamedBlocks | None":
        is_streamed = self._streamed is not None and result.name in self._streamed.blocks
        return self._streamed if is_streamed else None

    def _load(self, step: int) -> BlockResult:
        grid_file = self.path / self.manifest.shards[step].grid_file
        return BlockResult.load(self.file(step)).with_grid(load_parameters(grid_file))

    def file(self, step: int) -> Path:
        """Return the file of a finished step."""
        return self.path / self.manifest.shards[step].file

    def write(self, step: int, result: BlockResult) -> None:
        """Store the result of a step: a block, or last the layers outside of the blocks.

        Process 0 alone writes. Of a streamed block, which must be in memory (`pinned`), all tensors
        are stored, and it is read from its shard from then on. If the step was done before with
        other weights, all later steps are dropped. After a SaveError all earlier shards stay valid.
        """
        if self._lock is None:
            return
        if (streamed := self._streamed_of(result)) is not None:
            # Whole blocks, since the shards become the files of the checkpoint.
            result = replace(result, weights=streamed.tensors(result.name))
        result = result.on_cpu()
        file = self.path / f"block-{step:05}.safetensors"
        # Invariant: every shard that the manifest names is whole. So the files come first, each
        # renamed when it is on the disk, and the manifest last: a process that dies in between
        # leaves files that nothing names, and the block is pruned again.
        try:
            checksum = self._store(file, result.save)
            entry = Entry(file.name, checksum, digest(sorted(result.weights.items())))
            if result.grid:
                grid_file = self.path / entry.grid_file
                entry = replace(entry, grid=self._store(grid_file, result.save_grid))
            # Entry and times go to the disk in one write, so that they belong to the same blocks.
            self._keep(step, entry)
            self.manifest.seconds = time.monotonic() - self._start
            self.manifest.cpu_seconds = time.process_time() - self._cpu_start
            self.manifest.save(self.path)
        except (OSError, SafetensorError) as error:
            raise SaveError(
                f"{result.name or 'What was done'} is pruned, but could not be kept in the journal "
                f"{self.path}: {error}. Make room there, and start the same run again: it goes on "
                "at this block."
            ) from error
        # The source has dense weights: from now on the block is read from its shard.
        if streamed is not None:
            streamed.read_from(result.name, file)

    def _store(self, file: Path, save: Callable[[Path], None]) -> str:
        """Write a file by `save`, move it into place when it is complete; return its checksum."""
        partial = file.with_name(f"{file.name}.partial")
        try:
            partial.unlink(missing_ok=True)  # else a link would be followed
            save(partial)
            # Of the file, not of the tensors in memory: a resumed run reads the file.
            checksum = sha256_of(partial)
            move_durably(partial, file)
        except (OSError, SafetensorError):
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
        return checksum

    def kept(self, name: str, compute: Callable[[], Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        """Return tensors that the run computes once, and that a resumed run reads from the journal.

        All processes must call this, and `compute` is called by all of them or by none. If it is
        called, its result is returned unchanged; tensors that are read are on the CPU. The name is
        of lowercase letters and digits.
        """
        # Process 0 decides for all: only it has the disk, and `compute` may be a collective call.
        is_stored = bool(self._processes.all(name in self.manifest.kept)[0])
        if is_stored:
            stored = load_file(_kept_file(self.path, name)) if self._lock is not None else {}
            return dict(self._processes.all(stored)[0])
        computed = compute()
        if self._lock is not None:
            tensors = {key: tensor.contiguous() for key, tensor in computed.items()}
            file = _kept_file(self.path, name)
            try:
                self.manifest.kept[name] = self._store(file, partial(save_file, tensors))
                self.manifest.save(self.path)
            except (OSError, SafetensorError) as error:
                raise _unwritable(self.path, error) from error
        return computed

    def close(self) -> None:
        """Release the lock, so that another process can resume the run."""
        if self._lock is not None:
            self._lock.release()

    def remove(self) -> None:
        """Delete the journal, unless another process has resumed it."""
        if self._lock is not None:
            _remove(self.path, self._lock)

    def __exit__(self, *_: object) -> None:
        """Close the journal."""
        self.close()

    def _go_on(self) -> None:
        try:
            earlier = Manifest.load(self.path)
        except JournalError:
            # A damaged manifest without blocks costs nothing. About blocks the user decides.
            if any(self.path.glob("block-*.safetensors")):
                raise
            return self._start_afresh()
        differing = differences(earlier.fingerprint, self.manifest.fingerprint)
        same_weights = earlier.fingerprint.get(WEIGHTS) == self.manifest.fingerprint.get(WEIGHTS)
        # Weights that differ may be those that the interrupted run has changed already: a fresh run
        # would take them for dense.
        if differing and not earlier.shards and same_weights:
            # Nothing is lost: no block is finished, and the model of this process is unchanged.
            return self._start_afresh()
        if differing:
            listed = "\n".join(f"  {difference}" for difference in differing)
            abouts = (self.manifest.about, earlier.about)
            model, other = (about.get("config", {}).get("base_model") for about in abouts)
            apart = "with other settings than this one"
            if not same_weights and other != model:
                apart = f"of the model {other}, and this one prunes {model}"
            raise JournalError(
                f"{self.path} is the journal of an unfinished run, "
                f"{counted(len(earlier.shards), 'block')} far, {apart}. Set "
                "`resume: false` (`prune --restart`) to give it up and start afresh, name another "
                "directory, or go on with the model and the settings it was started with. "
                f"What differs:\n{listed}"
            )
        # The facts for a report are those of the run that goes on.
        earlier.about = self.manifest.about
        self.manifest = earlier
        self._start -= earlier.seconds
        self._cpu_start -= earlier.cpu_seconds
        # All checksums are compared at the start: which blocks are damaged decides, by `in`, which
        # outputs the walk computes.
        for step, entry in earlier.shards.items():
            for name, checksum in entry.checksums.items():
                if not self._is_whole(name, checksum):
                    file = self.path / name
                    log.warning("%s is damaged or missing. Its block is pruned again.", file)
                    self._damaged.add(step)
        for name, checksum in list(earlier.kept.items()):
            file = _kept_file(self.path, name)
            if not self._is_whole(file.name, checksum):
                # All blocks were pruned by it: another machine may compute it otherwise.
                log.warning("%s is damaged or missing. All blocks are pruned again.", file)
                del earlier.kept[name]
                self._damaged.update(earlier.shards)
        return None

    def _is_whole(self, name: str, checksum: str) -> bool:
        file = self.path / name
        return file.is_file() and sha256_of(file) == checksum

    def _keep(self, step: int, entry: Entry) -> None:
        """Add an entry. If it differs from an earlier, damaged one, drop all later entries."""
        earlier = self.manifest.shards.get(step)
        # Later blocks were calibrated on the outputs of the lost weights. Equal bits, the rule on
        # one machine, have equal outputs; other bits make all later shards those of another run.
        if earlier is not None and earlier.weights != entry.weights:
            # Steps are numbered in the order of the walk.
            kept = {k: shard for k, shard in self.manifest.shards.items() if k <= step}
            if len(kept) < len(self.manifest.shards):
                log.warning("The block came out otherwise. Those after it are pruned again.")
            self.manifest.shards = kept
        self.manifest.shards[step] = entry
        self._damaged.discard(step)

    def _start_afresh(self) -> None:
        _empty(self.path)
        try:
            self.manifest.save(self.path)
        except OSError as error:
            raise _unwritable(self.path, error) from error


def read_kept(save_dir: str | PathLike[str], name: str) -> dict[str, Tensor] | None:
    """Return a value of `Journal.kept` that an unfinished run into `save_dir` has stored.

    Return `None` if there is none, or if its file or the journal is damaged.
    """
    path = journal_path(save_dir)
    file = _kept_file(path, name)
    try:
        is_whole = sha256_of(file) == Manifest.load(path).kept[name]
        return load_file(file) if is_whole else None
    except (OSError, JournalError, KeyError):
        return None


def _kept_file(path: Path, name: str) -> Path:
    return path / f"kept-{name}.safetensors"
