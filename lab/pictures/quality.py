"""The picture of docs/quality.md: perplexity by method and sparsity, on one axis.

    python lab/pictures/quality.py

It is drawn from the table of `RESULTS`, in a second.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from page import on_paper
from pages.peers import read_tables

from mrp_lightning.experiments.pictures import INK, MUTED, RULE, Picture, picture

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "lab/results/smollm2.md"
OUT = ROOT / "docs/pictures/quality.svg"

SETTINGS = {"50%": ("#0a6d74", "o"), "2:4": ("#a06d14", "s")}
"""Colour and marker of each sparsity."""

METHODS = {
    "Wanda": "Wanda",
    "SparseGPT": "SparseGPT",
    "SM": "optimal (SM)",
    "JM": "joint mask (JM),\nthe default",
    "best": "joint and tuned\n(best)",
}


def main() -> None:
    """Draw the picture."""
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(on_paper(quality_picture()), encoding="utf-8")


def quality_picture() -> Picture:
    """Return the picture of the table of `RESULTS`."""
    table = read_results(RESULTS)
    words = "; ".join(
        f"{row['method']} {row['sparsity']}: {row['perplexity']:.1f}" for _, row in table.iterrows()
    )
    return picture("quality", "Perplexity by method.", words, lambda: draw(table))


def read_results(page: Path) -> pd.DataFrame:
    """Return the perplexities of a page, with a row for each method and sparsity."""
    table = next(t for t in read_tables(page.read_text("utf-8")) if "perplexity @512" in t)
    table = table.rename(columns={"perplexity @512": "perplexity"})
    return table.assign(perplexity=table["perplexity"].astype(float))


def draw(table: pd.DataFrame) -> Figure:
    """Draw a row for each method, and a marker with its value for each sparsity."""
    figure = Figure(figsize=(6.8, 3.1), layout="constrained")
    axes = figure.subplots()
    (dense,) = table[table["sparsity"] == "dense"]["perplexity"]
    for setting, (color, marker) in SETTINGS.items():
        values = table[table["sparsity"] == setting].set_index("method")["perplexity"]
        points = [(values[method], -row) for row, method in enumerate(METHODS) if method in values]
        axes.plot(*zip(*points, strict=True), marker, color=color, markersize=6, label=setting)
        for value, row in points:
            style: Any = {"textcoords": "offset points", "ha": "center", "fontsize": 7.5}
            axes.annotate(f"{value:.1f}", (value, row), (0, 6), color=INK, **style)
    axes.plot(dense, 1, "*", color=INK, markersize=9, label="dense")
    axes.annotate(f"{dense:.1f}", (dense, 1), (10, 0), textcoords="offset points", va="center",
                  fontsize=7.5, color=INK)  # fmt: skip
    axes.set(xscale="log", xlabel="perplexity (lower is better)", ylim=(-4.6, 1.5))
    axes.set_xlim(24, 1.25 * table["perplexity"].max())
    axes.xaxis.set_major_locator(FixedLocator([25, 30, 40, 50, 75, 100, 200, 400, 600]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yticks([1, *(-row for row in range(len(METHODS)))], ["dense", *METHODS.values()])
    axes.grid(False)
    for row in range(len(METHODS)):
        axes.axhline(0.5 - row, color=RULE, linewidth=0.6)
    axes.legend(loc="lower right", frameon=False, fontsize=8, labelcolor=MUTED, ncols=2)
    return figure


if __name__ == "__main__":
    main()
