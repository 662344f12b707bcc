"""Survey the dense model once, before pruning, for decisions that depend on all of its blocks.

`allocation: output` gives each block a sparsity, with the requested total, by a trial pruning of
the block alone.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from mrp_lightning.calibration.offload import Pinned
from mrp_lightning.calibration.padding import Padding
from mrp_lightning.calibration.walks import Walk
from mrp_lightning.errors import TargetError
from mrp_lightning.pruning.balance import FACTOR, InputStudy, apply_factors
from mrp_lightning.pruning.block import LayerSolver, WalkedBlock
from mrp_lightning.pruning.job import Job
from mrp_lightning.pruning.output_change import OutputChange
from mrp_lightning.solver.patterns import Pattern, Unstructured
from mrp_lightning.targets.blocks import Block
from mrp_lightning.targets.layers import Layer

_NAME = "survey"
"""The name of the survey in a journal."""
_OF_BLOCK, _OF_LAYER = "sparsity of block ", "sparsity of layer "
"""The beginnings of the names of sparsities in a journal."""
_SPREAD = 0.15
"""The largest difference of a block's sparsity from the mean."""
_STEEPNESS = 7.0
"""The growth of the logarithm of a block's change with its sparsity, κ, by measurement."""
STEP = 0.2
"""The step to which these logarithms are rounded. Another CPU, batch size or number of processes
sums in another order, which decides between weights of nearly equal scores, and so changes a
block's measurement by up to 3e-4 of it in float32, or 6e-3 in bfloat16. After rounding, the
sparsities are equal, unless a logarithm is that near to the middle of two steps: then its block's
sparsity moves by STEP / _STEEPNESS. No step excludes that; a coarse one makes it rare, and costs
the embedded model at most 0.014 of perplexity.
"""


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
        sparsities: The sparsities of blocks, by name, with `allocation`.
        patterns: The patterns of layers that differ from that of the recipe, by name, likewise.
        factors: The factors by which `balance` scales columns and rows; see `apply_factors`.
    """

    sparsities: Mapping[str, float] = field(default_factory=dict)
    patterns: Mapping[str, Pattern] = field(default_factory=dict)
    factors: Mapping[str, Tensor] = field(default_factory=dict)

    def scale(self, block: Block) -> None:
        """Scale the weights and biases of a block, which must be dense, in place."""
        apply_factors(self.factors, block)

    @classmethod
    def of(cls, conclusions: Mapping[str, Tensor]) -> "Survey":
        """Read the conclusions of studies."""
        blocks, layers, factors = (
            {n.removeprefix(kind): x for n, x in conclusions.items() if n.startswith(kind)}
            for kind in (_OF_BLOCK, _OF_LAYER, FACTOR)
        )
        patterns = {name: Unstructured(float(sparsity)) for name, sparsity in layers.items()}
        return cls({name: float(x) for name, x in blocks.items()}, patterns, factors)


def survey(job: Job, walk: Walk, padding: Padding, pinned: Pinned) -> Survey:
    """Survey the dense model of a job as its settings ask, or take the survey from its journal.

    The walk, at its start, is for the survey alone.

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
    return Survey.of(kept)


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


@dataclass(frozen=True)
class Change:
    """The effect of pruning one block alone: the mean change of the model's output."""

    of_output: float
    layers: list[Layer]  # the block's layers that are called, and so will be pruned


class OutputStudy:
    """Prunes each block of the dense model alone, and compares the model's output.

    The walk is at its start. A TargetError is raised if the model returns no floating-point tensor,
    or NaN or Inf.
    """

    def __init__(self, job: Job, walk: Walk, padding: Padding) -> None:
        self._output = OutputChange(job, walk, padding, "allocation: output")
        self._recipe = job.settings.recipe
        self._changes: dict[str, Change] = {}

    def visit(self, block: WalkedBlock) -> None:
        """Measure the change by the pruning of a block, and restore the block's weights."""
        name = block.name or ""
        # The output is computed before the weights are restored: all other blocks are dense then,
        # so that the change is that of this block alone, which the model of `allocate` assumes.
        with _put_back(block.layers):
            results = LayerSolver(self._recipe).prune(block)
            pruned = {result.name for result in results if result.is_pruned}
            block.report_progress(f"{name}, the model's output")
            change = self._output.of(block.k) if pruned else 0.0
        if not math.isfinite(change):
            raise TargetError(
                f"`allocation: output`: with {name} pruned the output differs by {change}. "
                "Expected a finite number: load the model in bfloat16 or float32, or leave "
                "`allocation` out."
            )
        if pruned:  # a block of which no layer is called takes no part
            self._changes[name] = Change(change, [x for x in block.layers if x.name in pruned])

    def conclusions(self) -> dict[str, Tensor]:
        """Return the sparsities of blocks and layers in float64, which holds every bit of them."""
        if not self._changes:
            return {}
        blocks = allocate(self._recipe.pattern.sparsity, self._changes)
        layers = patterns_of_layers(blocks, self._changes)
        sparsities = {_OF_BLOCK + name: sparsity for name, sparsity in blocks.items()}
        sparsities |= {_OF_LAYER + name: pattern.sparsity for name, pattern in layers.items()}
        return {name: torch.tensor(x, dtype=torch.float64) for name, x in sparsities.items()}


@contextmanager
def _put_back(layers: Sequence[Layer]) -> Iterator[None]:
    """Restore the weights of layers at the end of this context, also after an error."""
    weights = [layer.weight.clone() for layer in layers]
    try:
        yield
    finally:
        for layer, weight in zip(layers, weights, strict=True):
            layer.write_(weight)


def allocate(sparsity: float, changes: Mapping[str, Change]) -> dict[str, float]:
    """Return sparsities of blocks, by name, whose mean over all weights is `sparsity`, s.

    Model: if pruning block b alone to s changes the output by E_b, pruning it to s_b changes it by
    E_b·exp(κ(s_b − s)), with κ = `_STEEPNESS`, and changes add up. For blocks of one size, the sum
    is least where all summands are equal: s_b = s + (μ − ln E_b)/κ. The distance of s_b from s is
    at most `_SPREAD`, s/2 and (1 − s)/2, and μ sets the mean. ln E_b is rounded to a multiple of
    `STEP`, so that the rounding of float sums moves no sparsity.
    """
    # A change of 0 has no logarithm. 1e-30 is so low that its block gets the highest sparsity
    # within `reach`, unless all blocks are as low.
    logs = {
        name: STEP * round(math.log(max(change.of_output, 1e-30)) / STEP)
        for name, change in changes.items()
    }
    sizes = {name: sum(map(_size, change.layers)) for name, change in changes.items()}
    reach = min(_SPREAD, sparsity / 2, (1 - sparsity) / 2)

    def spread(level: float) -> dict[str, float]:
        return {
            name: min(max((level - log) / _STEEPNESS, -reach), reach) for name, log in logs.items()
        }

    # The total is monotonic in μ, so that bisection finds μ to the last bit.
    # At the ends all shifts are clipped, to −reach and to reach, so that the total changes its sign
    # between them. The upper end keeps a total ≥ 0.
    low, high = min(logs.values()) - _STEEPNESS, max(logs.values()) + _STEEPNESS
    for _ in range(100):
        level = (low + high) / 2
        total = math.fsum(shift * sizes[name] for name, shift in spread(level).items())
        low, high = (level, high) if total < 0 else (low, level)
    return {name: sparsity + shift for name, shift in spread(high).items()}


def patterns_of_layers(
    sparsities: Mapping[str, float], changes: Mapping[str, Change]
) -> dict[str, Unstructured]:
    """Return the pattern of each layer, by name, from the sparsities of the blocks.

    The number of weights to remove is rounded cumulatively: the layers up to any one remove their
    exact total, within one half.
    """
    patterns: dict[str, Unstructured] = {}
    total, removed = 0.0, 0
    for name, sparsity in sparsities.items():
        for layer in changes[name].layers:
            total += sparsity * _size(layer)
            # At least one weight goes and one stays, since a sparsity lies in (0, 1). A later layer
            # makes up for it: the difference is that of the totals so far, not of this layer.
            count = min(max(math.floor(total + 0.5) - removed, 1), _size(layer) - 1)
            removed += count
            patterns[layer.name] = Unstructured(count / _size(layer))
    return patterns


def _size(layer: Layer) -> int:
    return layer.weight.numel()
