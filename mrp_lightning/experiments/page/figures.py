"""Figures that compare methods: along the blocks, by kind of layer, and by what a model can do."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from mrp_lightning.experiments.page.axes import (
    add_legend,
    looks,
    new_figure,
    set_block_axis,
    set_name_axis,
    set_value_axis,
)
from mrp_lightning.experiments.page.drawing import Drawing, finish, style
from mrp_lightning.experiments.page.measures import Summary, by_block
from mrp_lightning.experiments.page.models import Variant
from mrp_lightning.experiments.page.palette import light
from mrp_lightning.experiments.page.places import Block

Write = Callable[[float | None], str]


@dataclass(frozen=True)
class Quantity:
    """A figure of a layer.

    Attributes:
        key: In `pruning_report.json`.
        name: Of the axis.
        write: How a number is written.
        summary: Of the layers of a block or kind.
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
    slots: Mapping[str, int],
    blocks: Sequence[Block],
    quantity: Quantity,
) -> Drawing:
    """A line for each variant; a band from the smallest to the largest of several runs."""
    with style():
        figure, axes = new_figure(2.5)
        drawn = looks(variants, slots)
        shown = []
        for variant in variants:
            look = drawn[variant]
            found = by_block(variant, quantity.key, quantity.summary)
            at = [i for i, block in enumerate(blocks) if block in found]
            runs = [[x / quantity.scale for x in found[blocks[i]]] for i in at]
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
        add_legend(figure, variants, drawn)
        alt = f"{caption} {_words(variants, lambda v: _block_words(v, quantity))}"
        return finish(figure, name, caption, alt)


def over_names(
    name: str,
    caption: str,
    axis: str,
    labels: Mapping[str, str],
    found: Mapping[Variant, Mapping[str, float]],
    slots: Mapping[str, int],
    write: Write,
    *,
    dense: Mapping[str, float] | None = None,
    zero: bool = True,
) -> Drawing:
    """A mark for each variant in each row, and a tick where the dense model is.

    Args:
        name: Of the PNG.
        caption: What is shown.
        axis: Name of the values.
        labels: The rows, and what they are called.
        found: Values by row.
        slots: Colours of methods.
        write: How a value is written.
        dense: Values by row.
        zero: Whether the axis starts at 0.
    """
    variants = list(found)
    rows = list(labels)
    with style():
        figure, axes = new_figure(0.95 + 0.24 * len(rows))
        drawn = looks(variants, slots)
        shown = [
            *(dense or {}).values(),
            *(x for values in found.values() for x in values.values()),
        ]
        if dense:
            at = [i for i, row in enumerate(rows) if row in dense]
            before = [dense[rows[i]] for i in at]
            axes.plot(before, at, "|", color=light("ink"), markersize=13, markeredgewidth=1.6)
        for variant, look in drawn.items():
            at = [i for i, row in enumerate(rows) if row in found[variant]]
            values = [found[variant][rows[i]] for i in at]
            axes.plot(values, at, color=look.color, marker=look.marker, linestyle="", markersize=5)
        set_name_axis(axes, [labels[row] for row in rows])
        set_value_axis(axes, "x", shown, zero=zero)
        axes.set_xlabel(f"{axis}; tick: dense" if dense else axis)
        add_legend(figure, variants, drawn)
        words = _words(
            variants, lambda v: ", ".join(f"{row} {write(x)}" for row, x in found[v].items())
        )
        tell = ", ".join(f"{row} {write(x)}" for row, x in (dense or {}).items())
        return finish(
            figure, name, caption, f"{caption} {f'Dense: {tell}. ' if tell else ''}{words}"
        )


@dataclass(frozen=True)
class Score:
    """What one variant reached: the mean of its runs, and half the width of the bar around it."""

    value: float
    spread: float = 0.0


def beside_dense(
    name: str,
    caption: str,
    scores: Mapping[Variant, Score],
    slots: Mapping[str, int],
    dense: float | None,
    axis: str,
    write: Write,
) -> Drawing:
    """A mark for each variant with its value, and a line where the dense model is."""
    variants = list(scores)
    with style():
        figure, axes = new_figure(0.75 + 0.27 * len(variants))
        drawn = looks(variants, slots)
        for i, (variant, score) in enumerate(scores.items()):
            look = drawn[variant]
            axes.errorbar(
                score.value,
                i,
                xerr=score.spread or None,
                color=look.color,
                marker=look.marker,
                markersize=6,
                elinewidth=1.2,
            )
            axes.annotate(
                write(score.value),
                (score.value + score.spread, i),
                xytext=(7, 0),
                textcoords="offset points",
                va="center",
            )
        every = [score.value for score in scores.values()] + ([] if dense is None else [dense])
        set_name_axis(axes, [variant.label for variant in variants])
        set_value_axis(axes, "x", every, zero=False)
        if dense is not None:
            axes.axvline(dense, color=light("ink"), linewidth=1, linestyle=(0, (4, 2)))
            axes.set_title(f"dense {write(dense)}", loc="left", fontsize=9, color=light("ink"))
        axes.margins(x=0.18)
        axes.yaxis.grid(False)
        axes.set_xlabel(axis)
        words = _words(variants, lambda v: write(scores[v].value))
        before = "" if dense is None else f" Dense: {write(dense)}."
        return finish(figure, name, caption, f"{caption}{before} {words}")


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
