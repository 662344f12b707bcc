"""The pictures of a page: along the blocks, in rows, beside the dense model, as maps, as counts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from mrp_lightning.experiments.numbers import Write
from mrp_lightning.experiments.page.drawing import (
    HEAT,
    INK,
    MUTED,
    PAPER,
    WIDTH,
    Picture,
    add_legend,
    looks,
    new_figure,
    render,
    set_block_axis,
    set_name_axis,
    set_value_axis,
)
from mrp_lightning.experiments.page.layers import Block, short_kinds
from mrp_lightning.experiments.page.models import Variant
from mrp_lightning.experiments.page.weights import MAGNITUDES
from mrp_lightning.experiments.summary import Average


def along_blocks(
    name: str,
    caption: str,
    found: Mapping[Variant, pd.DataFrame],
    blocks: Sequence[Block],
    axis: str,
    write: Write,
    scale: float = 1,
) -> Picture:
    """A line for each variant; a band from the smallest to the largest of several runs.

    Args:
        name: The name of the PNG file.
        caption: What is shown.
        found: By variant the `mean`, `min` and `max` over its runs, by the index of the block.
        blocks: All blocks.
        axis: The name of the values.
        write: How a value is written.
        scale: What a value is divided by to be drawn.
    """

    def draw() -> Figure:
        figure, axes = new_figure(2.5)
        styles = {variant: look.line for variant, look in looks(list(found)).items()}
        for variant, values in found.items():
            style = styles[variant] | ({} if len(blocks) <= 16 else {"marker": ""})
            drawn = values / scale
            axes.plot(drawn.index, drawn["mean"], **style)
            if len(variant.runs) > 1:
                band = {"color": style["color"], "alpha": 0.18, "linewidth": 0}
                axes.fill_between(drawn.index, drawn["min"], drawn["max"], **band)
        set_block_axis(axes, blocks)
        set_value_axis(axes, "y", list(pd.concat(found).stack() / scale))
        axes.set_ylabel(axis)
        add_legend(figure, {variant.label: style for variant, style in styles.items()})
        return figure

    def words(variant: Variant) -> str:
        mean = found[variant]["mean"]
        low, high = mean.idxmin(), mean.idxmax()
        return (
            f"mean {write(mean.mean())}, from {write(mean[low])} in block {blocks[low]} to "
            f"{write(mean[high])} in block {blocks[high]}"
        )

    return render(name, caption, _of_each(found, words), draw)


def over_names(
    name: str,
    caption: str,
    axis: str,
    labels: Mapping[str, str],
    found: Mapping[Variant, Mapping[str, float]],
    write: Callable[[float], str],
    *,
    dense: Mapping[str, float] | None = None,
    zero: bool = True,
    scale: float = 1,
) -> Picture:
    """A mark for each variant in each row, and a tick where the dense model is.

    Args:
        name: The name of the PNG file.
        caption: What is shown.
        axis: The name of the values.
        labels: The rows, and what they are called.
        found: The values of each variant by row.
        write: How a value is written.
        dense: The values of the dense model by row.
        zero: Whether the axis starts at 0.
        scale: What a value is divided by to be drawn.
    """
    rows, dense = {row: i for i, row in enumerate(labels)}, dense or {}

    def draw() -> Figure:
        figure, axes = new_figure(0.95 + max(0.24, 0.08 + 0.075 * len(found)) * len(rows))
        ticks = [x / scale for x in dense.values()]
        axes.plot(ticks, [rows[row] for row in dense], "|", color=INK, ms=13, mew=1.6)
        styles = looks(list(found))
        for variant, look in styles.items():
            at = [rows[row] + 0.8 * look.shift for row in found[variant]]
            axes.plot([x / scale for x in found[variant].values()], at, **look.mark)
        shown = [x / scale for values in [dense, *found.values()] for x in values.values()]
        set_name_axis(axes, list(labels.values()))
        set_value_axis(axes, "x", shown, zero=zero)
        axes.set_xlabel(f"{axis}; tick: dense" if dense else axis)
        add_legend(figure, {variant.label: look.mark for variant, look in styles.items()})
        return figure

    def listed(values: Mapping[str, float]) -> str:
        return ", ".join(f"{row} {write(x)}" for row, x in values.items())

    before = f"Dense: {listed(dense)}. " if dense else ""
    return render(name, caption, before + _of_each(found, lambda v: listed(found[v])), draw)


def beside_dense(
    name: str,
    caption: str,
    scores: Mapping[Variant, Average],
    dense: float | None,
    axis: str,
    write: Write,
) -> Picture:
    """A mark for the mean of each variant, ± its deviation, and a line where the dense model is."""

    def draw() -> Figure:
        figure, axes = new_figure(0.75 + 0.27 * len(scores))
        for i, (variant, look) in enumerate(looks(list(scores)).items()):
            mean, deviation = scores[variant].mean, scores[variant].deviation
            axes.errorbar(mean, i, xerr=deviation, elinewidth=1.2, **look.mark)
            at = (mean + (deviation or 0), i)
            axes.annotate(write(mean), at, (7, 0), textcoords="offset points", va="center")
        every = [score.mean for score in scores.values()] + ([] if dense is None else [dense])
        set_name_axis(axes, [variant.label for variant in scores])
        set_value_axis(axes, "x", every, zero=False)
        if dense is not None:
            axes.axvline(dense, color=INK, linewidth=1, linestyle=(0, (4, 2)))
            axes.set_title(f"dense {write(dense)}", loc="left", fontsize=9)
        axes.margins(x=0.18)
        axes.yaxis.grid(False)
        axes.set_xlabel(axis)
        return figure

    before = "" if dense is None else f"Dense: {write(dense)}. "
    words = _of_each(scores, lambda variant: write(scores[variant].mean))
    return render(name, caption, before + words, draw)


def scale_of(values: Sequence[float]) -> Normalize:
    """Equal ratios from the smallest to the largest value, or from 0 if that is among them."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    return LogNorm(low, high) if 0 < low < high else Normalize(0.0, high or 1.0)


def cell_map(
    name: str,
    caption: str,
    cells: pd.DataFrame,
    dense: pd.DataFrame,
    blocks: Sequence[Block],
    scale: Normalize,
    write: Write,
) -> Picture:
    """Colour by value; hatched where layers were left dense.

    Args:
        name: The name of the PNG file.
        caption: What is shown.
        cells: The values, kinds by the indices of blocks; NaN where there is none.
        dense: Of the same form: where layers were left dense.
        blocks: All blocks.
        scale: From values to colours.
        write: How a value is written.
    """
    hatched = np.argwhere(dense.to_numpy() & cells.isna().to_numpy())

    def draw() -> Figure:
        heights = [0.13, max(0.21 * len(cells), 0.25)]
        figure = Figure(figsize=(WIDTH, 0.75 + sum(heights)), layout="constrained")
        key, axes = figure.subplots(2, 1, height_ratios=heights)
        gap = 1.5 if len(blocks) <= 40 else 0  # points
        x, y = (np.arange(length + 1) - 0.5 for length in cells.T.shape)
        edges: Any = {"edgecolors": PAPER if gap else "none", "linewidth": gap}
        axes.pcolormesh(x, y, np.ma.masked_invalid(cells), norm=scale, cmap=HEAT, **edges)
        for row, column in hatched:
            axes.add_patch(_hatched(column - 0.5, row - 0.5, 1))
        set_block_axis(axes, blocks)
        short = short_kinds(list(cells.index))
        set_name_axis(axes, [short[kind] for kind in cells.index])
        axes.grid(False)
        axes.spines[:].set_visible(False)
        _draw_key(key, scale, write, has_dense=len(hatched) > 0)
        return figure

    values = cells.stack().dropna()
    ends = [(i, blocks[i[1]]) for i in (values.idxmin(), values.idxmax())]
    low, high = (
        f"{write(values[i])} ({i[0] if block.number is None else f'{block}.{i[0]}'})"
        for i, block in ends
    )
    words = f"From {low} to {high}."
    if len(hatched):
        words += f" Left dense: {len(hatched)} of {len(hatched) + len(values)} cells."
    return render(name, caption, words, draw)


def magnitudes(
    name: str,
    caption: str,
    dense: np.ndarray | None,
    kept: Mapping[Variant, np.ndarray],
    num_weights: int,
) -> Picture:
    """A line for the kept weights of each variant over their size, and one for the dense weights.

    Args:
        name: The name of the PNG file.
        caption: What is shown.
        dense: How many dense weights are in each bin of `MAGNITUDES`.
        kept: How many weights each variant kept in each bin.
        num_weights: The number of weights before pruning, of which the axis shows the share.
    """
    centers = np.sqrt(MAGNITUDES[1:] * MAGNITUDES[:-1])
    every = np.sum([*kept.values(), *([] if dense is None else [dense])], axis=0)
    low, high = np.searchsorted(np.cumsum(every) / every.sum(), [0.002, 0.9999])
    shown = slice(low, high + 1)

    def draw() -> Figure:
        figure, axes = new_figure(2.6)
        lines: dict[str, dict[str, Any]] = {}
        if dense is not None:
            lines["dense"] = {"color": INK, "linewidth": 1.2, "linestyle": (0, (4, 2))}
            axes.plot(centers[shown], 100 * dense[shown] / num_weights, **lines["dense"])
        for variant, look in looks(list(kept)).items():
            line = lines[variant.label] = look.line | {"marker": ""}
            axes.plot(centers[shown], 100 * kept[variant][shown] / num_weights, **line)
        set_value_axis(axes, "x", list(centers[shown]))
        axes.set(xlabel="|weight|", ylabel="% of all weights", ylim=(0, None))
        axes.xaxis.grid(False)
        add_legend(figure, lines)
        return figure

    def median(counts: np.ndarray) -> str:
        return f"{centers[np.searchsorted(np.cumsum(counts), counts.sum() / 2)]:.2g}"

    before = "" if dense is None else f"Dense: the median of |w| is about {median(dense)}. "
    return render(name, caption, before + _of_each(kept, lambda v: median(kept[v])), draw)


def _draw_key(axes: Axes, scale: Normalize, write: Write, *, has_dense: bool) -> None:
    axes.set_axis_off()
    axes.set_xlim(0, 40)
    axes.set_ylim(0, 1)
    text: dict[str, Any] = {"va": "center", "color": MUTED, "fontsize": 8}
    axes.text(3.5, 0.5, write(scale.vmin) if scale.vmin else "0", **text, ha="right")
    axes.pcolormesh(np.linspace(4, 12, 65), [0, 1], np.linspace(0, 1, 64)[None], cmap=HEAT)
    axes.text(12.5, 0.5, write(scale.vmax), **text)
    if has_dense:
        axes.add_patch(_hatched(21.6, 0, 2))
        axes.text(24.1, 0.5, "left dense", **text)


def _hatched(x: float, y: float, width: float) -> Rectangle:
    return Rectangle((x, y), width, 1, hatch="////", fill=False, edgecolor=MUTED, linewidth=0)


def _of_each(variants: Mapping[Variant, Any], words: Callable[[Variant], str]) -> str:
    return " ".join(f"{variant.label}: {words(variant)}." for variant in variants)
