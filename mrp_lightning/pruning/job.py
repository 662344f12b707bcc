"""One pruning of one model, as all that takes part in it is handed it."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mrp_lightning.calibration.offload import CPU
from mrp_lightning.journal.journal import Journal
from mrp_lightning.journal.shared import SharedJournal
from mrp_lightning.processes import ALONE, Processes
from mrp_lightning.pruning.settings import Settings
from mrp_lightning.records.report import PruningReport
from mrp_lightning.records.rows import LayerReport
from mrp_lightning.targets.plan import Plan

if TYPE_CHECKING:
    from mrp_lightning.models.streaming import StreamedBlocks

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Progress:
    """How far a pruning is.

    Attributes:
        block: The number of the block that is walked, from 1.
        blocks: The number of blocks in all.
        task: What is being done, in words.
        layers: The number of layers that are finished, pruned or skipped.
    """

    block: int
    blocks: int
    task: str
    layers: int


class Listener:
    """Is told how a pruning goes. This one only logs what users should know."""

    def say(self, text: str) -> None:
        """Hear, seldom, of what a user should be told."""
        log.info("%s", text)

    def progress(self, progress: Progress) -> None:
        """Hear, often, how far the pruning is."""

    def finished(self, k: int, rows: list[LayerReport], *, resumed: bool) -> None:
        """Hear that a block is finished.

        Args:
            k: The number of the block, from 0; that of the layers outside the blocks follows.
            rows: The layers pruned in it.
            resumed: Whether the journal held them.
        """


@dataclass(frozen=True, eq=False, kw_only=True)
class Job:
    """One pruning: the model, how it is pruned, on what data, with whom, and who is told of it.

    Attributes:
        model: The module whose forward `forward` runs. It is pruned in place.
        plan: The blocks and layers to prune.
        settings: How they are pruned.
        forward: Runs the model on one batch.
        batches: The calibration batches of this process: anything that `forward` takes.
        batch_of: Finds in an item of `batches` what may hold an `attention_mask`.
        device: The device on which the model runs.
        streamed: The blocks that stay in files until they are needed; then the journal is a
            `StreamedJournal`.
        processes: The processes that prune the model together. All of them prune it, each with
            batches of its own, and end with the same weights.
        journal: Keeps what is done to each block; what it holds is not done again, and the result
            has the same bits.
        report: The report, which is filled while layers are pruned.
        listener: Is told how it goes.
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
    journal: Journal | SharedJournal | None = None
    report: PruningReport = field(default_factory=lambda: PruningReport({}))
    listener: Listener = field(default_factory=Listener)

    @property
    def steps(self) -> int:
        """The number of blocks, and one more where layers outside of them are pruned."""
        return len(self.plan.blocks) + bool(self.plan.outside)

    def tell(self, step: int, task: str) -> None:
        """Tell the listener what is being done in a step, from 0."""
        done = len(self.report.layers) - len(self.plan.skipped)
        self.listener.progress(Progress(step + 1, self.steps, task, done))
