"""Windows that several processes write together, in batches that are kept one by one."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mrp_lightning.environment import is_out_of_memory
from mrp_lightning.processes import Processes
from mrp_lightning.samples.kept import KeptWindows
from mrp_lightning.samples.writing import Sampling, windows_at_once, write


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
