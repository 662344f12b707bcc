"""Allocate a sparsity to each block, with the requested total, by trial prunings of each alone."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mrp_lightning.calibration.padding import Padding
from mrp_lightning.calibration.walks import Walk
from mrp_lightning.errors import TargetError
from mrp_lightning.pruning.block import LayerSolver, WalkedBlock
from mrp_lightning.pruning.job import Job
from mrp_lightning.pruning.output_change import OutputChange
from mrp_lightning.solver.patterns import Unstructured
from mrp_lightning.targets.layers import Layer


@dataclass(frozen=True)
class Change:
    """The effect of pruning one block alone: the mean change of the model's output."""

    of_output: float
    layers: list[Layer]  # the block's layers that are called, and so will be pruned


class OutputStudy:
    """Prunes each block of the dense model alone, and compares the model's output.

    Args:
        job: The job, whose model is dense.
        walk: A walk over the model, at its start.
        padding: Separates tokens from padding.

    Raises:
        TargetError: The model returns no floating-point tensor, or NaN or Inf.
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
        """Return the sparsities of blocks and layers, as `Sparsities.of` reads them."""
        if not self._changes:
            return {}
        blocks = allocate(self._recipe.pattern.sparsity, self._changes)
        return Sparsities(blocks, patterns_of_layers(blocks, self._changes)).tensors()


@contextmanager
def _put_back(layers: Sequence[Layer]) -> Iterator[None]:
    """Restore the weights of layers at the end of this context, also after an error."""
    weights = [layer.weight.clone() for layer in layers]
    try:
        yield
    finally:
        for layer, weight in zip(layers, weights, strict=True):
            layer.write_(weight)


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


_OF_BLOCK, _OF_LAYER = "sparsity of block ", "sparsity of layer "


@dataclass(frozen=True)
class Sparsities:
    """The sparsities of blocks and the patterns of layers, by name, where they are allocated."""

    blocks: Mapping[str, float] = field(default_factory=dict)
    layers: Mapping[str, Unstructured] = field(default_factory=dict)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "Sparsities":
        """Read the sparsities from the result of `tensors`; tensors of other names are ignored."""
        layers = _numbers(tensors, _OF_LAYER)
        patterns = {name: Unstructured(sparsity) for name, sparsity in layers.items()}
        return cls(_numbers(tensors, _OF_BLOCK), patterns)

    def tensors(self) -> dict[str, Tensor]:
        """Return the sparsities in float64, which holds every bit of them."""
        layers = {name: pattern.sparsity for name, pattern in self.layers.items()}
        named = [(_OF_BLOCK, self.blocks), (_OF_LAYER, layers)]
        return {
            prefix + name: torch.tensor(sparsity, dtype=torch.float64)
            for prefix, sparsities in named
            for name, sparsity in sparsities.items()
        }


def _numbers(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, float]:
    return {
        name.removeprefix(prefix): float(tensor)
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


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
