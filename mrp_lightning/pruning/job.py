"""The job of a pruning: model, plan, settings, data, processes, journal and report."""

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
from mrp_lightning.records.report import LayerReport, PruningReport
from mrp_lightning.targets.layers import Layer
from mrp_lightning.targets.plan import Plan

if TYPE_CHECKING:
    from mrp_lightning.models.streaming import StreamedBlocks

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Progress:
    """The state of a pruning."""

    block: int  # the number of the present block, from 1
    blocks: int  # the total number of blocks
    task: str  # the present work, in words
    layers: int  # the number of finished layers, pruned or skipped


class Listener:
    """Receives the progress of a pruning. This base class only logs messages."""

    def log(self, text: str) -> None:
        """Log a message for the user; called seldom."""
        log.info("%s", text)

    def progress(self, progress: Progress) -> None:
        """Receive the state of the pruning; called often."""

    def finished(self, k: int, rows: list[LayerReport], *, resumed: bool) -> None:
        """Receive the rows of a block that is finished.

        Blocks are numbered from 0; the layers outside of the blocks follow as one more block, and
        the head, if it is quantised, as the last. A block is `resumed` if it was restored from the
        journal.
        """


@dataclass(frozen=True, eq=False, kw_only=True)
class Job:
    """One pruning: model, settings, data, processes, journal, report.

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
        journal: The journal, which records finished blocks and restores them bit by bit; `None` for
            none.
        report: The report, which is filled while layers are pruned.
        listener: Receives the progress.
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
    report: PruningReport = field(default_factory=lambda: PruningReport({}))
    listener: Listener = field(default_factory=Listener)

    @property
    def structure(self) -> Structure | None:
        """The units that are removed as a whole, `None` if single weights are removed."""
        return self.plan.structure if isinstance(self.plan, NarrowingPlan) else None

    def tuned_with(self, block: str) -> Sequence[Layer]:
        """Return the layers of a block that only tuning changes."""
        if not isinstance(self.plan, NarrowingPlan) or not self.settings.tuning:
            return ()
        return self.plan.others.get(block, ())

    @property
    def steps(self) -> int:
        """The number of blocks, plus one for the layers outside of them, and one for the head."""
        return len(self.plan.blocks) + bool(self.plan.outside) + (self.plan.head is not None)

    def progress(self, step: int, task: str) -> None:
        """Report the present task of a step, from 0, to the listener."""
        done = len(self.report.layers) - len(self.plan.skipped)
        self.listener.progress(Progress(step + 1, self.steps, task, done))
