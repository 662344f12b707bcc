"""Allocation: how much sparsity each block gets, with the total asked for, once for a run."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mrp_lightning.allocation.dry_run import Change
from mrp_lightning.errors import OptionError
from mrp_lightning.journal.journal import Journal
from mrp_lightning.journal.shared import SharedJournal
from mrp_lightning.solver.patterns import Dense, Pattern, SemiStructured, Unstructured
from mrp_lightning.targets.layers import Layer

ALLOCATIONS = ("uniform", "output")
SPREAD = 0.15
"""How far, at most, blocks are from the mean."""
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
    if allocation != "uniform" and isinstance(pattern, Dense):
        raise OptionError(
            f"`allocation: {allocation}` gives blocks different sparsities, and nothing is "
            "removed. Give `sparsity` beside `bits`, or leave `allocation` out."
        )
    if allocation != "uniform" and isinstance(pattern, SemiStructured):
        raise OptionError(
            f"`allocation: {allocation}` gives blocks different sparsities, but pattern "
            f'"{pattern}" removes {pattern.removed} of every {pattern.group} weights everywhere. '
            "Give `sparsity` in place of `pattern`, or leave `allocation` out."
        )


@dataclass(frozen=True)
class Sparsities:
    """The sparsities that differ from the one that the whole model gets.

    Attributes:
        blocks: The sparsities of blocks, by name.
        layers: The patterns of layers, by name.
    """

    blocks: Mapping[str, float] = field(default_factory=dict)
    layers: Mapping[str, Unstructured] = field(default_factory=dict)


def find_sparsities(
    sparsity: float,
    changes: Callable[[], Mapping[str, Change]],
    journal: Journal | SharedJournal | None,
) -> Sparsities:
    """Allocate a sparsity by a dry run, or take what the journal says was allocated.

    Args:
        sparsity: The fraction of all weights to remove.
        changes: Makes the dry run, over a model that is still dense.
        journal: Keeps what is found; a run that goes on does not measure again.
    """
    if journal is not None and (known := journal.manifest.allocation):
        patterns = {name: Unstructured(share) for name, share in known["layers"].items()}
        return Sparsities(known["blocks"], patterns)
    found = changes()
    if not found:
        return Sparsities()
    blocks = allocate(sparsity, found)
    patterns = patterns_of_layers(blocks, found)
    if journal is not None:
        shares = {name: pattern.sparsity for name, pattern in patterns.items()}
        journal.allocate({"blocks": blocks, "layers": shares})
    return Sparsities(blocks, patterns)


def allocate(sparsity: float, changes: Mapping[str, Change]) -> dict[str, float]:
    """Give blocks sparsities whose mean over all of their weights is the one that is asked for.

    A block that alone, pruned to sparsity s, changes the model's output by E_b is taken to change
    it by E_b·exp(κ(s_b − s)) at s_b, κ being `STEEPNESS`, and changes to add up. Their sum is the
    least, for blocks of one size, where all are the same: s_b = s + (μ − ln E_b)/κ. It stays
    within `SPREAD` of s, or less where that would leave (0, 1), and μ gives the mean.

    Args:
        sparsity: The fraction of all weights to remove, s.
        changes: What pruning each block alone does to the output, by the name of the block.
    """
    logs = {name: math.log(max(change.of_output, 1e-30)) for name, change in changes.items()}
    sizes = {name: sum(map(_size, change.layers)) for name, change in changes.items()}
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
    sparsities: Mapping[str, float], changes: Mapping[str, Change]
) -> dict[str, Unstructured]:
    """The pattern of each layer, by name: blocks keep their sparsity, and all together the total.

    Counts are rounded so that the layers up to any one remove what they are to, within one half.
    """
    patterns: dict[str, Unstructured] = {}
    asked, removed = 0.0, 0
    for name, sparsity in sparsities.items():
        for layer in changes[name].layers:
            asked += sparsity * _size(layer)
            count = min(max(math.floor(asked + 0.5) - removed, 1), _size(layer) - 1)
            removed += count
            patterns[layer.name] = Unstructured(count / _size(layer))
    return patterns


def _size(layer: Layer) -> int:
    return layer.weight.numel()
