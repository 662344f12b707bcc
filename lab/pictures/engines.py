"""The picture of docs/engines.md: loss of each type by quantiser, of types that engines read.

    python lab/pictures/engines.py

It is drawn from the first tables of `TYPES` and `AUTO_ROUND`, in a second.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import pandas as pd
from matplotlib.figure import Figure
from page import on_paper
from pages.peers import read_tables

from mrp_lightning.experiments.pictures import INK, MUTED, RULE, Picture, picture

ROOT = Path(__file__).parents[2]
TYPES = ROOT / "lab/results/engine-types.md"
AUTO_ROUND = ROOT / "lab/results/auto-round.md"
OUT = ROOT / "docs/pictures/engines.svg"

QUANTISERS = {
    "mrp-lightning": ("#0a6d74", "o"),
    "mrp-lightning, balanced": ("#c04a2b", "s"),
    "mrp-lightning, balanced, dense target": ("#7a3b8f", "P"),
    "llama.cpp, importance matrix": ("#2d6db3", "^"),
    "AutoRound": ("#7b838c", "D"),
}
"""Colour and marker of each quantiser; markers differ, too, for readers who confuse the colours."""
ROWS = {
    "Q4_0": "Q4_0",
    "int4-g32": "W4A16, groups of 32",
    "int4-g64": "W4A16, groups of 64",
    "IQ4_NL": "IQ4_NL",
    "Q3_K_M": "Q3_K_M",
    "Q5_0": "Q5_0",
    "Q4_K_M": "Q4_K_M",
}
"""The types by their names in the tables, from the top, and their labels."""
_BITS = {"int4-g32": 4.5, "int4-g64": 4.25}


def main() -> None:
    """Draw the picture."""
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(on_paper(engines_picture()), encoding="utf-8")


def engines_picture() -> Picture:
    """Return the picture of the types of `TYPES` and `AUTO_ROUND`."""
    dense, table = read_results()
    words = "; ".join(
        f"{row['type']} by {row['quantiser']}: {row['perplexity']:.2f}"
        for _, row in table.iterrows()
    )
    caption = "Perplexity of SmolLM2-135M with rescaled channels by type."
    return picture("engines", caption, words, lambda: draw(dense, table))


def read_results() -> tuple[float, pd.DataFrame]:
    """Return the dense perplexity, and the perplexity and the bits of each type and quantiser."""
    types, integers = (
        next(t for t in read_tables(page.read_text("utf-8")) if {"by", "perplexity"} <= set(t))
        for page in (TYPES, AUTO_ROUND)
    )
    (dense,) = types[types["by"] == "dense"]["perplexity"]
    rows = [
        (*_type_and_quantiser(row["by"], row["type"]), row["bits of the blocks"], row["perplexity"])
        for _, row in types.iterrows()
    ]
    for _, row in integers.iterrows():
        by, _, option = str(row["by"]).partition(", ")
        quantiser = {
            "ours": "mrp-lightning" if option == "own target" else f"mrp-lightning, {option}",
            "AutoRound": "AutoRound" if option == "200 steps" else "",
        }.get(by, "")
        rows.append((row["grid"], quantiser, _BITS.get(row["grid"], 0), row["perplexity"]))
    table = pd.DataFrame(rows, columns=["type", "quantiser", "bits", "perplexity"])
    table = table[table["type"].isin(ROWS) & table["quantiser"].isin(QUANTISERS)]
    return float(dense), table.astype({"bits": float, "perplexity": float})


def _type_and_quantiser(by: str, kind: str) -> tuple[str, str]:
    if by == "llama.cpp":
        name, guided, _ = kind.partition(" imatrix")
        return name, "llama.cpp, importance matrix" if guided else ""
    name, comma, option = kind.partition(", ")
    return name, f"mrp-lightning{comma}{option}"


def draw(dense: float, table: pd.DataFrame) -> Figure:
    """Draw a row for each type, and a marker with its value for each quantiser."""
    figure = Figure(figsize=(6.8, 3.6), layout="constrained")
    axes = figure.subplots()
    for quantiser, (color, marker) in QUANTISERS.items():
        values = table[table["quantiser"] == quantiser].set_index("type")["perplexity"]
        points = [(values[name], -row) for row, name in enumerate(ROWS) if name in values]
        axes.plot(*zip(*points, strict=True), marker, color=color, markersize=6, label=quantiser)
    for row, name in enumerate(ROWS):
        values = sorted(table[table["type"] == name]["perplexity"])
        for value, (x, y, align) in zip(values, _label_places(values), strict=True):
            style: Any = {"textcoords": "offset points", "ha": align, "fontsize": 7.5}
            axes.annotate(f"{value:.2f}", (value, -row), (x, y), color=INK, **style)
    axes.axvline(dense, color=MUTED, linewidth=0.8, linestyle="--")
    axes.annotate(
        f"dense {dense:.2f}", (dense, 0.62), (4, 0), textcoords="offset points", fontsize=7.5,
        va="center", color=INK,
    )  # fmt: skip
    bits = table.groupby("type")["bits"].first()
    labels = [f"{label}\n{bits[name]:.3g} bits" for name, label in ROWS.items()]
    axes.set_yticks([-row for row in range(len(ROWS))], labels)
    axes.set_xlabel("perplexity of SmolLM2-135M, rescaled, which flatters balance")
    axes.set_ylim(0.4 - len(ROWS), 0.9)
    axes.set_xlim(dense - 0.15, table["perplexity"].max() + 0.25)
    axes.grid(False)
    for row in range(len(ROWS)):
        axes.axhline(0.5 - row, color=RULE, linewidth=0.6)
    axes.legend(loc="lower right", frameon=False, fontsize=8, labelcolor=MUTED)
    return figure


def _label_places(values: list[float]) -> list[tuple[int, int, str]]:
    """Return offsets in points and alignments, so that labels of up to three neighbours differ."""
    groups: list[list[float]] = []
    for value in values:
        if groups and value - groups[-1][-1] < 0.25:
            groups[-1].append(value)
        else:
            groups.append([value])
    left, below, right = (-3, 6, "right"), (0, -13, "center"), (3, 6, "left")
    places = {1: [(0, 6, "center")], 2: [left, right], 3: [left, below, right]}
    return [place for group in groups for place in places[len(group)]]


if __name__ == "__main__":
    main()
