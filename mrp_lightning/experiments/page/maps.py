"""Heat maps: blocks from left to right, kinds of layers from top to bottom."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from mrp_lightning.experiments.numbers import Write
from mrp_lightning.experiments.page.axes import set_block_axis, set_name_axis
from mrp_lightning.experiments.page.places import Block, Place, short_kinds
from mrp_lightning.experiments.page.style import WIDTH, Picture, render


def scale_of(values: Iterable[float]) -> Normalize:
    """Equal ratios from the smallest to the largest value, or from 0 if that is among them."""
    found = list(values)
    low, high = min(found, default=0.0), max(found, default=0.0)
    return LogNorm(low, high) if 0 < low < high else Normalize(0.0, high or 1.0)


def cell_map(
    name: str,
    caption: str,
    values: Mapping[Place, float],
    dense: Iterable[Place],
    blocks: Sequence[Block],
    kinds: Sequence[str],
    *,
    scale: Normalize,
    write: Write,
) -> Picture:
    """Colour by value; hatched where layers were left dense."""
    column = {block: i for i, block in enumerate(blocks)}
    row = {kind: i for i, kind in enumerate(kinds)}
    cells = np.full((len(kinds), len(blocks)), np.nan)
    for (block, kind), value in values.items():
        cells[row[kind], column[block]] = value
    hatched = [(column[block], row[kind]) for block, kind in dense if (block, kind) not in values]
    short = short_kinds(kinds)

    def draw() -> Figure:
        heights = [0.13, max(0.21 * len(kinds), 0.25)]
        figure = Figure(figsize=(WIDTH, 0.75 + sum(heights)), layout="constrained")
        key, axes = figure.subplots(2, 1, height_ratios=heights)
        gap = 1.5 if len(blocks) <= 40 else 0  # points
        axes.pcolormesh(
            np.arange(len(blocks) + 1) - 0.5,
            np.arange(len(kinds) + 1) - 0.5,
            np.ma.masked_invalid(cells),
            norm=scale,
            edgecolors=rcParams["figure.facecolor"] if gap else "none",
            linewidth=gap,
        )
        for x, y in hatched:
            axes.add_patch(_hatched(x - 0.5, y - 0.5, 1))
        set_block_axis(axes, blocks)
        set_name_axis(axes, [short[kind] for kind in kinds])
        axes.grid(False)
        axes.spines[:].set_visible(False)
        _draw_key(key, scale, write, has_dense=bool(hatched))
        return figure

    return render(name, caption, _words(values, len(hatched), write), draw)


def _draw_key(axes: Axes, scale: Normalize, write: Write, *, has_dense: bool) -> None:
    axes.set_axis_off()
    axes.set_xlim(0, 40)
    axes.set_ylim(0, 1)
    text: dict[str, Any] = {"va": "center", "color": rcParams["axes.labelcolor"], "fontsize": 8}
    axes.text(3.5, 0.5, write(scale.vmin) if scale.vmin else "0", **text, ha="right")
    axes.pcolormesh(np.linspace(4, 12, 65), [0, 1], np.linspace(0, 1, 64)[None])
    axes.text(12.5, 0.5, write(scale.vmax), **text)
    if has_dense:
        axes.add_patch(_hatched(21.6, 0, 2))
        axes.text(24.1, 0.5, "left dense", **text)


def _hatched(x: float, y: float, width: float) -> Rectangle:
    color = rcParams["axes.labelcolor"]
    return Rectangle((x, y), width, 1, hatch="////", fill=False, edgecolor=color, linewidth=0)


def _words(values: Mapping[Place, float], dense: int, write: Write) -> str:
    if not values:
        return "No layer is pruned."
    low, high = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
    text = f"From {write(values[low])} ({_name(low)}) to {write(values[high])} ({_name(high)})."
    return f"{text} Left dense: {dense} of {dense + len(values)} cells." if dense else text


def _name(cell: Place) -> str:
    block, kind = cell
    return kind if block.number is None else f"{block.stack}.{block.number}.{kind}"
