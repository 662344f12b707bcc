"""Heat maps: blocks from left to right, kinds of layers from top to bottom."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path

from mrp_lightning.experiments.page.axes import set_block_axis, set_name_axis
from mrp_lightning.experiments.page.drawing import WIDTH, Drawing, finish, style
from mrp_lightning.experiments.page.figures import Write
from mrp_lightning.experiments.page.palette import HEAT_STEPS, light
from mrp_lightning.experiments.page.places import Block, Place, short_kinds

_HATCHED: Mapping[str, Any] = {
    "facecolor": light("surface"),
    "edgecolor": light("muted"),
    "hatch": "////",
    "linewidth": 0,
}


@dataclass(frozen=True)
class Scale:
    """Steps of colour between two values, equal in their differences or, above 0, in their ratios.

    Attributes:
        smallest: Where the first step begins.
        largest: Where the last step ends.
        ratios: Whether steps are equal in their ratios.
    """

    smallest: float
    largest: float
    ratios: bool = False

    def level(self, value: float) -> int:
        """The step that a value falls into."""
        low, high, at = self.smallest, self.largest, value
        if self.ratios:
            low, high, at = log(low), log(high), log(value)
        share = (at - low) / (high - low) if high > low else 1.0
        return min(HEAT_STEPS - 1, max(0, int(share * HEAT_STEPS)))


def scale_of(values: Iterable[float]) -> Scale:
    """Equal ratios from the smallest to the largest value, or from 0 if that is among them."""
    found = list(values)
    if not found or min(found) <= 0:
        return Scale(0.0, max(found, default=0.0))
    return Scale(min(found), max(found), ratios=True)


def cell_map(
    name: str,
    caption: str,
    values: Mapping[Place, float],
    dense: Iterable[Place],
    blocks: Sequence[Block],
    kinds: Sequence[str],
    *,
    scale: Scale,
    write: Write,
) -> Drawing:
    """Colour by value; hatched where layers were left dense."""
    column = {block: i for i, block in enumerate(blocks)}
    row = {kind: i for i, kind in enumerate(kinds)}
    levels: dict[int, list[tuple[int, int]]] = {}
    for (block, kind), value in values.items():
        levels.setdefault(scale.level(value), []).append((column[block], row[kind]))
    hatched = [(column[block], row[kind]) for block, kind in dense if (block, kind) not in values]
    short = short_kinds(kinds)
    with style():
        figure, axes, key = _new_figure(len(kinds))
        gap = 0.04 if len(blocks) <= 40 else 0
        for step, cells in levels.items():
            color = light(f"heat-{step}")
            squares = _squares(cells, gap)
            # Not smoothed: seams would show between steps.
            axes.add_patch(PathPatch(squares, facecolor=color, linewidth=0, antialiased=False))
        if hatched:
            axes.add_patch(PathPatch(_squares(hatched, gap), **_HATCHED))
        set_block_axis(axes, blocks)
        set_name_axis(axes, [short[kind] for kind in kinds])
        axes.grid(False)
        axes.spines[:].set_visible(False)
        _draw_key(key, scale, write, has_dense=bool(hatched))
        alt = f"{caption} {_words(values, len(hatched), write)}"
        return finish(figure, name, caption, alt)


def _squares(cells: Sequence[tuple[int, int]], gap: float) -> Path:
    corners = np.array([(0, 0), (1, 0), (1, 1), (0, 1), (0, 0)]) * (1 - 2 * gap) + gap - 0.5
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
    vertices = np.concatenate([corners + cell for cell in cells])
    return Path(vertices, codes * len(cells))


def _new_figure(num_kinds: int) -> tuple[Figure, Axes, Axes]:
    heights = [0.13, max(0.21 * num_kinds, 0.25)]
    figure = Figure(figsize=(WIDTH, 0.75 + sum(heights)), layout="constrained")
    key, axes = figure.subplots(2, 1, height_ratios=heights)
    return figure, axes, key


def _draw_key(axes: Axes, scale: Scale, write: Write, *, has_dense: bool) -> None:
    axes.set_axis_off()
    axes.set_xlim(0, 5 * HEAT_STEPS)
    axes.set_ylim(0, 1)
    text: dict[str, Any] = {"va": "center", "color": light("muted"), "fontsize": 8}
    start = 4
    smallest = write(scale.smallest) if scale.smallest else "0"
    axes.text(start - 0.5, 0.5, smallest, **text, ha="right")
    for step in range(HEAT_STEPS):
        color = light(f"heat-{step}")
        axes.add_patch(Rectangle((start + step, 0), 1, 1, facecolor=color, linewidth=0))
    axes.text(start + HEAT_STEPS + 0.5, 0.5, write(scale.largest), **text)
    if has_dense:
        axes.add_patch(Rectangle((start + 2.2 * HEAT_STEPS, 0), 2, 1, **_HATCHED))
        axes.text(start + 2.2 * HEAT_STEPS + 2.5, 0.5, "left dense", **text)


def _words(values: Mapping[Place, float], dense: int, write: Write) -> str:
    if not values:
        return "No layer is pruned."
    low, high = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
    text = f"From {write(values[low])} ({_name(low)}) to {write(values[high])} ({_name(high)})."
    return f"{text} Left dense: {dense} of {dense + len(values)} cells." if dense else text


def _name(cell: Place) -> str:
    block, kind = cell
    return kind if block.number is None else f"{block.stack}.{block.number}.{kind}"
