"""The picture of README.md: loss and bytes of one model in every format that was measured.

    python lab/pictures/formats.py

It is drawn from the tables of `RESULTS`, in a second.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from page import on_paper
from pages.peers import read_tables

from mrp_lightning.experiments.pictures import INK, MUTED, Picture, picture

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "lab/results/quantised.md"
OUT = ROOT / "docs/pictures/formats.svg"

FAMILIES = {
    "mrp-lightning, 16 bits": ("#0a6d74", "o"),
    "mrp-lightning, 4 bits": ("#c04a2b", "s"),
    "llama.cpp": ("#2d6db3", "^"),
    "PyTorch int4": ("#7b838c", "D"),
}
"""Colour and marker of each family; markers differ, too, for readers who confuse the colours."""

LABELS: Mapping[str, tuple[float, float, str]] = {
    "50%": (0, 9, "center"),
    "70%": (8, 0, "left"),
    "50% 4 bits": (-8, 0, "right"),
    "70% 4 bits": (8, 0, "left"),
    "llama.cpp IQ2_XS imatrix": (-4, 10, "right"),
    "PyTorch int4": (8, 3, "left"),
    "llama.cpp Q4_0 imatrix": (-8, 2, "right"),
    "llama.cpp Q3_K_M imatrix": (-3, -12, "right"),
    "llama.cpp Q4_K_M": (2, -12, "center"),
    "llama.cpp Q8_0": (0, 10, "center"),
}
"""Offset in points and alignment of the label of each format; formats without one are left out."""


class Format(NamedTuple):
    """A way to store the model: bits a weight of the blocks, and perplexity."""

    name: str
    family: str
    bits: float
    perplexity: float


def main() -> None:
    """Draw the picture."""
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(on_paper(formats_picture()), encoding="utf-8")


def formats_picture() -> Picture:
    """Return the picture of the formats of `RESULTS`."""
    dense, formats = read_formats(RESULTS)
    words = "; ".join(
        f"{item.name}: {item.bits:.3g} bits, {item.perplexity:.1f}" for item in formats
    )
    return picture("formats", "Perplexity over bits a weight.", words, lambda: draw(dense, formats))


def read_formats(page: Path) -> tuple[float, list[Format]]:
    """Return the dense perplexity and the formats of a page with tables of speed and of loss."""
    tables = read_tables(page.read_text("utf-8"))
    losses = next(table for table in tables if "perplexity" in table and "by" in table)
    stored = next(table for table in tables if "bits a weight of the blocks" in table)
    packed_bits = dict(zip(stored["weights"], stored["bits a weight of the blocks"], strict=True))
    formats = []
    for _, row in losses[losses["by"] != "JM"].iterrows():
        name = str(row["weights"])
        if name in LABELS:
            bits = float(packed_bits.get(name) or row["bits a weight"])
            formats.append(Format(name, _family(name), bits, float(row["perplexity"])))
    (dense,) = losses[losses["weights"] == "dense"]["perplexity"]
    return float(dense), formats


def _family(name: str) -> str:
    if name.startswith(("llama.cpp", "PyTorch")):
        return "llama.cpp" if name.startswith("llama.cpp") else name
    return f"mrp-lightning, {'4' if name.endswith('4 bits') else '16'} bits"


def draw(dense: float, formats: list[Format]) -> Figure:
    """Draw perplexity over bits, with the name of each format at its point."""
    figure = Figure(figsize=(6.8, 3.9), layout="constrained")
    axes = figure.subplots()
    for family, (color, marker) in FAMILIES.items():
        points = [(item.bits, item.perplexity) for item in formats if item.family == family]
        axes.plot(*zip(*points, strict=True), marker, color=color, markersize=6, label=family)
    axes.plot(16, dense, "*", color=INK, markersize=9, label="dense")
    for item in formats:
        x, y, align = LABELS[item.name]
        style: Any = {"textcoords": "offset points", "ha": align, "va": "center", "fontsize": 8}
        axes.annotate(_label(item), (item.bits, item.perplexity), (x, y), color=INK, **style)
    axes.annotate(
        f"dense {dense:.1f}", (16, dense), (0, 10), textcoords="offset points", ha="center",
        va="center", fontsize=8, color=INK,
    )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlim=(2.1, 19), ylim=(24, 66))
    axes.set(xlabel="bits a weight of the blocks, as stored", ylabel="perplexity (lower is better)")
    for axis, places in ((axes.xaxis, [2, 3, 4, 6, 8, 12, 16]), (axes.yaxis, [25, 30, 40, 50, 60])):
        axis.set_major_locator(FixedLocator(places))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(NullLocator())
    axes.grid(False)  # a line of the grid would cross labels
    axes.legend(loc="upper right", frameon=False, fontsize=8, labelcolor=MUTED)
    return figure


def _label(item: Format) -> str:
    return item.name.removeprefix("llama.cpp ").removesuffix(" imatrix").replace("% 4", "%, 4")


if __name__ == "__main__":
    main()
