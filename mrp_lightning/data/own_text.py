"""Windows that the model writes itself: by all processes together, and kept in files."""

import hashlib
import json
import logging
import re
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from mrp_lightning.calibration.offload import Offload
from mrp_lightning.data.sampling import (
    Sampling,
    bytes_a_window,
    require_writer,
    seconds_a_token,
    windows_at_once,
    write,
)
from mrp_lightning.environment import is_out_of_memory, progress_log
from mrp_lightning.errors import DataError, OptionError
from mrp_lightning.files import make_directories, move_durably
from mrp_lightning.journal.fingerprint import forward_of
from mrp_lightning.journal.manifest import digest
from mrp_lightning.loop.distributed import all_or_none, processes_of
from mrp_lightning.loop.module_parts import language_models, streamed_blocks
from mrp_lightning.loop.progress import Seldom, nested_progress, roughly
from mrp_lightning.loop.signals import Interrupted
from mrp_lightning.loop.trainer import callbacks_that_prune
from mrp_lightning.processes import Processes
from mrp_lightning.pruning.estimate import Estimate
from mrp_lightning.targets.blocks import find_blocks
from mrp_lightning.text.windows import Cutter

log = logging.getLogger(__name__)

DIRECTORY = ".own-text"
"""The directory of kept windows, beside the runs that are calibrated on them. It may be deleted."""
_NAME = re.compile(r"windows-([0-9]{1,9})-([0-9]{1,9})\.safetensors")
_RULE = 1
"""By which rule tokens are drawn: raised when the same sampling gives other windows."""


def key_of(sampling: Sampling, configuration: str, weights: Iterator[tuple[str, Tensor]]) -> str:
    """A name for the windows of a sampling of one model.

    Args:
        sampling: What is written.
        configuration: What the model computes with its weights, as a text.
        weights: All of its tensors, by name, which are read once.
    """
    about = {
        "rule": _RULE,
        "length": sampling.length,
        "seed": sampling.seed,
        "prefix": sampling.prefix.tolist(),
        "first": None if len(sampling.prefix) else digest([("first", sampling.first)]),
        "configuration": configuration,
        "weights": digest(weights),
    }
    text = json.dumps(about, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class KeptWindows:
    """The windows of one sampling that are written, in a file for each batch.

    Args:
        directory: Where they are, `None` to keep none.
        length: Tokens a window.
    """

    def __init__(self, directory: Path | None, length: int) -> None:
        self.directory, self.length = directory, length

    def read(self, count: int) -> dict[int, Tensor]:
        """Those of the first windows (length,) that are kept, by number, in whatever batches."""
        found: dict[int, Tensor] = {}
        for file in sorted(self.directory.glob("windows-*")) if self.directory else ():
            batch = _NAME.fullmatch(file.name)
            if batch is None:
                continue
            windows = range(int(batch[1]), int(batch[2]))
            if windows.start < count and (written := self._read(file, windows)) is not None:
                found.update(zip(windows, written, strict=True))
        return {n: window for n, window in found.items() if n < count}

    def _read(self, file: Path, windows: range) -> Tensor | None:
        """The windows (windows, length) of a file, `None` where they are not there whole."""
        try:
            found = load_file(file)["input_ids"]
        except (OSError, SafetensorError, KeyError) as error:
            log.warning("%s is damaged (%s): these windows are written again.", file, error)
            return None
        is_whole = found.shape == (len(windows), self.length) and found.dtype == torch.int64
        return found if is_whole else None

    def keep(self, windows: range, written: Tensor) -> None:
        """Write a batch to its file, in one step.

        Raises:
            OSError: It cannot be written.
        """
        if self.directory is None:
            return
        make_directories(self.directory)
        file = self.directory / f"windows-{windows.start}-{windows.stop}.safetensors"
        partial = file.with_name(f".{file.name}.{token_hex(4)}.partial")
        try:
            save_file({"input_ids": written.contiguous()}, partial)
            move_durably(partial, file)
        finally:
            partial.unlink(missing_ok=True)


class WritingListener:
    """Is told how the writing goes. This one does nothing."""

    def start(self, mine: int, everywhere: int) -> None:
        """Hear how many windows this process is going to write, and how many all of them."""

    def move(self, windows: int, place: int) -> None:
        """Hear, often, that so many windows have so many tokens now. What it raises ends all."""

    def finish(self, windows: int) -> None:
        """Hear that a batch of so many windows is written and kept."""


def write_together(
    model: PreTrainedModel,
    sampling: Sampling,
    count: int,
    kept: KeptWindows,
    processes: Processes,
    listener: WritingListener,
) -> Tensor:
    """Windows that a model writes, without those that are kept; all processes call this.

    Args:
        model: The model, the same in all processes.
        sampling: What is written.
        count: The number of windows.
        kept: Where batches are kept; machines need not share it.
        processes: The processes, each of which writes some of the batches.
        listener: Is told how it goes.

    Returns:
        The token ids (count, length), int64, the same in all processes.

    Raises:
        DataError: What the model writes is nothing to calibrate on.
        OSError: A batch cannot be kept.
    """
    found = _of_all(processes, kept.read(count))
    missing = [n for n in range(count) if n not in found]
    room = processes.numbers(windows_at_once(model, sampling.length))
    batches = _batches(missing, int(min(most for (most,) in room)), processes.size)
    mine = batches[processes.rank :: processes.size]
    written: dict[int, Tensor] = {}
    if mine:
        listener.start(sum(map(len, mine)), len(missing))
    for batch in mine:
        windows = _write(model, sampling, batch, listener)
        kept.keep(batch, windows)
        listener.finish(len(batch))
        written.update(zip(batch, windows, strict=True))
    found |= _of_all(processes, written)
    return torch.stack([found[n] for n in range(count)])


def _batches(windows: list[int], most: int, processes: int) -> list[range]:
    """Windows that follow each other, in batches about as large, so that none waits for another."""
    rounds = -(-len(windows) // (most * processes))
    size = -(-len(windows) // max(1, rounds * processes))
    batches: list[range] = []
    for n in windows:
        if batches and batches[-1].stop == n and len(batches[-1]) < size:
            batches[-1] = range(batches[-1].start, n + 1)
        else:
            batches.append(range(n, n + 1))
    return batches


def _write(
    model: PreTrainedModel, sampling: Sampling, windows: range, listener: WritingListener
) -> Tensor:
    """Write a batch, in halves where memory is too small for it."""
    try:
        return write(model, sampling, windows, lambda place: listener.move(len(windows), place))
    except (MemoryError, RuntimeError) as error:
        if len(windows) == 1 or not is_out_of_memory(error):
            raise
    half = len(windows) // 2
    parts = windows[:half], windows[half:]
    return torch.cat([_write(model, sampling, part, listener) for part in parts])


def _of_all(processes: Processes, mine: dict[int, Tensor]) -> dict[int, Tensor]:
    """The windows that any process has, by number."""
    plain = {n: window.tolist() for n, window in mine.items()}
    gathered: Sequence[dict[int, Any]] = processes.all(plain)
    every = {n: window for theirs in gathered for n, window in theirs.items()}
    return {n: torch.tensor(window).long() for n, window in every.items()}


_say = rank_zero_only(progress_log.info)
_LONGEST = 256
"""Tokens of a piece: the longer a model writes, the farther it drifts from its training text."""
_TIMED_TOKENS = 16
"""By how many tokens of a batch the time of all is estimated."""


def writer_of(trainer: Trainer | None) -> PreTrainedModel:
    """The model of a trainer that is going to write its own calibration text.

    Raises:
        DataError: There is no trainer that runs a model.
        OptionError: Its blocks stay in files.
        TargetError: It cannot write text.
    """
    module = None if trainer is None else trainer.lightning_module
    if module is None:
        raise DataError(
            "`calibration: self` is written by the model that a trainer runs. Give the data module "
            "to `Trainer.predict(model, datamodule=…)`."
        )
    if streamed_blocks(module) is not None:
        raise OptionError(
            "`calibration: self` with `streaming`: every block would be read from its file for "
            "every token. Write the text with the model in memory, on another machine if need be, "
            "or name a text in `data.calibration` or `data.train_files`."
        )
    models = list(language_models(module).values())
    model = models[0] if len(models) == 1 else None
    require_writer(model)
    assert model is not None
    return model


def own_windows(
    trainer: Trainer | None, tokenizer: Any, length: int, seed: int, count: int
) -> Tensor:
    """Windows that the model of a trainer writes, or those that it wrote before.

    Each is made of pieces of at most 256 tokens, all as long, each from the start of a text. These
    are kept beside the run, in a directory that all runs beside it share.

    Args:
        trainer: The trainer, which has set up its strategy.
        tokenizer: That of the model, which says what stands before a text; `None` if it has none.
        length: Tokens a window.
        seed: Seed of what is drawn.
        count: The number of windows.

    Returns:
        The token ids (count, length), int64, the same in all processes.

    Raises:
        DataError: There is no trainer that runs a model, or what it writes is nothing to calibrate
            on.
        Interrupted: SIGTERM came.
    """
    model = writer_of(trainer)
    assert trainer is not None
    processes = processes_of(trainer)
    pieces, each = _pieces(length)
    sampling = _sampling(model, tokenizer, each, seed)
    with all_or_none(processes), _on_device(trainer), ExitStack() as held:
        kept = KeptWindows(_directory(trainer, model, sampling), each)
        listener = _Listener(trainer, each, held)
        written = write_together(model, sampling, count * pieces, kept, processes, listener)
    return written.reshape(count, -1)[:, :length]


def estimate_writing(
    model: PreTrainedModel, tokenizer: Any, length: int, seed: int, count: int
) -> Estimate:
    """Estimate what `own_windows` takes in one process, which writes a few tokens to see it.

    Args:
        model: The model, on the device where it is going to write.
        tokenizer: That of the model; `None` if it has none.
        length: Tokens a window.
        seed: Seed of what is drawn.
        count: The number of windows.

    Raises:
        DataError: Its predictions are not finite.
        TargetError: It cannot write text.
    """
    require_writer(model)
    pieces, each = _pieces(length)
    sampling = _sampling(model, tokenizer, each, seed)
    at_once = min(windows_at_once(model, each), count * pieces)
    steps = each * -(-count * pieces // at_once)
    seconds = steps * seconds_a_token(model, sampling, range(at_once))
    return Estimate(seconds, at_once * bytes_a_window(model, each))


def _pieces(length: int) -> tuple[int, int]:
    """How many pieces a window of a length is made of, and the tokens of each."""
    pieces = -(-length // _LONGEST)
    return pieces, -(-length // pieces)


def _sampling(model: PreTrainedModel, tokenizer: Any, length: int, seed: int) -> Sampling:
    """Begin as the tokenizer begins a text, or with any token that is not a special one."""
    prefix = torch.tensor([]).long()
    known = list(range(model.config.get_text_config().vocab_size))
    if tokenizer is not None:
        prefix = Cutter.of(tokenizer, length, "window").prefix
        special = set(tokenizer.all_special_ids)
        known = [token for token in known[: len(tokenizer)] if token not in special]
    return Sampling(length=length, seed=seed, prefix=prefix, first=torch.tensor(known).long())


def _directory(trainer: Trainer, model: PreTrainedModel, sampling: Sampling) -> Path | None:
    """Where the windows are kept, `None` where the run keeps nothing; all processes call this."""
    places = [callback.kept_beside for callback in callbacks_that_prune(trainer)]
    beside = next((place for place in places if place is not None), None)
    if beside is None or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return None
    processes, key = processes_of(trainer), None
    if processes.rank == 0:
        held = chain(model.named_parameters(), model.named_buffers())
        key = key_of(sampling, forward_of(model.config), held)
    return Path(beside).parent / DIRECTORY / str(processes.all(key)[0])


@contextmanager
def _on_device(trainer: Trainer) -> Iterator[None]:
    """Bring the blocks that a callback keeps on the CPU to the device, each while it runs."""
    if not any(callback.settings.offload for callback in callbacks_that_prune(trainer)):
        yield
        return
    module: LightningModule = trainer.lightning_module
    blocks = [block.module for block in find_blocks(module)]
    with Offload(blocks, trainer.strategy.root_device).active():
        yield


class _Listener(WritingListener):
    """Shows how far this process is, says once how long it takes, and ends where that is asked.

    Args:
        trainer: The trainer.
        length: Tokens a window.
        held: What is left when all is written.
    """

    def __init__(self, trainer: Trainer, length: int, held: ExitStack) -> None:
        self._trainer, self._length, self._held = trainer, length, held
        self._is_time, self._finished, self._is_estimated = Seldom(), 0, False

    def start(self, mine: int, everywhere: int) -> None:
        """Begin to count the time."""
        self._mine, self._start = mine * self._length, time.monotonic()
        self._what = f"{everywhere} pieces of {self._length} tokens of the model's own text"
        self._show = self._held.enter_context(
            nested_progress(self._trainer, self._mine, "own text")
        )
        self._held.callback(self._end)

    def move(self, windows: int, place: int) -> None:
        """Move the bar, but not more often than anybody can see."""
        if self._trainer.received_sigterm:
            raise Interrupted(signal.SIGTERM)
        done, spent = self._finished + windows * place, time.monotonic() - self._start
        left = spent * max(0, self._mine / done - 1)
        if place >= _TIMED_TOKENS and not self._is_estimated:
            self._is_estimated = True
            _say(f"Writing {self._what} takes about {roughly(spent + left)}.")
        if self._is_time():
            self._show(done, f"own text · about {roughly(left)} left")

    def finish(self, windows: int) -> None:
        """Count a batch that is kept."""
        self._finished += windows * self._length

    def _end(self) -> None:
        if self._finished == self._mine:
            _say(f"Wrote {self._what} in {roughly(time.monotonic() - self._start)}.")
