"""The sparsities of the blocks in a run: allocated once, and kept in its journal."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mrp_lightning.pruning.allocation import allocate, allocate_by_output, patterns_of_layers
from mrp_lightning.pruning.dense_pass import DensePass, medians_of_blocks
from mrp_lightning.pruning.dry_run import changes_of_output
from mrp_lightning.pruning.journal import Journal
from mrp_lightning.pruning.shared_journal import SharedJournal
from mrp_lightning.solver.patterns import Unstructured
from mrp_lightning.solver.recipe import Recipe


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
    allocation: str, recipe: Recipe, dense: DensePass, journal: Journal | SharedJournal | None
) -> Sparsities:
    """Allocate, or take what the journal says was allocated.

    Args:
        allocation: One of `ALLOCATIONS`.
        recipe: How layers are pruned.
        dense: A pass over the model, which is still dense unless the journal knows.
        journal: Keeps it; a run that goes on does not measure again.
    """
    if allocation == "uniform":
        return Sparsities()
    if journal is not None and (known := journal.manifest.allocation):
        patterns = {name: Unstructured(share) for name, share in known["layers"].items()}
        return Sparsities(known["blocks"], patterns)
    if allocation == "output":
        measures, rule = changes_of_output(dense, recipe), allocate_by_output
    else:
        measures, rule = medians_of_blocks(dense), allocate
    if not measures:
        return Sparsities()
    blocks = rule(recipe.pattern.sparsity, measures)
    patterns = patterns_of_layers(blocks, measures)
    if journal is not None:
        shares = {name: pattern.sparsity for name, pattern in patterns.items()}
        journal.allocate({"blocks": blocks, "layers": shares})
    return Sparsities(blocks, patterns)
