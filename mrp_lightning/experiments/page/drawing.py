"""Drawing a picture once, for light and dark paper, and the axes that several pictures share.

The page turns the lightness of pictures round on dark paper, by a filter of CSS.
"""

import io
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log10
from typing import Any

import matplotlib
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from mrp_lightning.experiments.methods import method_rank
from mrp_lightning.experiments.page.layers import OUTSIDE, Block
from mrp_lightning.experiments.page.models import Variant

WIDTH = 4.2
"""Inches. The text of a picture of this width is readable on a phone."""

# Text has a contrast of 4.5 and more with the paper, lines of 3 and more; turned round, too.
PAPER, RULE, MUTED, INK = "#fdfdfb", "#dddedb", "#5b646d", "#1c2024"
SERIES = (
    *("#7b838c", "#a06d14", "#c04a2b", "#5d7822", "#0a6d74", "#5b50a4"),
    *("#ad3977", "#2d6db3", "#87583a", "#3b7d50", "#8a3dae", "#69692a"),
)
"""One colour a method, in the order of `method_rank`."""
HEAT = LinearSegmentedColormap.from_list("mrp-lightning", ("#e2efed", "#06363b"))
STYLE: Any = {
    "font.family": ["sans-serif"],
    "font.size": 9,
    "text.parse_math": False,  # names may hold anything
    "text.color": INK,
    "axes.prop_cycle": cycler(color=SERIES),
    "axes.edgecolor": RULE,
    "axes.labelcolor": MUTED,
    "axes.labelsize": 9,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "xtick.color": RULE,
    "xtick.labelcolor": MUTED,
    "ytick.color": RULE,
    "ytick.labelcolor": MUTED,
    "ytick.major.size": 0,
    "hatch.linewidth": 0.7,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "svg.fonttype": "none",
    "svg.hashsalt": "mrp-lightning",  # the same runs give the same bytes
}
_DASHES = ((0, ()), (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.2, 1, 1.2)))
_MARKERS = ("o", "s", "^", "D", "P", "X", "v", "<", ">", "h", "p", "*")
_WIDE_RANGE = 20


@dataclass(frozen=True)
class Picture:
    """A picture of the page.

    Attributes:
        name: The name of its PNG file, without the ending; pictures of a page may share it.
        caption: What stands above it.
        alt: What it shows, in words and numbers, for those who cannot see it.
        svg: The picture without a background.
        png: The picture on light paper, for use elsewhere.
    """

    name: str
    caption: str
    alt: str
    svg: bytes
    png: bytes


def render(name: str, caption: str, words: str, draw: Callable[[], Figure]) -> Picture:
    """Draw a picture; see `Picture` for the texts. `words` is what it shows, after the caption."""
    alt = f"{caption} {words}"
    with warnings.catch_warnings(), matplotlib.rc_context(STYLE):
        # A name in a script that matplotlib's font lacks is still right in the SVG.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure, svg, png = draw(), io.BytesIO(), io.BytesIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(svg, format="svg", metadata=nothing)
        figure.set_layout_engine("none")  # it is laid out now, and laying out takes longest
        figure.savefig(png, format="png", dpi=200, facecolor=PAPER, metadata={"Title": alt})
    return Picture(name, caption, alt, svg.getvalue(), png.getvalue())


def color_of(method: str) -> str:
    """The colour of a canonical method."""
    return SERIES[method_rank(method) % len(SERIES)]


@dataclass(frozen=True)
class Look:
    """How a variant is drawn, so that all are seen where their values are the same.

    Colour and marker are by method, dashes by the order among variants of one method. Lines and
    open markers are the smaller the later they are drawn, and marks in rows are moved apart.

    Attributes:
        line: Options of a line with markers.
        mark: Options of a mark without a line.
        shift: Where a mark stands in its row, between −0.5 and 0.5.
    """

    line: dict[str, Any]
    mark: dict[str, Any]
    shift: float


def looks(variants: Sequence[Variant]) -> dict[Variant, Look]:
    """The look of each variant among the others."""
    return dict(zip(variants, looks_of_methods([v.method for v in variants]), strict=True))


def looks_of_methods(methods: Sequence[str]) -> list[Look]:
    """The looks of what is drawn into one picture, by its canonical methods."""
    found = []
    for i, method in enumerate(methods):
        turn, marker = methods[:i].count(method), _MARKERS[method_rank(method) % len(_MARKERS)]
        mark = {"color": color_of(method), "marker": marker}
        later = i / (len(methods) - 1) if len(methods) > 1 else 1.0
        line: dict[str, Any] = {
            "linestyle": _DASHES[turn % len(_DASHES)],
            "linewidth": 4.6 - 3.4 * later,
        }
        line |= {"markersize": 8 - 4 * later, "markerfacecolor": "none", "markeredgewidth": 1.2}
        shift = (i + 0.5) / len(methods) - 0.5
        found.append(Look(mark | line, mark | {"linestyle": "", "markersize": 5}, shift))
    return found


def new_figure(height: float) -> tuple[Figure, Axes]:
    """A pair of axes of the width of a phone; the height is in inches."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def add_legend(figure: Figure, lines: dict[str, dict[str, Any]]) -> None:
    """Draw a legend above the axes, if there is more than one line."""
    if len(lines) < 2:
        return
    handles = [Line2D([], [], **options | {"markersize": 5}) for options in lines.values()]
    columns = max(1, min(len(lines), 48 // (max(map(len, lines)) + 6)))
    figure.legend(
        handles,
        list(lines),
        loc="outside upper left",
        ncols=columns,
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
            axes.axvline(at[0] - 0.5, color=RULE, linewidth=0.8)
        axes.annotate(
            "other" if stack == OUTSIDE.stack else stack.split(".")[0],
            ((at[0] + at[-1]) / 2, 0),
            xycoords=axes.get_xaxis_transform(),
            xytext=(0, -16),
            textcoords="offset points",
            va="top",
            ha="center",
            color=MUTED,
            annotation_clip=False,
        )


def set_name_axis(axes: Axes, names: Sequence[str]) -> None:
    """Show names from top to bottom."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", labelcolor=INK)


def set_value_axis(axes: Axes, which: str, values: Sequence[float], *, zero: bool = True) -> None:
    """Start at 0, or be logarithmic where the largest value is much above the smallest."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    if values and min(values) > 0 and max(values) > _WIDE_RANGE * min(values):
        axes.set(**{f"{which}scale": "log"})
        decades = log10(max(values) / min(values))
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 2 else (1,)))
        axis.set_minor_locator(NullLocator())
    else:
        axis.set_major_locator(MaxNLocator(5))
        if zero:
            axes.set(**{f"{which}lim": (0, 1.08 * max(values, default=1) or 1)})
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
