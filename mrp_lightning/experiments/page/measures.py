"""Figures of blocks, kinds of layers and cells of the two, averaged over runs."""

from collections.abc import Callable, Iterable
from statistics import fmean
from typing import TypeVar

from mrp_lightning.experiments.page.models import Variant
from mrp_lightning.experiments.page.places import Block, Place, place
from mrp_lightning.experiments.page.runs import Layer

Group = TypeVar("Group")
Summary = Callable[[Iterable[float]], float]


def by_block(variant: Variant, key: str, summary: Summary = fmean) -> dict[Block, list[float]]:
    """A figure of the pruned layers of each block, one value for each run that has it."""
    found: dict[Block, list[float]] = {}
    for run in variant.runs:
        blocks: dict[Block, list[float]] = {}
        for layer in run.pruned:
            if layer.get(key) is not None:
                blocks.setdefault(place(layer["name"]).block, []).append(layer[key])
        for block, values in blocks.items():
            found.setdefault(block, []).append(summary(values))
    return found


def by_kind(variant: Variant, key: str, summary: Summary = fmean) -> dict[str, float]:
    """A figure of the pruned layers of each kind, over all blocks and runs."""
    return _collect(variant, key, summary, lambda layer: place(layer["name"]).kind)


def by_cell(variant: Variant, key: str) -> dict[Place, float]:
    """Mean of a figure over the pruned layers of a kind in a block (experts), and over runs."""
    return _collect(variant, key, fmean, lambda layer: place(layer["name"]))


def dense_cells(variant: Variant) -> set[Place]:
    """Where layers were left dense."""
    return {
        place(layer["name"])
        for run in variant.runs
        for layer in run.layers
        if layer.get("skipped") is not None
    }


def _collect(
    variant: Variant, key: str, summary: Summary, group: Callable[[Layer], Group]
) -> dict[Group, float]:
    groups: dict[Group, list[float]] = {}
    for run in variant.runs:
        for layer in run.pruned:
            if layer.get(key) is not None:
                groups.setdefault(group(layer), []).append(layer[key])
    return {name: summary(values) for name, values in groups.items()}
