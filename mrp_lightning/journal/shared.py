"""The journal of several processes: the first one keeps it, and tells the others what it holds."""

from dataclasses import replace

import torch

from mrp_lightning.journal.block_record import BlockRecord
from mrp_lightning.journal.journal import Journal
from mrp_lightning.journal.manifest import Manifest
from mrp_lightning.processes import Processes


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
