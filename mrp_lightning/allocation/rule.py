"""Allocation: how much sparsity each block gets, with the total that was asked for."""

import math
from collections.abc import Mapping

from mrp_lightning.allocation.dense_pass import Measure
from mrp_lightning.errors import OptionError
from mrp_lightning.solver.patterns import Pattern, SemiStructured, Unstructured
from mrp_lightning.targets.layers import Layer

ALLOCATIONS = ("uniform", "dlp", "output")
SPREAD = 0.15
"""How far, at most, blocks are from the mean: DLP's α, which is published for 70%."""
STEEPNESS = 7.0
"""By how much the logarithm of what a block does grows with its sparsity, by measurement."""


def check_allocation(allocation: str, pattern: Pattern) -> None:
    """Refuse an allocation that does not exist, or not for a pattern.

    Raises:
        OptionError: Either is the case.
    """
    if allocation not in ALLOCATIONS:
        raise OptionError(
            f"`allocation` must be one of {', '.join(ALLOCATIONS)}; got {allocation!r}."
        )
    if allocation != "uniform" and isinstance(pattern, SemiStructured):
        raise OptionError(
            f"`allocation: {allocation}` gives blocks different sparsities, but pattern "
            f'"{pattern}" removes {pattern.removed} of every {pattern.group} weights everywhere. '
            "Give `sparsity` in place of `pattern`, or leave `allocation` out."
        )


def allocate(sparsity: float, measures: Mapping[str, Measure]) -> dict[str, float]:
    """Give blocks sparsities whose mean over all of their weights is the one that is asked for.

    With I_b = 1 − S_b / ΣS of the measures S, scaled to d_b from 0 (the largest S) to 2α (the
    smallest), a block gets s + mean(d) − d_b: one whose weights and inputs are small is pruned
    least. α is `SPREAD`, or less where that would leave (0, 1).

    Source: Chen et al., "DLP: Dynamic Layerwise Pruning in Large Language Models", 2025; there
    blocks have one size.

    Args:
        sparsity: The fraction of all weights to remove, s.
        measures: The measure of each block, by name.
    """
    values = {name: measure.value for name, measure in measures.items()}
    low, high = min(values.values()), max(values.values())
    reach = 2 * min(SPREAD, sparsity / 2, (1 - sparsity) / 2)
    spared = {
        name: reach * (high - value) / (high - low) if high > low else 0.0
        for name, value in values.items()
    }
    sizes = {name: sum(map(_size, measure.layers)) for name, measure in measures.items()}
    mean = math.fsum(spared[name] * sizes[name] for name in sizes) / sum(sizes.values())
    return {name: sparsity + mean - value for name, value in spared.items()}


def allocate_by_output(sparsity: float, measures: Mapping[str, Measure]) -> dict[str, float]:
    """Give blocks sparsities whose mean over all of their weights is the one that is asked for.

    A block that alone, pruned to sparsity s, changes the model's output by E_b is taken to change
    it by E_b·exp(κ(s_b − s)) at s_b, κ being `STEEPNESS`, and changes to add up. Their sum is the
    least, for blocks of one size, where all are the same: s_b = s + (μ − ln E_b)/κ. It stays
    within `SPREAD` of s, or less where that would leave (0, 1), and μ gives the mean.

    Args:
        sparsity: The fraction of all weights to remove, s.
        measures: The measure of each block, by name.
    """
    logs = {name: math.log(max(measure.value, 1e-30)) for name, measure in measures.items()}
    sizes = {name: sum(map(_size, measure.layers)) for name, measure in measures.items()}
    reach = min(SPREAD, sparsity / 2, (1 - sparsity) / 2)

    def spread(level: float) -> dict[str, float]:
        return {
            name: min(max((level - log) / STEEPNESS, -reach), reach) for name, log in logs.items()
        }

    low, high = min(logs.values()) - STEEPNESS, max(logs.values()) + STEEPNESS
    for _ in range(100):
        level = (low + high) / 2
        total = math.fsum(shift * sizes[name] for name, shift in spread(level).items())
        low, high = (level, high) if total < 0 else (low, level)
    return {name: sparsity + shift for name, shift in spread(high).items()}


def patterns_of_layers(
    sparsities: Mapping[str, float], measures: Mapping[str, Measure]
) -> dict[str, Unstructured]:
    """The pattern of each layer, by name: blocks keep their sparsity, and all together the total.

    Counts are rounded so that the layers up to any one remove what they are to, within one half.
    """
    patterns: dict[str, Unstructured] = {}
    asked, removed = 0.0, 0
    for name, sparsity in sparsities.items():
        for layer in measures[name].layers:
            asked += sparsity * _size(layer)
            count = min(max(math.floor(asked + 0.5) - removed, 1), _size(layer) - 1)
            removed += count
            patterns[layer.name] = Unstructured(count / _size(layer))
    return patterns


def _size(layer: Layer) -> int:
    return layer.weight.numel()
