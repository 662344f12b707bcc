"""How pictures look: once, for light and dark paper, with the axes that several of them share.

The page turns the lightness of pictures round on dark paper, by a filter of CSS.
"""

import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from math import log10
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib import rc_params_from_file
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from mrp_lightning.experiments.page.parts import Picture
from mrp_lightning.experiments.trials import method_rank

WIDTH = 4.2
"""Inches. The text of a picture of this width is readable on a phone."""

STYLE = rc_params_from_file(Path(__file__).with_name("page.mplstyle"), use_default_template=False)
PAPER, RULE, MUTED, INK = (
    "#fdfdfb",
    *(STYLE[key] for key in ("grid.color", "axes.labelcolor", "text.color")),
)
SERIES = tuple(STYLE["axes.prop_cycle"].by_key()["color"])
"""One colour a method, in the order of `method_rank`."""
HEAT = LinearSegmentedColormap.from_list("mrp-lightning", ("#e2efed", "#06363b"), 64)
_DASHES = ((0, ()), (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.2, 1, 1.2)))
_MARKERS = ("o", "s", "^", "D", "P", "X", "v", "<", ">", "h", "p", "*")
_DENSE: Any = {"color": INK, "linewidth": 1.2, "markersize": 13, "markeredgewidth": 1.6}
_WIDE_RANGE = 20


class Look(NamedTuple):
    """The options of a line, those of a mark without one, and by how much it is moved in its row.

    Colour and marker are by method, dashes by the order among lines of one method. Lines and
    open markers are the smaller the later they are drawn, and marks in rows are moved apart, so
    that all are seen where their values are the same.
    """

    line: dict[str, Any]
    mark: dict[str, Any]
    shift: float = 0.0


def picture(name: str, caption: str, words: str, draw: Callable[[], Figure]) -> Picture:
    """Draw a picture; `words` is what it shows, after the caption."""
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


def looks(methods: Sequence[str | None]) -> Iterator[Look]:
    """The looks of what is drawn into one picture, by canonical methods; `None` is the dense model.

    The dense model is a dashed line, or a tick.
    """
    pruned = [method for method in methods if method is not None]
    i = -1
    for method in methods:
        if method is None:
            tick = _DENSE | {"marker": "|", "linestyle": ""}
            yield Look(_DENSE | {"linestyle": (0, (4, 2))}, tick)
            continue
        i += 1
        dashes = _DASHES[pruned[:i].count(method) % len(_DASHES)]
        mark = {"color": color_of(method), "marker": _MARKERS[method_rank(method) % len(_MARKERS)]}
        later = i / (len(pruned) - 1) if len(pruned) > 1 else 1.0
        line: dict[str, Any] = mark | {"linestyle": dashes, "linewidth": 2.6 - 1.6 * later}
        line |= {"markersize": 8 - 4 * later, "markerfacecolor": "none", "markeredgewidth": 1.2}
        shift = (i + 0.5) / len(pruned) - 0.5
        yield Look(line, mark | {"linestyle": "", "markersize": 5}, shift)


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
    how: Any = {"handlelength": 2.2, "columnspacing": 1.2, "borderaxespad": 0.2}
    figure.legend(handles, list(lines), loc="outside upper left", ncols=columns, **how)


def set_block_axis(axes: Axes, blocks: Sequence[str]) -> None:
    """Show blocks from left to right; a rule and a name for each stack where there are several.

    A block is called by its stack and its number, such as `model.layers.3`; the empty name is what
    stands in no block.
    """
    places = [stack_and_number(block) for block in blocks]
    stacks = [stack for stack, _ in places]
    axes.set_xlim(-0.6, len(blocks) - 0.4)
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 10**9) if len(blocks) / s <= 10)
    ticks = {i: str(n) for i, (_, n) in enumerate(places) if n is not None and n % step == 0}
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.xaxis.grid(False)
    if len(set(stacks)) == 1:
        axes.set_xlabel("block")
        return
    for stack in dict.fromkeys(stacks):
        first, number = stacks.index(stack), stacks.count(stack)
        if first:
            axes.axvline(first - 0.5, color=RULE, linewidth=0.8)
        place, name = (first + (number - 1) / 2, 0), stack.split(".")[0] or "other"
        how: Any = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points"}
        how |= {"va": "top", "ha": "center", "color": MUTED, "annotation_clip": False}
        axes.annotate(name, place, (0, -16), **how)


def stack_and_number(block: str) -> tuple[str, int | None]:
    """The list that a block is in, and its place in that: `None` for a block in no list."""
    stack, _, number = block.rpartition(".")
    return (stack, int(number)) if number.isdecimal() and len(number) < 10 else (block, None)


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
