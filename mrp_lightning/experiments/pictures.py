"""The parts of a page, and their pictures: line plots of tables, as SVG.

Pictures are drawn for a light background; on a dark one a CSS filter inverts their lightness.
"""

import io
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log10
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import pandas as pd
from matplotlib import rc_params_from_file
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from mrp_lightning.commands.numbers import Write
from mrp_lightning.experiments.scores import Table
from mrp_lightning.experiments.trials import method_rank

STYLE = rc_params_from_file(
    Path(__file__).with_name("pictures.mplstyle"), use_default_template=False
)
PAPER = "#fdfdfb"
RULE, MUTED, INK = (STYLE[key] for key in ("grid.color", "axes.labelcolor", "text.color"))
SERIES = tuple(STYLE["axes.prop_cycle"].by_key()["color"])
"""The colours of methods, in the order of `method_rank`."""

_WIDTH = 4.2  # inches, so that text is readable on a phone
_DASHES = ((0, ()), (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.2, 1, 1.2)))
_MARKERS = ("o", "s", "^", "D", "P", "X", "v", "<", ">", "h", "p", "*")
_DENSE: Any = {"color": INK, "linewidth": 1.2, "linestyle": (0, (4, 2))}
_WIDE_RANGE = 20  # the ratio of largest to smallest value above which an axis is logarithmic
_LISTED = 12  # the most values of a line that its text alternative lists

Methods = Mapping[str, str | None]
"""The canonical method of each label, which determines its colour; `None` is the dense model."""


@dataclass(frozen=True)
class Picture:
    """A picture as SVG, with a transparent background."""

    caption: str
    alt: str  # its content in words and numbers
    svg: bytes


@dataclass(frozen=True)
class Part:
    """A part of a page: a text, pictures, tables, and parts that are folded away inside it."""

    title: str
    text: str = ""
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()
    folds: Sequence["Part"] = ()
    folded: bool = False  # until its content is asked for


class Scale(NamedTuple):
    """An axis: its name, the format of its values, and whether it starts at 0."""

    name: str
    write: Write
    zero: bool = True


def picture(caption: str, words: str, draw: Callable[[], Figure]) -> Picture:
    """Return a picture of the figure that `draw` makes; its `alt` is the caption and `words`."""
    with warnings.catch_warnings(), matplotlib.rc_context(STYLE):
        # A name in a script that matplotlib's font lacks is still shown in the SVG.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        svg = io.BytesIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        draw().savefig(svg, format="svg", metadata=nothing)
    return Picture(caption, f"{caption} {words}", svg.getvalue())


def color_of(method: str) -> str:
    """Return the colour of a canonical method."""
    return SERIES[method_rank(method) % len(SERIES)]


def marker_of(method: str) -> str:
    """Return the marker of a canonical method."""
    return _MARKERS[method_rank(method) % len(_MARKERS)]


def line_styles(methods: Sequence[str | None]) -> Iterator[dict[str, Any]]:
    """Yield the options of each line of a picture, by canonical method (`None`: the dense model).

    The method determines colour and marker, the order among lines of one method the dashes. Lines
    and open markers become smaller from line to line, so that coinciding lines are all visible.
    """
    pruned = [method for method in methods if method is not None]
    i = -1
    for method in methods:
        if method is None:
            yield dict(_DENSE)
            continue
        i += 1
        later = i / (len(pruned) - 1) if len(pruned) > 1 else 1.0
        yield {
            "color": color_of(method),
            "marker": marker_of(method),
            "linestyle": _DASHES[pruned[:i].count(method) % len(_DASHES)],
            "linewidth": 2.6 - 1.6 * later,
            "markersize": 8 - 4 * later,
            "markerfacecolor": "none",
            "markeredgewidth": 1.2,
        }


def draw_lines(
    caption: str,
    values: pd.DataFrame,
    methods: Methods,
    scale: Scale,
    *,
    across: str | None = None,
) -> Picture:
    """Draw a named line for each column of a table over its index.

    Args:
        caption: See `Picture`.
        values: The index holds numbers, names, or names of blocks; the columns are labels.
        methods: The method of each label.
        scale: The axis of the values.
        across: The name of the axis of the index; `None` if the index holds blocks.
    """
    is_number = pd.api.types.is_numeric_dtype(values.index)
    positions = list(values.index) if is_number else list(range(len(values)))

    def draw() -> Figure:
        # 0.17 inches for each line of the legend, which stands below the axes.
        figure, axes = new_figure(2.3 + 0.17 * len(values.columns))
        for label, style in zip(values, line_styles([methods[x] for x in values]), strict=True):
            # The markers of more values would cover the line.
            style |= {} if len(values) <= 16 else {"marker": ""}
            # Without missing values, which would interrupt the line.
            line = pd.Series(values[label].to_numpy(), positions).dropna()
            axes.plot(line.index, line, label=label, **style)
        if across is None:
            _set_block_axis(axes, list(values.index))
        elif is_number:
            set_value_axis(axes, "x", positions, zero=False)
        else:
            _set_category_axis(axes, list(values.index))
        axes.set(**{} if across is None else {"xlabel": across}, ylabel=scale.name)
        set_value_axis(axes, "y", list(values.stack().dropna()), zero=scale.zero)
        if len(values.columns) > 1:
            figure.legend(loc="outside lower left", frameon=False)
        return figure

    return picture(caption, _in_words(values, scale), draw)


def _in_words(values: pd.DataFrame, scale: Scale) -> str:
    """Describe each column by its values, or by their mean and range if they are many."""

    def shown(column: pd.Series) -> str:
        if len(column) <= _LISTED:
            names = ["(none)" if at == "" else at for at in column.index]
            return ", ".join(f"{at} {scale.write(x)}" for at, x in zip(names, column, strict=True))
        ends = [f"{scale.write(column[at])} at {at}" for at in (column.idxmin(), column.idxmax())]
        return f"mean {scale.write(column.mean())}, from {ends[0]} to {ends[1]}"

    return " ".join(f"{label}: {shown(values[label].dropna())}." for label in values)


def new_figure(height: float) -> tuple[Figure, Axes]:
    """Return a figure of a phone's width and `height` inches, with one pair of axes."""
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def _set_block_axis(axes: Axes, blocks: Sequence[str]) -> None:
    """Show the numbers of blocks from left to right, with a rule between two lists of blocks.

    A block is called by its list and its number, such as `model.layers.3`; the empty name stands
    for the layers outside of the blocks.
    """
    stacks, block_numbers = zip(*map(stack_and_number, blocks), strict=True)
    axes.set_xlim(-0.6, len(blocks) - 0.4)
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 10**9) if len(blocks) / s <= 10)
    ticks = {i: str(n) for i, n in enumerate(block_numbers) if n is not None and n % step == 0}
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.xaxis.grid(False)
    lists = list(dict.fromkeys(stacks))
    for stack in lists[1:]:
        axes.axvline(stacks.index(stack) - 0.5, color=RULE, linewidth=0.8)
    names = [stack.split(".")[0] or "other" for stack in lists]
    axes.set_xlabel("block" if len(lists) == 1 else f"block: {' | '.join(names)}")


def stack_and_number(block: str) -> tuple[str, int | None]:
    """Return the list that a block is in, and its index; outside lists, the block and `None`."""
    stack, _, number = block.rpartition(".")
    return (stack, int(number)) if number.isdecimal() and len(number) < 10 else (block, None)


def _set_category_axis(axes: Axes, names: Sequence[str]) -> None:
    """Show names from left to right, slanted where they would overlap."""
    slanted: Any = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(range(len(names)), names, **(slanted if sum(map(len, names)) > 30 else {}))
    axes.xaxis.grid(False)


def set_value_axis(axes: Axes, which: str, values: Sequence[float], *, zero: bool = True) -> None:
    """Make an axis ("x" or "y") logarithmic for a wide range, else linear, from 0 if `zero`."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    # A logarithmic axis needs positive values. On a linear one, a wide range would press all but
    # the largest values onto 0.
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
