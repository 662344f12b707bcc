"""The parts of a page, and their pictures: line plots and heat maps of tables, as SVG and PNG.

Pictures are drawn for a light background; on a dark one a CSS filter inverts their lightness.
"""

import io
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log10
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import pandas as pd
from matplotlib import rc_params_from_file
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
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
_HEAT = LinearSegmentedColormap.from_list("mrp-lightning", ("#e2efed", "#06363b"), 64)
_DASHES = ((0, ()), (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.2, 1, 1.2)))
_MARKERS = ("o", "s", "^", "D", "P", "X", "v", "<", ">", "h", "p", "*")
_DENSE: Any = {"color": INK, "linewidth": 1.2, "linestyle": (0, (4, 2))}
_WIDE_RANGE = 20  # the ratio of largest to smallest value above which an axis is logarithmic
_LONGEST_LINE = 20  # characters of a name beside the axes
_LISTED = 12  # the most values of a line that its text alternative lists

Methods = Mapping[str, str | None]
"""The canonical method of each label, which determines its colour; `None` is the dense model."""


@dataclass(frozen=True)
class Picture:
    """A picture.

    Attributes:
        name: The name of its file, without the ending; pictures of a page may share it.
        caption: The caption above it.
        alt: Its content in words and numbers.
        svg: The picture as SVG, with a transparent background.
        png: The picture as PNG, with a light background.
    """

    name: str
    caption: str
    alt: str
    svg: bytes
    png: bytes


@dataclass(frozen=True)
class Part:
    """A part of a page: a text, pictures, tables, and parts that are folded away inside it.

    The content of a folded part is shown on request.
    """

    title: str
    text: str = ""
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()
    folds: Sequence["Part"] = ()
    folded: bool = False

    @property
    def all_pictures(self) -> list[Picture]:
        """The pictures of the part and of its `folds`, but not of folds inside these."""
        return [*self.pictures, *(picture for fold in self.folds for picture in fold.pictures)]


class Scale(NamedTuple):
    """An axis: its name, the format of its values, and whether it starts at 0."""

    name: str
    write: Write
    zero: bool = True


def picture(name: str, caption: str, words: str, draw: Callable[[], Figure]) -> Picture:
    """Return a picture of the figure that `draw` makes; its `alt` is the caption and `words`."""
    alt = f"{caption} {words}"
    with warnings.catch_warnings(), matplotlib.rc_context(STYLE):
        # A name in a script that matplotlib's font lacks is still shown in the SVG.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure, svg, png = draw(), io.BytesIO(), io.BytesIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(svg, format="svg", metadata=nothing)
        figure.set_layout_engine("none")  # already laid out; a second layout would take longest
        figure.savefig(png, format="png", dpi=200, facecolor=PAPER, metadata={"Title": alt})
    return Picture(name, caption, alt, svg.getvalue(), png.getvalue())


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
    name: str,
    caption: str,
    values: pd.DataFrame,
    methods: Methods,
    scale: Scale,
    *,
    across: str | None = None,
    band: tuple[pd.DataFrame, pd.DataFrame] | None = None,
) -> Picture:
    """Draw a named line for each column of a table over its index.

    Args:
        name: See `Picture`.
        caption: See `Picture`.
        values: The index holds numbers, names, or names of blocks; the columns are labels.
        methods: The method of each label.
        scale: The axis of the values.
        across: The name of the axis of the index; `None` if the index holds blocks.
        band: The lower and the upper ends of a shaded area around each line.
    """
    is_number = pd.api.types.is_numeric_dtype(values.index)
    positions = list(values.index) if is_number else list(range(len(values)))

    def draw() -> Figure:
        height = 0.9 + 0.17 * sum(len(_in_lines(label)) for label in values)
        figure, axes = new_figure(max(2.5, height))
        ends = {}
        for label, style in zip(values, line_styles([methods[x] for x in values]), strict=True):
            # The markers of more values would cover the line.
            style |= {} if len(values) <= 16 else {"marker": ""}
            # Without missing values, which would interrupt the line.
            line = pd.Series(values[label].to_numpy(), positions).dropna()
            axes.plot(line.index, line, **style)
            for low, high in [band] if band else []:
                area: Any = {"color": style["color"], "alpha": 0.18, "linewidth": 0}
                axes.fill_between(positions, low[label], high[label], **area)
            if len(line):
                ends[label] = (float(line.index[-1]), float(line.iloc[-1]), str(style["color"]))
        if across is None:
            _set_block_axis(axes, list(values.index))
        elif is_number:
            set_value_axis(axes, "x", positions, zero=False)
        else:
            _set_category_axis(axes, list(values.index))
        axes.set(**{} if across is None else {"xlabel": across}, ylabel=scale.name)
        shown = pd.concat([values, *(band or ())]).stack().dropna()
        set_value_axis(axes, "y", list(shown), zero=scale.zero)
        # Last, since labels are placed by the limits of the axes.
        if len(ends) > 1:
            label_ends(axes, ends)
        return figure

    return picture(name, caption, _in_words(values, scale), draw)


def common_scale(tables: Sequence[pd.DataFrame]) -> Normalize:
    """Return a logarithmic scale over all values; linear from 0 if one is 0, or all are equal."""
    values = [x for table in tables for x in table.stack().dropna()]
    low, high = min(values, default=0.0), max(values, default=0.0)
    # LogNorm needs 0 < low < high; a table of zeros or of one value would have an empty scale.
    return LogNorm(low, high) if 0 < low < high else Normalize(0.0, high or 1.0)


def draw_map(
    name: str,
    caption: str,
    cells: pd.DataFrame,
    dense: pd.DataFrame,
    colors: Normalize,
    write: Write,
) -> Picture:
    """Draw a map of kinds of layers (rows) by blocks (columns), coloured by value.

    A cell without a value is NaN; at least one has a value. `dense`, bool of the same shape, marks
    layers that stayed dense: their cells without a value are hatched.
    """
    blocks = list(cells.columns)
    hatched = np.argwhere(dense.to_numpy() & cells.isna().to_numpy())

    def draw() -> Figure:
        figure, axes = new_figure(0.8 + max(0.21 * len(cells), 0.25))
        gap = 1.5 if len(blocks) <= 40 else 0  # points
        x, y = (np.arange(length + 1) - 0.5 for length in cells.T.shape)
        edges: Any = {"edgecolors": PAPER if gap else "none", "linewidth": gap}
        # Cells are paths in the SVG, and not an image, so that they stay sharp at any size.
        mesh = axes.pcolormesh(x, y, np.ma.masked_invalid(cells), norm=colors, cmap=_HEAT, **edges)
        hatching: Any = {"hatch": "////", "fill": False, "edgecolor": MUTED, "linewidth": 0}
        for row, column in hatched:
            axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, **hatching))
        _set_block_axis(axes, blocks)
        set_name_axis(axes, list(cells.index))
        axes.grid(False)
        axes.spines[:].set_visible(False)
        colorbar_options: Any = {
            "location": "top",
            "shrink": 0.4,
            "aspect": 14,
            "anchor": (0.0, 0.0),
        }
        key = figure.colorbar(mesh, ax=axes, ticks=[colors.vmin, colors.vmax], **colorbar_options)
        key.set_ticklabels([write(colors.vmin) if colors.vmin else "0", write(colors.vmax)])
        key.outline.set_visible(False)
        if key.solids is not None:
            key.solids.set_rasterized(False)  # else an image in the SVG
        key.minorticks_off()
        if len(hatched):
            figure.legend([Rectangle((0, 0), 1, 1, **hatching)], ["left dense"], loc="upper right")
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


def _in_lines(name: str) -> list[str]:
    return wrap(name, _LONGEST_LINE)


def label_ends(axes: Axes, ends: Mapping[str, tuple[float, float, str]]) -> None:
    """Label lines at their ends, to the right of the axes, whose limits must be set.

    `ends` holds the last point and the colour of each line. Labels that would overlap are moved
    apart, with a rule from each label to its line. Long labels are broken, to leave room for the
    axes.
    """
    broken = {name: _in_lines(name) for name in ends}
    figure_height = axes.figure.get_figheight()  # type: ignore[union-attr]
    # The axes take about 0.72 of the figure's height. The layout is made only when the figure is
    # saved, so that the height is estimated and not measured.
    step = 1.25 * STYLE["font.size"] / 72 / (0.72 * figure_height)  # of the height of the axes
    step *= max(map(len, broken.values()), default=1)
    to_axes = axes.transData + axes.transAxes.inverted()
    tops = {name: float(to_axes.transform((x, y))[1]) for name, (x, y, _) in ends.items()}
    ordered = sorted(tops, key=lambda name: tops[name])
    # 1. Upwards, each label at least a step above the one before, so that none overlap.
    # 2. Downwards from the top of the axes, if the first pass went over it. Both keep the lines'
    #    order.
    heights: list[float] = []
    for name in ordered:  # upwards: each label at least a step above the last
        heights.append(max(tops[name], heights[-1] + step) if heights else tops[name])
    if heights and heights[-1] > 1:  # downwards, if the highest label is above the axes
        highest = 1.0
        for i in reversed(range(len(heights))):
            heights[i] = min(heights[i], highest)
            highest = heights[i] - step
    for name, height in zip(ordered, heights, strict=True):
        x, y, color = ends[name]
        text_options: Any = {"xycoords": "data", "textcoords": axes.transAxes, "va": "center"}
        text_options |= {"color": color, "annotation_clip": False}
        rule = {"arrowstyle": "-", "color": RULE, "linewidth": 0.8, "shrinkA": 1, "shrinkB": 3}
        axes.annotate(
            "\n".join(broken[name]), (x, y), (1.03, height), arrowprops=rule, **text_options
        )


def _set_block_axis(axes: Axes, blocks: Sequence[str]) -> None:
    """Show blocks from left to right, with a rule and a name for each stack if there are several.

    A block is called by its stack and its number, such as `model.layers.3`; the empty name stands
    for the layers outside of the blocks.
    """
    stacks, block_numbers = zip(*map(stack_and_number, blocks), strict=True)
    axes.set_xlim(-0.6, len(blocks) - 0.4)
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 10**9) if len(blocks) / s <= 10)
    ticks = {i: str(n) for i, n in enumerate(block_numbers) if n is not None and n % step == 0}
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.xaxis.grid(False)
    if len(set(stacks)) == 1:
        axes.set_xlabel("block")
        return
    for stack in dict.fromkeys(stacks):
        first, count = stacks.index(stack), stacks.count(stack)
        if first:
            axes.axvline(first - 0.5, color=RULE, linewidth=0.8)
        middle, name = (first + (count - 1) / 2, 0), stack.split(".")[0] or "other"
        text_options: Any = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points"}
        text_options |= {"va": "top", "ha": "center", "color": MUTED, "annotation_clip": False}
        axes.annotate(name, middle, (0, -16), **text_options)


def stack_and_number(block: str) -> tuple[str, int | None]:
    """Return the list that a block is in, and its index; outside lists, the block and `None`."""
    stack, _, number = block.rpartition(".")
    return (stack, int(number)) if number.isdecimal() and len(number) < 10 else (block, None)


def _set_category_axis(axes: Axes, names: Sequence[str]) -> None:
    """Show names from left to right, slanted where they would overlap."""
    slanted: Any = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(range(len(names)), names, **(slanted if sum(map(len, names)) > 30 else {}))
    axes.xaxis.grid(False)


def set_name_axis(axes: Axes, names: Sequence[str]) -> None:
    """Show names from top to bottom."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", labelcolor=INK)


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
