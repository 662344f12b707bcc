"""The pictures of a page, each of a table of numbers: lines, and maps."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from mrp_lightning.experiments.numbers import Write
from mrp_lightning.experiments.page.drawing import (
    HEAT,
    MUTED,
    PAPER,
    in_lines,
    label_ends,
    lines,
    new_figure,
    picture,
    set_block_axis,
    set_category_axis,
    set_name_axis,
    set_value_axis,
)
from mrp_lightning.experiments.page.parts import Picture

Methods = Mapping[str, str | None]
"""The canonical methods, which decide the colours, by label; `None` is the dense model."""

_LISTED = 12
"""So many values of a line are listed in words; of longer ones the ends are named."""


class Scale(NamedTuple):
    """An axis of values: its name, how they are written, and what they are divided by."""

    name: str
    write: Write
    divisor: float = 1.0
    zero: bool = True


def draw_lines(
    name: str,
    caption: str,
    values: pd.DataFrame,
    methods: Methods,
    scale: Scale,
    *,
    across: str | None = None,
    band: tuple[pd.DataFrame, pd.DataFrame] | None = None,
) -> Picture:
    """A named line for each column of a table, over its index: numbers, names, or names of blocks.

    `across` is the name of that axis, `None` where it is blocks. `band` holds the lower and the
    upper end of what is shaded around each line.
    """
    is_number = pd.api.types.is_numeric_dtype(values.index)
    places = list(values.index) if is_number else list(range(len(values)))

    def draw() -> Figure:
        figure, axes = new_figure(max(2.5, 0.9 + 0.17 * sum(len(in_lines(x)) for x in values)))
        ends = {}
        for label, line in zip(values, lines([methods[x] for x in values]), strict=True):
            style = line | ({} if len(values) <= 16 else {"marker": ""})
            drawn = pd.Series(values[label].to_numpy(), places).dropna() / scale.divisor
            axes.plot(drawn.index, drawn, **style)
            for low, high in [band] if band else []:
                limits = (low[label] / scale.divisor, high[label] / scale.divisor)
                axes.fill_between(places, *limits, color=style["color"], alpha=0.18, linewidth=0)
            if len(drawn):
                ends[label] = (float(drawn.index[-1]), float(drawn.iloc[-1]), str(line["color"]))
        if across is None:
            set_block_axis(axes, list(values.index))
        elif is_number:
            set_value_axis(axes, "x", places, zero=False)
        else:
            set_category_axis(axes, list(values.index))
        axes.set(**{} if across is None else {"xlabel": across}, ylabel=scale.name)
        shown = pd.concat([values, *(band or ())])
        set_value_axis(axes, "y", _drawn(shown, scale), zero=scale.zero)
        if len(ends) > 1:
            label_ends(axes, ends)
        return figure

    return picture(name, caption, _words(values, scale), draw)


def common_scale(tables: list[pd.DataFrame]) -> Normalize:
    """Equal ratios from the smallest to the largest value, or from 0 if that is among them."""
    values = [x for table in tables for x in table.stack().dropna()]
    low, high = min(values, default=0.0), max(values, default=0.0)
    return LogNorm(low, high) if 0 < low < high else Normalize(0.0, high or 1.0)


def draw_map(
    name: str,
    caption: str,
    cells: pd.DataFrame,
    dense: pd.DataFrame,
    labels: Mapping[str, str],
    colors: Normalize,
    write: Write,
) -> Picture:
    """A map of kinds of layers (rows, called by `labels`) by blocks, coloured by value.

    A cell is NaN where there is no value, and hatched where `dense` says that layers were left so.
    """
    blocks = list(cells.columns)
    hatched = np.argwhere(dense.to_numpy() & cells.isna().to_numpy())

    def draw() -> Figure:
        figure, axes = new_figure(0.8 + max(0.21 * len(cells), 0.25))
        gap = 1.5 if len(blocks) <= 40 else 0  # points
        x, y = (np.arange(length + 1) - 0.5 for length in cells.T.shape)
        edges: Any = {"edgecolors": PAPER if gap else "none", "linewidth": gap}
        mesh = axes.pcolormesh(x, y, np.ma.masked_invalid(cells), norm=colors, cmap=HEAT, **edges)
        left: Any = {"hatch": "////", "fill": False, "edgecolor": MUTED, "linewidth": 0}
        for row, column in hatched:
            axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, **left))
        set_block_axis(axes, blocks)
        set_name_axis(axes, [labels[kind] for kind in cells.index])
        axes.grid(False)
        axes.spines[:].set_visible(False)
        how: Any = {"location": "top", "shrink": 0.4, "aspect": 14, "anchor": (0.0, 0.0)}
        key = figure.colorbar(mesh, ax=axes, ticks=[colors.vmin, colors.vmax], **how)
        key.set_ticklabels([write(colors.vmin) if colors.vmin else "0", write(colors.vmax)])
        key.outline.set_visible(False)
        if key.solids is not None:
            key.solids.set_rasterized(False)  # an image in the SVG
        key.minorticks_off()
        if len(hatched):
            figure.legend([Rectangle((0, 0), 1, 1, **left)], ["left dense"], loc="upper right")
        return figure

    values = cells.stack().dropna()
    low, high = (
        f"{write(values[at])} ({'.'.join(part for part in reversed(at) if part)})"
        for at in (values.idxmin(), values.idxmax())
    )
    words = f"From {low} to {high}."
    if len(hatched):
        words += f" Left dense: {len(hatched)} of {len(hatched) + len(values)} cells."
    return picture(name, caption, words, draw)


def _drawn(values: pd.DataFrame, scale: Scale) -> list[float]:
    return list(values.stack().dropna() / scale.divisor)


def _words(values: pd.DataFrame, scale: Scale) -> str:
    """Describe in words what each column shows."""

    def shown(column: pd.Series) -> str:
        if len(column) <= _LISTED:
            return ", ".join(f"{place or '(none)'} {scale.write(x)}" for place, x in column.items())
        ends = [f"{scale.write(column[at])} at {at}" for at in (column.idxmin(), column.idxmax())]
        return f"mean {scale.write(column.mean())}, from {ends[0]} to {ends[1]}"

    return " ".join(f"{label}: {shown(values[label].dropna())}." for label in values)
