"""Calibration text that the model writes itself, in all processes, and stores in files."""

import hashlib
import json
import logging
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from secrets import token_hex

import torch
from lightning.pytorch import Trainer
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
    windows_at_once,
    write,
)
from mrp_lightning.environment import progress_log
from mrp_lightning.errors import DataError, OptionError
from mrp_lightning.journal.manifest import digest, forward_of
from mrp_lightning.loop.distributed import fail_together, processes_of
from mrp_lightning.loop.module_parts import language_models, streamed_blocks
from mrp_lightning.loop.progress import ProgressReporter, roughly
from mrp_lightning.loop.trainer import callbacks_that_prune
from mrp_lightning.memory import is_out_of_memory
from mrp_lightning.processes import Processes
from mrp_lightning.pruning.estimate import Estimate
from mrp_lightning.signals import Interrupted
from mrp_lightning.storage.files import make_directories, move_durably
from mrp_lightning.targets.blocks import find_blocks
from mrp_lightning.text.windows import Cutter

log = logging.getLogger(__name__)

DIRECTORY = ".own-text"
"""The name of the directory of stored windows, next to the runs that used them; a cache."""
_FILE = re.compile(r"windows-([0-9]{1,9})-([0-9]{1,9})\.safetensors")
_RULE = 1
"""The version of the sampling code, raised when the same `Sampling` gives other windows."""
_LONGEST = 256
"""The most tokens of a piece: a model that writes on drifts away from its training text."""
_TIMED_TOKENS = 16
"""Number of tokens of each window of the first batch after which the time is estimated."""
_MEASURED_TOKENS = 3
"""Number of tokens written to measure the time of one; the first includes set-up."""

_Report = Callable[[int, int], None]
"""Called with the number of finished windows, and that of tokens in the current batch."""
_Reporting = Callable[[list[range], int], AbstractContextManager[_Report]]
"""Called with the batches of this process and the number of all windows: a context that reports."""


class OwnText:
    """Calibration windows that the model of a trainer writes.

    Each window consists of pieces of equal length, at most 256 tokens, and each piece is the
    start of a text. Pieces are stored next to the run's directory and used again by other runs
    there.

    Args:
        trainer: The trainer, which has set up its strategy; `None` if there is none yet.
    """

    name = "the model's own text"

    def __init__(self, trainer: Trainer | None) -> None:
        self._trainer = trainer

    def writer(self) -> PreTrainedModel:
        """Return the trainer's language model.

        Raises:
            DataError: There is no trainer, or it runs no module.
            TargetError: There is not one Hugging Face model, or it is no causal language model.
            OptionError: The model is streamed from files, block by block.
        """
        module = None if self._trainer is None else self._trainer.lightning_module
        if module is None:
            raise DataError(
                "`calibration: self` is written by the model that a trainer runs. Give the data "
                "module to `Trainer.predict(model, datamodule=…)`."
            )
        if streamed_blocks(module) is not None:
            raise OptionError(
                "`calibration: self` with `streaming`: every block would be read from its file for "
                "every token. Write the text with the model in memory, on another machine if need "
                "be, or name a text in `calibration` or `train_files`."
            )
        models = list(language_models(module).values())
        return require_writer(models[0] if len(models) == 1 else None)

    def draw(self, cutter: Cutter, count: int, seed: int) -> Tensor:
        """Return windows (count, length), int64, on the CPU: the same in all processes; collective.

        Raises:
            DataError: The model's text is degenerate or not finite. `writer` raises more.
            OSError: Windows cannot be stored.
            Interrupted: SIGTERM came.
        """
        model, trainer = self.writer(), self._trainer
        assert trainer is not None
        pieces, sampling = _pieces(model, cutter, seed)
        processes = processes_of(trainer)
        reporting = partial(_reported, trainer, sampling.length)
        with fail_together(processes), _on_device(trainer):
            directory = _directory(trainer, model, sampling)
            total = count * pieces
            written = write_together(model, sampling, total, directory, processes, reporting)
        return written.reshape(count, -1)[:, : cutter.length]


def estimate_writing(model: PreTrainedModel, cutter: Cutter, seed: int, count: int) -> Estimate:
    """Estimate the cost of `OwnText.draw` in one process, by writing a few tokens of a batch.

    The model must be on the device where it will write. The estimate is a little low, since later
    tokens attend to more tokens. `require_writer` and `write` list the errors.
    """
    pieces, sampling = _pieces(require_writer(model), cutter, seed)
    # The batch has its full number of windows, and only its length is cut: the time of a token
    # depends on how many windows share it.
    at_once = min(windows_at_once(model, sampling.length), count * pieces)
    length = min(sampling.length, max(len(sampling.prefix), 1) + _MEASURED_TOKENS)
    times: list[float] = []
    write(
        model,
        replace(sampling, length=length),
        range(at_once),
        lambda _: times.append(time.perf_counter()),
    )
    # The least of the intervals between two tokens: the first holds the set-up, and noise only
    # adds.
    seconds_a_token = min((b - a for a, b in pairwise(times)), default=0.0)
    seconds = seconds_a_token * sampling.length * -(-count * pieces // at_once)
    return Estimate(seconds, at_once * bytes_a_window(model, sampling.length))


def _pieces(model: PreTrainedModel, cutter: Cutter, seed: int) -> tuple[int, Sampling]:
    """Return the number of pieces of a window, and the sampling of each piece.

    A piece begins with the tokens that the tokenizer adds at the start of a text, or, if there
    are none, with a random token that is not special.
    """
    # pieces·length ≥ the window's length; `draw` cuts off the surplus, fewer than `pieces` tokens.
    pieces = -(-cutter.length // _LONGEST)
    length = -(-cutter.length // pieces)
    prefix = torch.tensor([]).long()
    first = list(range(model.config.get_text_config().vocab_size))
    if (tokenizer := cutter.tokenizer) is not None:
        prefix = Cutter(tokenizer, length).prefix
        special = set(tokenizer.all_special_ids)
        # An embedding may be padded to a round size: rows beyond the tokenizer's tokens were never
        # trained.
        first = [token for token in first[: len(tokenizer)] if token not in special]
    first_tokens = torch.tensor(first).long()
    return pieces, Sampling(length=length, seed=seed, prefix=prefix, first=first_tokens)


def _directory(trainer: Trainer, model: PreTrainedModel, sampling: Sampling) -> Path | None:
    """Return the directory of stored windows, `None` if the run stores none; a collective call."""
    directories = [callback.output_directory for callback in callbacks_that_prune(trainer)]
    run = next((directory for directory in directories if directory is not None), None)
    if run is None or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return None
    # Process 0 alone hashes the weights, and all take its key: a hash reads the whole model, which
    # is the same in all processes.
    processes, key = processes_of(trainer), None
    if processes.rank == 0:
        tensors = chain(model.named_parameters(), model.named_buffers())
        key = key_of(sampling, forward_of(model.config), tensors)
    return Path(run).parent / DIRECTORY / str(processes.all(key)[0])


def key_of(sampling: Sampling, configuration: str, weights: Iterator[tuple[str, Tensor]]) -> str:
    """Return a directory's name: 16 hex digits of the hash of a sampling and a model."""
    # All that decides the tokens: windows are used again only by runs that would write the same
    # ones. Their number is left out, as window n depends on the seed and n alone.
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


@contextmanager
def _on_device(trainer: Trainer) -> Iterator[None]:
    """Move all offloaded blocks to the device, if they fit.

    Otherwise each block is moved for each of its forwards, one for every token of a batch.
    """
    if not any(callback.settings.offload for callback in callbacks_that_prune(trainer)):
        yield
        return
    blocks = [block.module for block in find_blocks(trainer.lightning_module)]
    offload = Offload(blocks, trainer.strategy.root_device)
    with offload.active(), offload.resident() as fits:
        if not fits:
            log.warning(
                "`calibration: self` with `offload`: %s does not hold all blocks, so that every "
                "token of a batch brings %.1f GB to it. If that takes too long, write the text "
                "where they fit, or name a text in `data.calibration`.",
                offload.device,
                offload.num_bytes / 1e9,
            )
        yield


def _unreported(finished: int, tokens: int) -> None:
    pass


@contextmanager
def _reported(
    trainer: Trainer, length: int, batches: list[range], windows: int
) -> Iterator[_Report]:
    """Show the tokens written in the trainer's bar, log the time once, and end at SIGTERM."""
    if not batches:
        yield _unreported
        return
    report = rank_zero_only(progress_log.info)
    text = f"{windows} pieces of {length} tokens of the model's own text"
    total = length * sum(map(len, batches))
    reporter, is_estimated = ProgressReporter(trainer), False
    with reporter.bar(total, "own text"):

        def move(finished: int, tokens: int) -> None:
            nonlocal is_estimated
            if trainer.received_sigterm:
                raise Interrupted(signal.SIGTERM)
            done, spent = finished * length + tokens, reporter.elapsed()
            seconds_left = spent * max(0, total / done - 1)
            if not is_estimated and done >= _TIMED_TOKENS * len(batches[0]):
                is_estimated = True
                report(f"Writing {text} takes about {roughly(spent + seconds_left)}.")
            if reporter.is_due():
                reporter.show(done, f"own text · about {roughly(seconds_left)} left")
            reporter.log_seldom(
                f"own text · {done / total:.0%} · about {roughly(seconds_left)} left"
            )

        yield move
    report(f"Wrote {text} in {roughly(reporter.elapsed())}.")


def write_together(
    model: PreTrainedModel,
    sampling: Sampling,
    count: int,
    directory: Path | None,
    processes: Processes,
    reporting: _Reporting = lambda *_: nullcontext(_unreported),
) -> Tensor:
    """Return windows of the model's own text, stored or new; a collective call of all processes.

    Args:
        model: The model, the same in all processes.
        sampling: The draws of the tokens.
        count: The number of windows.
        directory: The directory for one file a batch; `None` to store none. Machines need not share
            it.
        processes: The processes, which share the batches.
        reporting: Opens the progress report of this process.

    Returns:
        The token ids (count, length), int64, the same in all processes.

    Raises:
        DataError: The model's text is degenerate, or its logits are not finite.
        OSError: A batch cannot be stored.
    """
    length = sampling.length
    # 1. All processes learn the stored windows of all: machines may have different directories.
    # 2. The smallest room decides the size of a batch, so that all divide the missing windows in
    #    the same way without further messages.
    # 3. Batches are dealt by rank; each is stored at once, so that a killed run loses the current
    #    one alone.
    # 4. The results are gathered by number, so that the order does not depend on the processes.
    windows = _of_all(processes, _read_kept(directory, length, count))
    missing = [n for n in range(count) if n not in windows]
    room = processes.numbers(windows_at_once(model, length))
    batches = _batches(missing, int(min(capacity for (capacity,) in room)), processes.size)
    own_batches = batches[processes.rank :: processes.size]
    written: dict[int, Tensor] = {}
    with reporting(own_batches, len(missing)) as report:
        for batch in own_batches:
            tokens = _write(model, sampling, batch, partial(report, len(written)))
            if directory is not None:
                _keep(directory, batch, tokens)
            written.update(zip(batch, tokens, strict=True))
    windows |= _of_all(processes, written)
    return torch.stack([windows[n] for n in range(count)])


def _read_kept(directory: Path | None, length: int, count: int) -> dict[int, Tensor]:
    """Return the stored windows (length,) among the first `count`, by number."""
    windows: dict[int, Tensor] = {}
    for file in sorted(directory.glob("windows-*")) if directory else ():
        name = _FILE.fullmatch(file.name)
        if name is None or int(name[1]) >= count:
            continue
        numbers = range(int(name[1]), int(name[2]))
        try:
            written = load_file(file)["input_ids"]
        except (OSError, SafetensorError, KeyError) as error:
            log.warning("%s is damaged (%s): these windows are written again.", file, error)
            continue
        # A file of another form was not written by this code, and is passed over without an error:
        # the directory is a cache.
        if written.shape == (len(numbers), length) and written.dtype == torch.int64:
            windows |= zip(numbers, written, strict=True)
    return {n: window for n, window in windows.items() if n < count}


def _keep(directory: Path, windows: range, written: Tensor) -> None:
    """Write a batch to its file atomically."""
    make_directories(directory)
    file = directory / f"windows-{windows.start}-{windows.stop}.safetensors"
    partial_file = file.with_name(f".{file.name}.{token_hex(4)}.partial")
    try:
        save_file({"input_ids": written.contiguous()}, partial_file)
        move_durably(partial_file, file)
    finally:
        partial_file.unlink(missing_ok=True)


def _batches(windows: list[int], batch_size: int, processes: int) -> list[range]:
    """Split sorted numbers into ranges of about equal size; without gaps, as many a process."""
    # The number of rounds is that of full batches; the windows are then spread evenly over them,
    # since a round takes as long as its largest batch. A gap in the numbers ends a batch, because a
    # file is named by a range.
    rounds = -(-len(windows) // (batch_size * processes))
    size = -(-len(windows) // max(1, rounds * processes))
    batches: list[range] = []
    for n in windows:
        if batches and batches[-1].stop == n and len(batches[-1]) < size:
            batches[-1] = range(batches[-1].start, n + 1)
        else:
            batches.append(range(n, n + 1))
    return batches


def _write(
    model: PreTrainedModel, sampling: Sampling, windows: range, report: Callable[[int], None]
) -> Tensor:
    """Generate a batch, in halves if memory does not suffice, and report the tokens of each."""
    try:
        return write(model, sampling, windows, lambda length: report(len(windows) * length))
    except (MemoryError, RuntimeError) as error:
        if len(windows) == 1 or not is_out_of_memory(error):
            raise
    # After the `except`, whose traceback would keep the tensors of the failed attempt in memory.
    # Random numbers belong to a window's number, so halves give the same draws.
    half = len(windows) // 2
    parts = windows[:half], windows[half:]
    return torch.cat([_write(model, sampling, part, report) for part in parts])


def _of_all(processes: Processes, windows: dict[int, Tensor]) -> dict[int, Tensor]:
    """Gather the windows of all processes, by number."""
    lists = {n: window.tolist() for n, window in windows.items()}
    gathered = {n: ids for each in processes.all(lists) for n, ids in each.items()}
    return {n: torch.tensor(ids).long() for n, ids in gathered.items()}
