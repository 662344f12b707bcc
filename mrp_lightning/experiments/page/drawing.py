"""How pictures look: once, for light and dark paper, with the axes that several of them share.

The page turns the lightness of pictures round on dark paper, by a filter of CSS.
"""

import io
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import log10
from pathlib import Path
from textwrap import wrap
from typing import Any

import matplotlib
from matplotlib import rc_params_from_file
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
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
_DENSE: Any = {"color": INK, "linewidth": 1.2, "linestyle": (0, (4, 2))}
_WIDE_RANGE = 20
_LONGEST_LINE = 20  # characters of a name beside the axes


def picture(
    name: str, caption: str, words: str, draw: Callable[[], Figure], *, wide: bool = False
) -> Picture:
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
    return Picture(name, caption, alt, svg.getvalue(), png.getvalue(), wide)


def color_of(method: str) -> str:
    """The colour of a canonical method."""
    return SERIES[method_rank(method) % len(SERIES)]


def marker_of(method: str) -> str:
    """The marker of a canonical method."""
    return _MARKERS[method_rank(method) % len(_MARKERS)]


def lines(methods: Sequence[str | None]) -> Iterator[dict[str, Any]]:
    """The options of the lines of one picture, by canonical methods; `None` is the dense model.

    Colour and marker are by method, dashes by the order among lines of one method. Lines and open
    markers are the smaller the later they are drawn, so that all are seen where their values are
    the same. The dense model is a dashed line.
    """
    pruned = [method for method in methods if method is not None]
    i = -1
    for method in methods:
        if method is None:
            yield dict(_DENSE)
            continue
        i += 1
        dashes = _DASHES[pruned[:i].count(method) % len(_DASHES)]
        later = i / (len(pruned) - 1) if len(pruned) > 1 else 1.0
        line: dict[str, Any] = {
            "color": color_of(method),
            "marker": marker_of(method),
            "linestyle": dashes,
        }
        line |= {"linewidth": 2.6 - 1.6 * later, "markersize": 8 - 4 * later}
        yield line | {"markerfacecolor": "none", "markeredgewidth": 1.2}


def new_figure(height: float) -> tuple[Figure, Axes]:
    """A pair of axes of the width of a phone; the height is in inches."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def in_lines(name: str) -> list[str]:
    """The lines of a name that stands beside the axes."""
    return wrap(name, _LONGEST_LINE)


def label_ends(axes: Axes, ends: Mapping[str, tuple[float, float, str]]) -> None:
    """Name lines at their ends, right of the axes, which have their limits by now.

    `ends` holds the last point of each line and its colour. Names that would lie on each other are
    moved apart, and a rule leads from each to its end. Long ones are broken, to leave room for the
    axes.
    """
    broken = {name: in_lines(name) for name in ends}
    figure_height = axes.figure.get_figheight()  # type: ignore[union-attr]
    step = 1.25 * STYLE["font.size"] / 72 / (0.72 * figure_height)  # of the height of the axes
    step *= max(map(len, broken.values()), default=1)
    to_axes = axes.transData + axes.transAxes.inverted()
    tops = {name: float(to_axes.transform((x, y))[1]) for name, (x, y, _) in ends.items()}
    ordered = sorted(tops, key=lambda name: tops[name])
    places: list[float] = []
    for name in ordered:
        places.append(max(tops[name], places[-1] + step) if places else tops[name])
    excess = max(0.0, places[-1] - 1) if places else 0.0
    for i, place in reversed(list(enumerate(places))):
        above = places[i + 1] - step if i + 1 < len(places) else 1.0
        places[i] = min(place, above) if excess else place
    for name, place in zip(ordered, places, strict=True):
        x, y, color = ends[name]
        how: Any = {"xycoords": "data", "textcoords": axes.transAxes, "va": "center"}
        how |= {"color": color, "annotation_clip": False}
        rule = {"arrowstyle": "-", "color": RULE, "linewidth": 0.8, "shrinkA": 1, "shrinkB": 3}
        axes.annotate("\n".join(broken[name]), (x, y), (1.03, place), arrowprops=rule, **how)


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


def set_category_axis(axes: Axes, names: Sequence[str]) -> None:
    """Show names from left to right, slanted where they would not fit beside each other."""
    slanted: Any = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(range(len(names)), names, **(slanted if sum(map(len, names)) > 30 else {}))
    axes.xaxis.grid(False)


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
