"""Survey the dense model once, before pruning, for decisions that depend on all of its blocks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from torch import Tensor

from mrp_lightning.calibration.offload import Pinned
from mrp_lightning.calibration.padding import Padding
from mrp_lightning.calibration.walks import Walk
from mrp_lightning.pruning.allocation import OutputStudy, Sparsities
from mrp_lightning.pruning.balance import Balance, InputStudy
from mrp_lightning.pruning.block import WalkedBlock
from mrp_lightning.pruning.job import Job
from mrp_lightning.solver.patterns import Pattern
from mrp_lightning.targets.blocks import Block

_NAME = "survey"
"""The name of the survey in a journal."""


class Study(Protocol):
    """A measurement of each dense block in turn, which decides sparsities or balance for all."""

    def visit(self, block: WalkedBlock) -> None:
        """Measure a block at its turn in the walk, and leave it as it was."""

    def conclusions(self) -> Mapping[str, Tensor]:
        """Return the decisions for all blocks, by names that no other study uses."""


@dataclass(frozen=True)
class Survey:
    """The decisions of a run by its whole dense model. The defaults decide nothing.

    Attributes:
        sparsities: The sparsities of blocks and the patterns of layers, with `allocation`.
        balance: The factors by which the columns of layers are scaled, with `balance`.
    """

    sparsities: Sparsities = field(default_factory=Sparsities)
    balance: Balance = field(default_factory=lambda: Balance({}))

    @property
    def patterns(self) -> Mapping[str, Pattern]:
        """The patterns of layers that differ from that of the recipe, by name."""
        return self.sparsities.layers

    def sparsity_of(self, block: str) -> float | None:
        """Return the sparsity of a block that has one of its own, else `None`."""
        return self.sparsities.blocks.get(block)

    def scale(self, block: Block) -> None:
        """Scale the columns of a dense block, in place."""
        self.balance.apply(block)


def survey(job: Job, walk: Walk, padding: Padding, pinned: Pinned) -> Survey:
    """Survey the model of a job as its settings ask, or take the survey from its journal.

    Args:
        job: The job, whose model is still dense.
        walk: A walk over the model, at its start, for the survey alone.
        padding: Separates tokens from padding.
        pinned: Context that keeps a block on the device.

    Raises:
        TargetError: The model returns nothing that `allocation` can compare, or has nothing that
            `balance` can scale.
        HessianError: The inputs of a layer are not finite.
        SaveError: The survey cannot be written to the journal.
    """
    studies: list[Study] = []

    def conclusions() -> dict[str, Tensor]:
        if job.settings.allocation != "uniform":
            # Made here, not before: it runs the whole model, and a run with a stored survey needs
            # none.
            studies.append(OutputStudy(job, walk, padding))
        if job.settings.balance:
            studies.append(InputStudy(job))
        _walk_through(job, walk, padding, pinned, studies)
        return {name: x for study in studies for name, x in study.conclusions().items()}

    if job.settings.allocation == "uniform" and not job.settings.balance:
        return Survey()
    # A resumed run could not repeat the survey: its decisions were made before any block changed.
    kept = conclusions() if job.journal is None else job.journal.kept(_NAME, conclusions)
    return Survey(Sparsities.of(kept), Balance.of(kept))


def _walk_through(
    job: Job, walk: Walk, padding: Padding, pinned: Pinned, studies: Sequence[Study]
) -> None:
    """Advance the walk, and let studies visit each block that has layers to prune."""
    # A dense model has no other target than its own outputs.
    settings = replace(job.settings, target="own")
    layers = job.plan.layers
    # For blocks after the last one with layers, nothing is to decide. A study that needs the
    # model's output runs them itself, from the present block on.
    last = max((k for k, block in enumerate(walk.blocks) if layers[block.name]), default=-1)
    progress = partial(job.progress, 0)
    for k, block in enumerate(walk.blocks[: last + 1]):
        with pinned(block.module):
            if layers[block.name]:
                dense_job = replace(job, settings=settings)
                walked = WalkedBlock(dense_job, walk, k, padding, progress, layers[block.name])
                for study in studies:
                    study.visit(walked)
            # Every study has left the block dense, so its outputs are those of the dense model.
            for i in walk.advance(k) if k < last else ():
                progress(f"{block.name}, dense outputs {i + 1}/{len(walk.batches)}")
