"""Perplexity over bits a weight: our curves and theirs."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import cycle

from few_bits import DENSE, Cost
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from mrp_lightning.commands.numbers import perplexity
from mrp_lightning.experiments.pictures import (
    INK,
    MUTED,
    SERIES,
    Picture,
    new_figure,
    picture,
    set_value_axis,
)

Points = Mapping[str, Sequence[tuple[float, float, str]]]
"""By the name of a line, its points (x, perplexity) and what they are called."""
ASIDE = {
    "ours, bits alone": {"xytext": (-3, 2), "ha": "right"},
    "GPTQ": {"xytext": (-3, 2), "ha": "right"},
    "llama.cpp, importance matrix": {"xytext": (3, -7)},
}
"""Positions of the labels of points, by the beginning of their line's name; by default above
right."""
MOST = 2.6
"""Perplexities above so many times the dense model's are left out: the others would be one line."""


def line_of(cost: Cost) -> str:
    """Return the line that a cost belongs to."""
    if cost.weights.startswith("llama.cpp"):
        return "llama.cpp, importance matrix" if "imatrix" in cost.weights else "llama.cpp"
    if cost.way in ("GPTQ", "nearest rounding"):
        return "GPTQ" if cost.way == "GPTQ" else "PyTorch int4"
    if cost.weights[0].isdigit() and "%" not in cost.weights and ":" not in cost.weights:
        return f"ours, bits alone ({cost.way})"
    places = "2:4, " if ":" in cost.weights else ""
    return f"ours, {places}{'4 bits' if 'bits' in cost.weights else '16 bits'} ({cost.way})"


def name_of(cost: Cost) -> str:
    """Return the label of a point, without the part that the name of its line has."""
    name = cost.weights.removeprefix("llama.cpp ").removesuffix(" imatrix")
    return name if line_of(cost).startswith("ours, bits") else name.removesuffix(" 4 bits")


def bits_picture(costs: Sequence[Cost]) -> Picture:
    """Return the picture of perplexity over bits a weight."""
    (dense,) = [cost.perplexity for cost in costs if cost.weights == DENSE]
    points: dict[str, list[tuple[float, float, str]]] = {}
    for cost in costs:
        if not cost.weights.startswith(DENSE) and cost.perplexity < MOST * dense:
            point = (cost.bits, cost.perplexity, name_of(cost))
            points.setdefault(line_of(cost), []).append(point)
    colors = dict(zip(points, cycle(SERIES), strict=False))
    words = "; ".join(map(in_words, points.items()))
    caption = "Perplexity over bits a weight; dashed: dense."
    return picture("bits", caption, words, partial(draw, points, colors, "bits a weight", dense))


def in_words(line: tuple[str, Sequence[tuple[float, float, str]]]) -> str:
    """Return a line for who does not see the picture."""
    name, points = line
    return f"{name}: " + ", ".join(f"{c} at {x:.2f} {perplexity(y)}" for x, y, c in sorted(points))


def draw(points: Points, colors: Mapping[str, str], axis: str, dense: float) -> Figure:
    """One picture."""
    figure, axes = new_figure(4.4)
    axes.axhline(dense, color=INK, linewidth=1, linestyle=(0, (4, 2)))
    for line, line_points in points.items():
        x, y, names = zip(*sorted(line_points), strict=True)
        ours = line.startswith("ours")
        style = {"linestyle": "-" if ours else "", "marker": "o" if ours else "^"}
        axes.plot(x, y, color=colors[line], label=line, markersize=4, linewidth=1.2, **style)
        for place, name in zip(zip(x, y, strict=True), names, strict=True):
            aside = (where for start, where in ASIDE.items() if line.startswith(start))
            how = {"textcoords": "offset points", "fontsize": 5.5, "color": MUTED}
            axes.annotate(name, place, **how, **next(aside, {"xytext": (3, 2)}))
    axes.set(xlabel=axis, ylabel="perplexity")
    set_value_axis(axes, "x", [x for line in points.values() for x, *_ in line])
    axes.set_yscale("log")  # most points lie close above the dense model's
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 6, 8)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    figure.legend(loc="outside lower center", ncols=2, fontsize=6, frameon=False)
    return figure
