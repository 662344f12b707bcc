"""The sparsities of the blocks in a run: allocated once, and kept in its journal."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mrp_lightning.allocation.dry_run import Change
from mrp_lightning.allocation.rule import allocate, patterns_of_layers
from mrp_lightning.journal.journal import Journal
from mrp_lightning.journal.shared import SharedJournal
from mrp_lightning.solver.patterns import Unstructured


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
