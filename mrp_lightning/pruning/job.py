"""The job of a pruning: model, plan, settings, data, processes, journal and listener."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mrp_lightning.calibration.offload import CPU
from mrp_lightning.journal.journal import Journal
from mrp_lightning.narrowing.structure import NarrowingPlan, Structure
from mrp_lightning.processes import ALONE, Processes
from mrp_lightning.pruning.settings import Settings
from mrp_lightning.records.block_result import BlockResult, LayerResult
from mrp_lightning.records.rows import LayerReport
from mrp_lightning.targets.layers import Layer
from mrp_lightning.targets.plan import Plan

if TYPE_CHECKING:
    from mrp_lightning.models.streaming import StreamedBlocks

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Progress:
    """The state of a pruning."""

    block: int  # the number of the present step (a block, the layers outside, the head), from 1
    blocks: int  # the total number of steps
    task: str  # the present work, in words


@dataclass(frozen=True)
class Usage:
    """The time and the memory that a pruning took, with those of the runs that it resumed.

    `PruningReport` describes the numbers; they are `None` before the end, or where not known.
    """

    seconds: float = 0.0
    cpu_seconds: float | None = None
    peak_rss: int | None = None


class Listener:
    """Receives the results of a pruning, as they are made, and its progress.

    This base class collects results and logs messages. Nothing that prunes reads them back.

    Attributes:
        walk: The name of the walk; `None` before it is chosen.
        usage: The time and the memory of the pruning, once it has ended, also by an error.
        resumed_blocks: The number of blocks that were restored from the journal.
        num_layers: The number of the layers to prune that are finished, pruned or left dense;
            layers that the plan leaves dense do not count.
    """

    def __init__(self) -> None:
        self.walk: str | None = None
        self.usage = Usage()
        self.resumed_blocks = self.num_layers = 0
        self._finished: list[BlockResult] = []
        # The results of the present block's layers, by name: a layer that is put on a grid later
        # replaces its first result.
        self._present: dict[str, LayerResult] = {}

    @property
    def results(self) -> list[BlockResult]:
        """The results so far. The last is that of an unfinished block, if one is interrupted."""
        present = tuple(self._present.values())
        unfinished = [BlockResult(present[0].row.block or "", present)] if present else []
        return [*self._finished, *unfinished]

    @property
    def pruned_rows(self) -> list[LayerReport]:
        """The rows of the layers that are pruned so far."""
        return [row for result in self.results for row in result.pruned_rows]

    def log(self, text: str) -> None:
        """Log a message for the user: a few in a run, not one for each layer."""
        log.info("%s", text)

    def progress(self, progress: Progress) -> None:
        """Receive the state of the pruning; called often."""

    def started(self, walk: str) -> None:
        """Receive the name of the walk."""
        # The first walk names the run. That of layers outside of the blocks is started later.
        self.walk = self.walk or walk

    def layer(self, result: LayerResult) -> None:
        """Receive the result of a layer, as soon as its weight is written or it is left dense."""
        # A layer is reported again when it is put on a grid, and counts once.
        self.num_layers += result.name not in self._present
        self._present[result.name] = result

    def block(self, result: BlockResult, *, resumed: bool = False) -> None:
        """Receive the result of a block, `resumed` from the journal, or in place of its layers'."""
        # Layers of a block from the journal are not reported one by one, so they count here.
        self.num_layers += len(result.layers) * resumed
        self.resumed_blocks += resumed
        # The block holds the same rows: without this, `results` would have them twice.
        self._present.clear()
        self._finished.append(result)

    def finished(self, k: int, rows: list[LayerReport], *, resumed: bool) -> None:
        """Receive the rows of a step's pruned layers, once the block's outputs are computed."""

    def ended(self, usage: Usage) -> None:
        """Receive the time and the memory of the pruning, at its end, also by an error."""
        self.usage = usage


@dataclass(frozen=True, eq=False, kw_only=True)
class Job:
    """One pruning.

    Attributes:
        model: The module whose forward `forward` runs. It is pruned in place.
        plan: The blocks and layers to prune.
        settings: The settings of the pruning.
        forward: Runs the model on one batch.
        batches: The calibration batches of this process: anything that `forward` takes.
        batch_of: Returns the part of an item of `batches` that may hold an `attention_mask`.
        device: The device on which the model runs.
        streamed: The blocks that stay in files until they run, `None` for a model in memory.
        processes: The processes that prune the model together. Each has its own batches, and all
            end with the same weights.
        journal: The journal, which records finished blocks and restores them bit for bit; `None`
            for none.
        listener: Receives the results and the progress.
    """

    model: nn.Module
    plan: Plan
    settings: Settings
    forward: Callable[[Any], Any]
    batches: Sequence[Any]
    batch_of: Callable[[Any], Any] = lambda item: item
    device: torch.device = CPU
    streamed: "StreamedBlocks | None" = None
    processes: Processes = ALONE
    journal: Journal | None = None
    listener: Listener = field(default_factory=Listener)

    @property
    def structure(self) -> Structure | None:
        """The units that are removed as a whole, `None` if single weights are removed."""
        return self.plan.structure if isinstance(self.plan, NarrowingPlan) else None

    def tuned_with(self, block: str) -> Sequence[Layer]:
        """Return the layers of a block that only tuning changes: none if no units are removed."""
        if not isinstance(self.plan, NarrowingPlan) or not self.settings.tuning:
            return ()
        return self.plan.others.get(block, ())

    def progress(self, step: int, task: str) -> None:
        """Report the present task of a step, from 0, to the listener."""
        self.listener.progress(Progress(step + 1, self.plan.steps, task))
