"""Axes that several pictures share: blocks in order, names one below the other, a legend."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log10

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from mrp_lightning.experiments.methods import method_rank
from mrp_lightning.experiments.page.models import Variant
from mrp_lightning.experiments.page.places import OUTSIDE, Block
from mrp_lightning.experiments.page.style import WIDTH

_Dashes = tuple[float, tuple[float, ...]]
_LINES: tuple[_Dashes, ...] = ((0, ()), (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.2, 1, 1.2)))
_MARKERS = ("o", "s", "^", "D", "P", "X", "v", "<", ">", "h", "p", "*")
_WIDE_RANGE = 20


@dataclass(frozen=True)
class Look:
    """How a variant is drawn; shape tells methods apart where colour does not."""

    color: str
    marker: str
    line: _Dashes


def looks(variants: Sequence[Variant]) -> dict[Variant, Look]:
    """Colour and marker are by method, the line by the order among variants of one method."""
    seen: dict[str, int] = {}
    found = {}
    for variant in variants:
        rank = method_rank(variant.method)
        turn = seen[variant.method] = seen.get(variant.method, -1) + 1
        line = _LINES[turn % len(_LINES)]
        found[variant] = Look(f"C{rank}", _MARKERS[rank % len(_MARKERS)], line)
    return found


def new_figure(height: float) -> tuple[Figure, Axes]:
    """A pair of axes of the width of a phone; the height is in inches."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def add_legend(figure: Figure, variants: Sequence[Variant]) -> None:
    """Draw a legend above the axes, if there is more than one variant."""
    if len(variants) < 2:
        return
    handles = [
        Line2D([], [], color=look.color, marker=look.marker, linestyle=look.line, markersize=5)
        for look in looks(variants).values()
    ]
    labels = [variant.label for variant in variants]
    columns = max(1, min(len(labels), 48 // (max(map(len, labels)) + 6)))
    figure.legend(
        handles,
        labels,
        loc="outside upper left",
        ncols=columns,
        frameon=False,
        handlelength=2.2,
        columnspacing=1.2,
        borderaxespad=0.2,
    )


def set_block_axis(axes: Axes, blocks: Sequence[Block]) -> None:
    """Show blocks from left to right; a rule and a name for each stack where there are several."""
    axes.set_xlim(-0.6, len(blocks) - 0.4)
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500) if len(blocks) / s <= 10)
    ticks = [i for i, b in enumerate(blocks) if b.number is not None and b.number % step == 0]
    axes.set_xticks(ticks, [str(blocks[i].number) for i in ticks])
    axes.xaxis.grid(False)
    stacks = list(dict.fromkeys(block.stack for block in blocks))
    if len(stacks) == 1:
        axes.set_xlabel("block")
        return
    for stack in stacks:
        at = [i for i, block in enumerate(blocks) if block.stack == stack]
        if at[0]:
            axes.axvline(at[0] - 0.5, color=rcParams["grid.color"], linewidth=0.8)
        name = "other" if stack == OUTSIDE.stack else stack.split(".")[0]
        axes.annotate(
            name,
            ((at[0] + at[-1]) / 2, 0),
            xycoords=axes.get_xaxis_transform(),
            xytext=(0, -16),
            textcoords="offset points",
            va="top",
            ha="center",
            color=rcParams["axes.labelcolor"],
            annotation_clip=False,
        )


def set_name_axis(axes: Axes, names: Sequence[str]) -> None:
    """Show names from top to bottom."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", labelcolor=rcParams["text.color"])


def set_value_axis(axes: Axes, which: str, values: Sequence[float], *, zero: bool = True) -> None:
    """Start at 0, or be logarithmic where the largest value is much above the smallest."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    set_scale = axes.set_xscale if which == "x" else axes.set_yscale
    positive = [value for value in values if value > 0]
    if positive and len(positive) == len(values) and max(values) > _WIDE_RANGE * min(values):
        set_scale("log")
        decades = log10(max(values) / min(values))
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 2 else (1,)))
        axis.set_minor_locator(NullLocator())
    else:
        axis.set_major_locator(MaxNLocator(5))
        if zero:
            set_limits = axes.set_xlim if which == "x" else axes.set_ylim
            set_limits(0, 1.08 * max(values, default=1) or 1)
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
