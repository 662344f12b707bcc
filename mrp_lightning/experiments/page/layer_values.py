"""Values of the layers, by block, by kind of layer and by both, averaged over runs."""

from collections.abc import Callable, Iterable, Iterator
from statistics import fmean
from typing import TypeVar

from mrp_lightning.experiments.page.models import Variant
from mrp_lightning.experiments.page.places import Block, Place, place
from mrp_lightning.experiments.runs import Run
from mrp_lightning.pruning.report import LayerReport

Group = TypeVar("Group")
Summary = Callable[[Iterable[float]], float]


def by_block(variant: Variant, key: str, summary: Summary = fmean) -> dict[Block, list[float]]:
    """A value of the pruned layers of each block, one for each run that has it."""
    found: dict[Block, list[float]] = {}
    for run in variant.runs:
        blocks: dict[Block, list[float]] = {}
        for layer, value in _values(run, key):
            blocks.setdefault(place(layer.name).block, []).append(value)
        for block, values in blocks.items():
            found.setdefault(block, []).append(summary(values))
    return found


def by_kind(variant: Variant, key: str, summary: Summary = fmean) -> dict[str, float]:
    """A value of the pruned layers of each kind, over all blocks and runs."""
    return _collect(variant, key, summary, lambda layer: place(layer.name).kind)


def by_cell(variant: Variant, key: str) -> dict[Place, float]:
    """The mean of a value over the pruned layers of a kind in a block (experts), and over runs."""
    return _collect(variant, key, fmean, lambda layer: place(layer.name))


def dense_cells(variant: Variant) -> set[Place]:
    """Where layers were left dense."""
    return {
        place(layer.name)
        for run in variant.runs
        for layer in run.layers
        if layer.skipped is not None
    }


def _collect(
    variant: Variant, key: str, summary: Summary, group: Callable[[LayerReport], Group]
) -> dict[Group, float]:
    groups: dict[Group, list[float]] = {}
    for run in variant.runs:
        for layer, value in _values(run, key):
            groups.setdefault(group(layer), []).append(value)
    return {name: summary(values) for name, values in groups.items()}


def _values(run: Run, key: str) -> Iterator[tuple[LayerReport, float]]:
    for layer in run.pruned:
        value = getattr(layer, key)
        if value is not None:
            yield layer, value
