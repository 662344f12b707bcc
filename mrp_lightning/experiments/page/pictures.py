"""Pictures that compare methods: along the blocks, by kind of layer, and beside the dense model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from matplotlib import rcParams
from matplotlib.figure import Figure

from mrp_lightning.experiments.numbers import Write
from mrp_lightning.experiments.page.axes import (
    add_legend,
    looks,
    new_figure,
    set_block_axis,
    set_name_axis,
    set_value_axis,
)
from mrp_lightning.experiments.page.layer_values import Summary, by_block
from mrp_lightning.experiments.page.models import Variant
from mrp_lightning.experiments.page.places import Block
from mrp_lightning.experiments.page.style import Picture, render
from mrp_lightning.experiments.summary import Average


@dataclass(frozen=True)
class Quantity:
    """A value of a layer.

    Attributes:
        key: Its name in `LayerReport`.
        name: The name of the axis.
        write: How a number is written.
        summary: What is taken over the layers of a block or kind.
        scale: What a number is divided by to be drawn.
    """

    key: str
    name: str
    write: Write
    summary: Summary = fmean
    scale: float = 1


def along_blocks(
    name: str,
    caption: str,
    variants: Sequence[Variant],
    blocks: Sequence[Block],
    quantity: Quantity,
) -> Picture:
    """A line for each variant; a band from the smallest to the largest of several runs."""
    found = {v: by_block(v, quantity.key, quantity.summary) for v in variants}

    def draw() -> Figure:
        figure, axes = new_figure(2.5)
        shown = []
        for variant, look in looks(variants).items():
            at = [i for i, block in enumerate(blocks) if block in found[variant]]
            runs = [[x / quantity.scale for x in found[variant][blocks[i]]] for i in at]
            shown += [x for values in runs for x in values]
            axes.plot(
                at,
                list(map(fmean, runs)),
                color=look.color,
                linestyle=look.line,
                marker=look.marker if len(blocks) <= 16 else "",
                markersize=4,
                linewidth=1.4,
            )
            if len(variant.runs) > 1:
                low, high = list(map(min, runs)), list(map(max, runs))
                axes.fill_between(at, low, high, color=look.color, alpha=0.18, linewidth=0)
        set_block_axis(axes, blocks)
        set_value_axis(axes, "y", shown)
        axes.set_ylabel(quantity.name)
        add_legend(figure, variants)
        return figure

    return render(name, caption, _words(variants, lambda v: _block_words(v, quantity)), draw)


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
    """
    variants, rows, dense = list(found), list(labels), dense or {}

    def draw() -> Figure:
        figure, axes = new_figure(0.95 + 0.24 * len(rows))
        at = [i for i, row in enumerate(rows) if row in dense]
        ink = rcParams["text.color"]
        axes.plot([dense[rows[i]] for i in at], at, "|", color=ink, ms=13, mew=1.6)
        for variant, look in looks(variants).items():
            at = [i for i, row in enumerate(rows) if row in found[variant]]
            values = [found[variant][rows[i]] for i in at]
            axes.plot(values, at, color=look.color, marker=look.marker, linestyle="", markersize=5)
        shown = [x for values in [dense, *found.values()] for x in values.values()]
        set_name_axis(axes, [labels[row] for row in rows])
        set_value_axis(axes, "x", shown, zero=zero)
        axes.set_xlabel(f"{axis}; tick: dense" if dense else axis)
        add_legend(figure, variants)
        return figure

    def listed(values: Mapping[str, float]) -> str:
        return ", ".join(f"{row} {write(x)}" for row, x in values.items())

    before = f"Dense: {listed(dense)}. " if dense else ""
    return render(name, caption, before + _words(variants, lambda v: listed(found[v])), draw)


def beside_dense(
    name: str,
    caption: str,
    scores: Mapping[Variant, Average],
    dense: float | None,
    axis: str,
    write: Write,
) -> Picture:
    """A mark for the mean of each variant, ± its deviation, and a line where the dense model is."""
    variants = list(scores)

    def draw() -> Figure:
        figure, axes = new_figure(0.75 + 0.27 * len(variants))
        for i, (variant, look) in enumerate(looks(variants).items()):
            mean, deviation = scores[variant].mean, scores[variant].deviation
            axes.errorbar(
                mean,
                i,
                xerr=deviation,
                color=look.color,
                marker=look.marker,
                markersize=6,
                elinewidth=1.2,
            )
            axes.annotate(
                write(mean),
                (mean + (deviation or 0), i),
                xytext=(7, 0),
                textcoords="offset points",
                va="center",
            )
        every = [score.mean for score in scores.values()] + ([] if dense is None else [dense])
        set_name_axis(axes, [variant.label for variant in variants])
        set_value_axis(axes, "x", every, zero=False)
        if dense is not None:
            axes.axvline(dense, color=rcParams["text.color"], linewidth=1, linestyle=(0, (4, 2)))
            axes.set_title(f"dense {write(dense)}", loc="left", fontsize=9)
        axes.margins(x=0.18)
        axes.yaxis.grid(False)
        axes.set_xlabel(axis)
        return figure

    before = "" if dense is None else f"Dense: {write(dense)}. "
    return render(name, caption, before + _words(variants, lambda v: write(scores[v].mean)), draw)


def _block_words(variant: Variant, quantity: Quantity) -> str:
    found = {block: fmean(x) for block, x in by_block(variant, quantity.key).items()}
    if not found:
        return "nothing measured"
    low, high = min(found, key=found.__getitem__), max(found, key=found.__getitem__)
    return (
        f"mean {quantity.write(fmean(found.values()))}, from {quantity.write(found[low])} in block "
        f"{_block_name(low)} to {quantity.write(found[high])} in block {_block_name(high)}"
    )


def _block_name(block: Block) -> str:
    return "(none)" if block.number is None else f"{block.stack}.{block.number}"


def _words(variants: Sequence[Variant], of: Callable[[Variant], str]) -> str:
    return " ".join(f"{variant.label}: {of(variant)}." for variant in variants)
