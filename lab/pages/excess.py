"""The picture of excess perplexities: each method's distance to the dense model, by sparsity."""

from collections.abc import Mapping, Sequence
from math import ceil
from statistics import median
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from mrp_lightning.experiments.pictures import (
    INK,
    MUTED,
    Picture,
    color_of,
    marker_of,
    picture,
    set_name_axis,
)

_IN_A_ROW = 3
_FAR = 4
"""Values larger than this multiple of the median are drawn at the edge, with their number."""


def draw_excess(
    name: str,
    caption: str,
    panels: Mapping[str, pd.DataFrame],
    methods: Mapping[str, str | None],
    *,
    dense: float | None,
    peers: Mapping[str, Mapping[str, float]] | None = None,
) -> Picture:
    """A row for each method, a panel for each sparsity, a dot with its deviation for each result.

    A dot shows the distance to the dense model, and the perplexity stands next to it. One
    that is far above the others is an arrow at the edge. Without a dense model the axes begin where
    the values do.

    Args:
        name: See `Picture`.
        caption: See `Picture`.
        panels: By sparsity, the columns `mean` and `deviation` (NaN for a single run) by label.
        methods: The canonical methods, which decide colours and markers, by label.
        dense: The perplexity of the dense model, if it is known.
        peers: By sparsity and name, the perplexities of other codes, drawn as lines.
    """
    labels = list(dict.fromkeys(label for panel in panels.values() for label in panel.index))
    peers = {setting: of for setting, of in (peers or {}).items() if setting in panels}
    tiers = max((len(of) for of in peers.values()), default=0)
    down = ceil(len(panels) / _IN_A_ROW)
    across = ceil(len(panels) / down)

    def draw() -> Figure:
        height = 0.75 + 0.24 * len(labels) + 0.17 * tiers
        figure = Figure(figsize=(1.3 + 1.75 * across, height * down), layout="constrained")
        grid = figure.subplots(down, across, sharey=True, squeeze=False)
        for i, (axes, (setting, panel)) in enumerate(zip(grid.flat, panels.items(), strict=False)):
            set_name_axis(axes, labels)
            axes.set_ylim(len(labels) - 0.4, -0.6 - 0.75 * tiers)
            if i % across:
                axes.tick_params(axis="y", labelleft=False)
            axes.set_title(setting, fontsize=10, fontweight="bold", color=INK)
            _draw_panel(axes, panel, labels, methods, dense, peers.get(setting, {}))
        for axes in list(grid.flat)[len(panels) :]:
            axes.set_visible(False)
        above = f"perplexity above the dense model's {_short(dense)}" if dense else "perplexity"
        above += "; lines: the original codes" if tiers else ""
        figure.supxlabel(above, fontsize=9, color=MUTED)
        return figure

    return picture(name, caption, _words(panels, dense, peers), draw)


def _draw_panel(
    axes: Axes,
    panel: pd.DataFrame,
    labels: Sequence[str],
    methods: Mapping[str, str | None],
    dense: float | None,
    peers: Mapping[str, float],
) -> None:
    """One sparsity."""
    base = dense or 0.0
    means = panel["mean"] - base
    middle = median(means)
    edge = _FAR * middle if len(means) > 2 and dense and middle > 0 else np.inf
    near = means[means <= edge]
    reach = panel["deviation"].fillna(0.0)
    lines = {peer: value - base for peer, value in peers.items()}
    high = max([*(near + reach[near.index]), *(x for x in lines.values() if x <= edge)])
    low = 0.0 if dense else min(near - reach[near.index])
    low = min([low, *(near - reach[near.index])])
    width = (high - low) or 1.0
    axes.set_xlim(low - (0.0 if low == 0 else 0.08 * width), high + 0.42 * width)
    axes.xaxis.set_major_locator(MaxNLocator(3, integer=width > 3))
    axes.xaxis.grid(False)
    axes.yaxis.grid(True, linewidth=0.4)
    if dense:
        axes.axvline(0, color=INK, linewidth=1.4)
    by_value = sorted(lines.items(), key=lambda item: -item[1])
    for tier, (peer, value) in enumerate(by_value):
        if value <= edge:
            y = -0.6 - 0.75 * (tier + 0.5)
            axes.vlines(value, y + 0.35, len(labels), color=MUTED, linewidth=0.8, alpha=0.7)
            at = (value - low) / (1.42 * width)
            side = "right" if at > 0.7 or (tier and at > 0.25) else "center"
            _write(axes, peer, (value, y), color=MUTED, ha=side)
    for label, mean in means.items():
        y, method = labels.index(str(label)), methods[str(label)]
        color = INK if method is None else color_of(method)
        written = _short(panel["mean"][label], width if mean <= edge else np.inf)
        if mean > edge:
            _write(axes, f"{written} ▸", (axes.get_xlim()[1], y), color=color, ha="right")
            continue
        error = reach[label]
        axes.errorbar(
            mean,
            y,
            xerr=error or None,
            color=color,
            marker=marker_of(method) if method else "o",
            markersize=5.5,
            elinewidth=1.4,
        )
        _write(axes, written, (mean + error, y), color=INK, xytext=(6, 0))


def _write(axes: Axes, text: str, position: tuple[float, float], **how: Any) -> None:
    look: dict[str, Any] = {"xytext": (0, 0), "va": "center", "ha": "left", "fontsize": 8} | how
    axes.annotate(text, position, textcoords="offset points", annotation_clip=False, **look)


def _short(value: float, width: float = np.inf) -> str:
    """Format a value with three digits, or with as many as distinguish values on the axis."""
    if value >= 1e5:
        return f"{value:.0e}".replace("e+0", "e").replace("e+", "e")
    decimals = max(0, 2 - int(np.log10(max(value, 1))), 2 if width < 3 else 1 if width < 30 else 0)
    return f"{value:,.{decimals}f}"


def _words(
    panels: Mapping[str, pd.DataFrame],
    dense: float | None,
    peers: Mapping[str, Mapping[str, float]],
) -> str:
    parts = [f"The dense model has {_short(dense)}."] if dense else []
    for setting, panel in panels.items():
        listed = [
            f"{label} {_short(row['mean'])}"
            + (f" ± {row['deviation']:.2g}" if row["deviation"] > 0 else "")
            for label, row in panel.iterrows()
        ]
        listed += [f"{of}'s code {_short(value)}" for of, value in peers.get(setting, {}).items()]
        parts.append(f"{setting}: {', '.join(listed)}.")
    return " ".join(parts)
