"""The sparsities of the blocks in a run: allocated once, and kept in its journal."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mrp_lightning.allocation.dense_pass import DensePass, medians_of_blocks
from mrp_lightning.allocation.dry_run import changes_of_output
from mrp_lightning.allocation.rule import allocate, allocate_by_output, patterns_of_layers
from mrp_lightning.journal.journal import Journal
from mrp_lightning.journal.shared import SharedJournal
from mrp_lightning.solver.patterns import Unstructured
from mrp_lightning.targets.layers import Layer


@dataclass(frozen=True)
class Sparsities:
    """What of a model is not pruned to the recipe's own pattern.

    Attributes:
        blocks: The sparsities of blocks, by name.
        layers: The patterns of layers, by name.
    """

    blocks: Mapping[str, float] = field(default_factory=dict)
    layers: Mapping[str, Unstructured] = field(default_factory=dict)


def find_sparsities(
    allocation: str,
    sparsity: float,
    dense: DensePass,
    prune_block: Callable[[int, list[Layer]], set[str]],
    journal: Journal | SharedJournal | None,
) -> Sparsities:
    """Allocate, or take what the journal says was allocated.

    Args:
        allocation: One of `ALLOCATIONS`.
        sparsity: The fraction of all weights to remove.
        dense: A pass over the model, which is still dense unless the journal knows.
        prune_block: Prunes layers of a block, by its number, and returns the names of those that
            it has pruned.
        journal: Keeps it; a run that goes on does not measure again.
    """
    if allocation == "uniform":
        return Sparsities()
    if journal is not None and (known := journal.manifest.allocation):
        patterns = {name: Unstructured(share) for name, share in known["layers"].items()}
        return Sparsities(known["blocks"], patterns)
    if allocation == "output":
        measures, rule = changes_of_output(dense, prune_block), allocate_by_output
    else:
        measures, rule = medians_of_blocks(dense), allocate
    if not measures:
        return Sparsities()
    blocks = rule(sparsity, measures)
    patterns = patterns_of_layers(blocks, measures)
    if journal is not None:
        shares = {name: pattern.sparsity for name, pattern in patterns.items()}
        journal.allocate({"blocks": blocks, "layers": shares})
    return Sparsities(blocks, patterns)
