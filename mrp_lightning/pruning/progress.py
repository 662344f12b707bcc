"""How far a pruning is."""

from dataclasses import dataclass

from mrp_lightning.records.report import PruningReport


@dataclass(frozen=True)
class Progress:
    """Where the walk is.

    Attributes:
        block: The number of the block that is walked, from 1.
        blocks: The number of blocks in all.
        task: What is being done, in words.
        layers: The number of layers that are finished, pruned or skipped.
        report: The report of the layers so far.
    """

    block: int
    blocks: int
    task: str
    layers: int
    report: PruningReport
