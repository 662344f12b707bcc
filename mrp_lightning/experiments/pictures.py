"""The pictures of a page: line plots of tables, as SVG.

Pictures are drawn for a light background; on a dark one a CSS filter inverts their lightness.
"""

import io
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib import rc_params_from_file
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from mrp_lightning.experiments.scores import Score

STYLE = rc_params_from_file(
    Path(__file__).with_name("pictures.mplstyle"), use_default_template=False
)
PAPER = "#fdfdfb"
RULE, MUTED, INK = (STYLE[key] for key in ("grid.color", "axes.labelcolor", "text.color"))
SERIES = tuple(STYLE["axes.prop_cycle"].by_key()["color"])
"""The colours of lines, in order."""

_WIDTH = 4.2  # inches, so that text is readable on a phone
_MARKERS = ("o", "s", "^", "D", "P", "X", "v")  # as colours alone do not reach every reader
_DENSE = {"color": INK, "linestyle": "--"}
_TICKS = 10  # the most names below an axis
_WIDE_RANGE = 20  # the ratio of largest to smallest value above which an axis is logarithmic


@dataclass(frozen=True)
class Picture:
    """A picture as SVG, with a transparent background."""

    caption: str
    alt: str  # its content in words and numbers
    svg: bytes


def picture(caption: str, words: str, draw: Callable[[], Figure]) -> Picture:
    """Return a picture of the figure that `draw` makes; its `alt` is the caption and `words`."""
    with warnings.catch_warnings(), matplotlib.rc_context(STYLE):
        # A name in a script that matplotlib's font lacks is still shown in the SVG.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        svg = io.BytesIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        draw().savefig(svg, format="svg", metadata=nothing)
    return Picture(caption, f"{caption} {words}", svg.getvalue())


def draw_lines(
    caption: str, values: pd.DataFrame, colors: Mapping[str, str], score: Score
) -> Picture:
    """Draw a line for each column of a table over its index.

    Args:
        caption: See `Picture`.
        values: The index holds names; the columns are labels, each with a finite value or more.
        colors: The colours of labels; a line without one is that of the dense model.
        score: The values' name and format. Perplexities have no meaningful zero to start from.
    """
    low, high = values.min().min(), values.max().max()

    def draw() -> Figure:
        # 0.17 inches for each line of the legend, which stands below the axes.
        figure = Figure(figsize=(_WIDTH, 2.3 + 0.17 * len(values.columns)), layout="constrained")
        axes = figure.subplots()
        markers = dict(zip(colors, cycle(_MARKERS), strict=False))
        for label in values:
            style: Any = _DENSE
            if label in colors:
                style = {"color": colors[label], "marker": markers[label]}
            # Without missing values, which would interrupt the line.
            line = values[label].reset_index(drop=True).dropna()
            axes.plot(line.index, line, label=label, markerfacecolor="none", **style)
        step = -(-len(values) // _TICKS)
        names: Any = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"}
        axes.set_xticks(range(0, len(values), step), values.index[::step], **names)
        axes.xaxis.grid(False)
        # On a linear axis, a wide range would press all but the largest values onto 0.
        if 0 < _WIDE_RANGE * low < high:
            axes.set(yscale="log")
            axes.yaxis.set(major_locator=LogLocator(subs=(1, 3)), minor_locator=NullLocator())
        elif not score.is_perplexity:
            axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set(ylabel=str(score))
        if len(values.columns) > 1:
            figure.legend(loc="outside lower left", frameon=False)
        return figure

    return picture(caption, " ".join(_in_words(values[x], score) for x in values), draw)


def _in_words(line: pd.Series, score: Score) -> str:
    """Describe a line by its lowest and its highest value."""
    low, high = (f"{score.write(line[at])} at {at}" for at in (line.idxmin(), line.idxmax()))
    return f"{line.name}: from {low} to {high}."
