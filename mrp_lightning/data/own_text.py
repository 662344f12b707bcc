"""Calibration text that the model writes itself, shared out among the processes."""

import hashlib
import logging
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from lightning.pytorch import Trainer
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
from mrp_lightning.errors import DataError, OptionError
from mrp_lightning.journal.manifest import forward_of
from mrp_lightning.loop.distributed import fail_together, processes_of
from mrp_lightning.loop.module_parts import language_models, streamed_blocks
from mrp_lightning.loop.progress import ProgressReporter, roughly
from mrp_lightning.loop.trainer import callbacks_that_prune
from mrp_lightning.processes import Processes
from mrp_lightning.pruning.estimate import Estimate
from mrp_lightning.signals import Interrupted
from mrp_lightning.solver.arithmetic import by_rows
from mrp_lightning.targets.blocks import find_blocks
from mrp_lightning.text.windows import Cutter

log = logging.getLogger(__name__)

_NAME = "text"
"""The name of the windows in a journal, before their key."""
_LONGEST = 256
"""The most tokens of a piece: a model that writes on drifts away from its training text."""
_MEASURED_TOKENS = 3
"""Number of tokens written to measure the time of one; the first includes set-up."""
_FIRST_LINE = 5
"""Seconds until the first log line with the remaining time."""


class OwnText:
    """Calibration windows that the model of a trainer writes.

    Each window consists of pieces of equal length, at most 256 tokens, and each piece is the
    start of a text. A pruning that has a journal keeps the windows in it.
    """

    name = "the model's own text"

    def __init__(self, trainer: Trainer | None) -> None:
        self._trainer = trainer

    def writer(self) -> PreTrainedModel:
        """Return the trainer's language model, if it can write; `require_writer` raises more."""
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
        # A module of several models names the one that writes.
        writer = getattr(module, "text_writer", None)
        models = list(language_models(module).values()) if writer is None else [writer]
        return require_writer(models[0] if len(models) == 1 else None)

    def draw(self, cutter: Cutter, count: int, seed: int) -> Tensor:
        """Return windows (count, length), int64, on the CPU: the same in all processes; collective.

        Raises:
            DataError: The model's text is degenerate or not finite. `writer` raises more.
            Interrupted: SIGTERM came.
        """
        model, trainer = self.writer(), self._trainer
        assert trainer is not None
        pieces, sampling = _pieces(model, cutter, seed)

        def compute() -> dict[str, Tensor]:
            processes, total = processes_of(trainer), count * pieces
            share = sampling.length * (processes.share(total).stop - processes.share(total).start)
            with fail_together(processes), _on_device(trainer), _reported(trainer, share) as report:
                return {_NAME: write_together(model, sampling, total, processes, report)}

        # A callback without a run in progress only calls `compute`.
        name = f"{_NAME}{_key(model, sampling, count)}"
        windows: Callable[[], Mapping[str, Tensor]] = compute
        for callback in callbacks_that_prune(trainer):
            windows = partial(callback.kept, name, windows)
        return windows()[_NAME].reshape(count, -1)[:, : cutter.length]


def estimate_writing(model: PreTrainedModel, cutter: Cutter, seed: int, count: int) -> Estimate:
    """Estimate the cost of `OwnText.draw` in one process, by writing a few tokens of a batch.

    The model must be on the device where it will write. The estimate is a little low, since later
    tokens attend to more tokens.
    """
    pieces, sampling = _pieces(require_writer(model), cutter, seed)
    # Only the length of the batch is cut: the time of a token depends on how many windows share it.
    at_once = min(windows_at_once(model, sampling.length), count * pieces)
    length = min(sampling.length, max(len(sampling.prefix), 1) + _MEASURED_TOKENS)
    times, short = list[float](), replace(sampling, length=length)
    write(model, short, range(at_once), lambda _: times.append(time.perf_counter()))
    # The least interval between two tokens: the first holds the set-up, and noise only adds.
    seconds_a_token = min((b - a for a, b in pairwise(times)), default=0.0)
    seconds = seconds_a_token * sampling.length * -(-count * pieces // at_once)
    return Estimate(seconds, at_once * bytes_a_window(model, sampling.length))


def _pieces(model: PreTrainedModel, cutter: Cutter, seed: int) -> tuple[int, Sampling]:
    """Return the number of pieces of a window, and the sampling of each: it starts as a text does.

    That is with the tokens that the tokenizer adds, or else with a random one that is not special.
    """
    # pieces·length ≥ the window's length; `draw` cuts off the surplus, fewer than `pieces` tokens.
    pieces = -(-cutter.length // _LONGEST)
    length = -(-cutter.length // pieces)
    prefix = torch.tensor([]).long()
    first = list(range(model.config.get_text_config().vocab_size))
    if (tokenizer := cutter.tokenizer) is not None:
        prefix = Cutter(tokenizer, length).prefix
        special = set(tokenizer.all_special_ids)
        # Rows of an embedding beyond the tokenizer's tokens are padding, and were never trained.
        first = [token for token in first[: len(tokenizer)] if token not in special]
    first_tokens = torch.tensor(first).long()
    return pieces, Sampling(length=length, seed=seed, prefix=prefix, first=first_tokens)


def _key(model: PreTrainedModel, sampling: Sampling, count: int) -> str:
    """Return 16 hex digits of the hash of all that decides the tokens, except the weights."""
    # The weights are left out: a journal of other weights is refused as a whole when it is opened.
    start = sampling.prefix if len(sampling.prefix) else sampling.first
    facts = (count, sampling.length, sampling.seed, start.tolist(), forward_of(model.config))
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


@contextmanager
def _on_device(trainer: Trainer) -> Iterator[None]:
    """Move all offloaded blocks to the device, if they fit."""
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
                *(offload.device, offload.num_bytes / 1e9),
            )
        yield


@contextmanager
def _reported(trainer: Trainer, total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that reports the tokens of this process, and raises after SIGTERM."""
    reporter = ProgressReporter(trainer, first_seconds=_FIRST_LINE)
    with reporter.bar(total, "own text"):

        def report(tokens: int) -> None:
            if trainer.received_sigterm:
                raise Interrupted(signal.SIGTERM)
            left = f"about {roughly(reporter.elapsed() * (total / tokens - 1))} left"
            if reporter.is_due():
                reporter.show(tokens, f"own text · {left}")
            reporter.log_seldom(f"own text · {tokens / total:.0%} · {left}")

        yield report
    took = roughly(reporter.elapsed())
    reporter.log(f"Wrote {total:,} tokens of the model's own text in {took}.")


def write_together(
    model: PreTrainedModel,
    sampling: Sampling,
    count: int,
    processes: Processes,
    report: Callable[[int], None],
) -> Tensor:
    """Return windows (count, length) of the model's own text, int64, on the CPU; collective.

    Each process writes its share, and calls `report` with the number of its tokens so far; all get
    the same windows. `write` raises more.
    """
    length, share = sampling.length, processes.share(count)

    def written(part: slice) -> Tensor:
        batch = range(share.start + part.start, share.start + part.stop)
        before = length * part.start
        return write(model, sampling, batch, lambda n: report(before + n * len(batch)))

    # Random numbers belong to a window's number: any batches give the same draws.
    own = by_rows(written, share.stop - share.start, 1, windows_at_once(model, length))
    none = torch.empty(0, length, dtype=torch.int64)
    return processes.gather_rows(torch.cat([none, *own]), count)
