"""Values of the layers, by block, by kind of layer and by both, averaged over runs."""

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import TypeVar

from mrp_lightning.experiments.page.models import Variant
from mrp_lightning.experiments.page.places import Block, Place, place
from mrp_lightning.experiments.runs import Run

Group = TypeVar("Group")
Summary = Callable[[Iterable[float]], float]


def by_block(variant: Variant, key: str, summary: Summary = fmean) -> dict[Block, list[float]]:
    """A value of the pruned layers of each block, one for each run that has it."""
    found: dict[Block, list[float]] = {}
    for run in variant.runs:
        for block, value in _summarized([run], key, summary, lambda at: at.block).items():
            found.setdefault(block, []).append(value)
    return found


def by_kind(variant: Variant, key: str, summary: Summary = fmean) -> dict[str, float]:
    """A value of the pruned layers of each kind, over all blocks and runs."""
    return _summarized(variant.runs, key, summary, lambda at: at.kind)


def by_cell(variant: Variant, key: str) -> dict[Place, float]:
    """The mean of a value over the pruned layers of a kind in a block (experts), and over runs."""
    return _summarized(variant.runs, key, fmean, lambda at: at)


def dense_cells(variant: Variant) -> set[Place]:
    """Where layers were left dense."""
    return {place(x.name) for run in variant.runs for x in run.layers if x.skipped is not None}


def _summarized(
    runs: Sequence[Run], key: str, summary: Summary, group: Callable[[Place], Group]
) -> dict[Group, float]:
    groups: dict[Group, list[float]] = {}
    for layer in (layer for run in runs for layer in run.pruned):
        value = getattr(layer, key)
        if value is not None:
            groups.setdefault(group(place(layer.name)), []).append(value)
    return {name: summary(values) for name, values in groups.items()}
