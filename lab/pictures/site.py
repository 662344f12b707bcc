"""The pictures of README.md and docs, from the tables of lab/results.

    python lab/pictures/site.py

Colours and markers both differ, for readers who confuse the colours.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from tables import ROOT, on_paper, table_with, tables_of

from mrp_lightning.experiments.pictures import INK, MUTED, RULE, Picture, picture

OUT = ROOT / "docs/pictures"

Series = Mapping[str, tuple[str, str]]
"""Colour and marker of each series."""

FAMILIES: Series = {
    "mrp-lightning, 16 bits": ("#0a6d74", "o"),
    "mrp-lightning, 4 bits": ("#c04a2b", "s"),
    "llama.cpp": ("#2d6db3", "^"),
    "PyTorch int4": ("#7b838c", "D"),
}
LABELS = {
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
DISTILLED: Series = {
    "2:4": ("#a06d14", "s"),
    "50%": ("#0a6d74", "o"),
    "24 of 30 blocks": ("#7a3b8f", "P"),
}
SETTINGS: Series = {"50%": ("#0a6d74", "o"), "2:4": ("#a06d14", "s")}
METHODS = {
    "Wanda": "Wanda",
    "SparseGPT": "SparseGPT",
    "SM": "optimal (SM)",
    "JM": "joint mask (JM),\nthe default",
    "best": "joint and tuned\n(best)",
}
QUANTISERS: Series = {
    "mrp-lightning": ("#0a6d74", "o"),
    "mrp-lightning, balanced": ("#c04a2b", "s"),
    "mrp-lightning, balanced, dense target": ("#7a3b8f", "P"),
    "llama.cpp, importance matrix": ("#2d6db3", "^"),
    "AutoRound": ("#7b838c", "D"),
}
TYPES = {
    "Q4_0": "Q4_0",
    "int4-g32": "W4A16, groups of 32",
    "int4-g64": "W4A16, groups of 64",
    "IQ4_NL": "IQ4_NL",
    "Q3_K_M": "Q3_K_M",
    "Q5_0": "Q5_0",
    "Q4_K_M": "Q4_K_M",
}
"""The types by their names in the tables, from the top, and their labels."""
ON_DISK = {
    "ours": ("mrp-lightning, GGUF", ("#0a6d74", "o")),
    "packed": ("mrp-lightning, packed checkpoint", ("#c04a2b", "s")),
    "llama.cpp": ("llama.cpp", ("#2d6db3", "^")),
    "PyTorch int4": ("PyTorch int4", ("#7b838c", "D")),
}
"""The names of those who make the files, with colour and marker."""
FILES = {
    ("ours", "Q3_K and IQ4_NL, dense target"): ("Q3_K, IQ4_NL", 0, -11, "center"),
    ("ours", "IQ4_NL, dense target, head IQ4_NL"): ("IQ4_NL, head too", -7, -5, "right"),
    ("ours", "IQ4_NL, dense target"): ("IQ4_NL", 0, -11, "right"),
    ("ours", "Q4_0, dense target"): ("Q4_0", -8, 3, "right"),
    ("ours", "Q5_0"): ("Q5_0", -9, -3, "right"),
    ("llama.cpp", "Q3_K_S imatrix"): ("Q3_K_S", 9, 0, "left"),
    ("llama.cpp", "Q3_K_M imatrix"): ("Q3_K_M", 9, 0, "left"),
    ("llama.cpp", "Q4_0"): ("Q4_0, no matrix", -9, 3, "right"),
    ("llama.cpp", "Q4_0 imatrix"): ("Q4_0", 9, 0, "left"),
    ("llama.cpp", "Q4_K_M imatrix"): ("Q4_K_M", -8, 3, "right"),
    ("llama.cpp", "Q5_0 imatrix"): ("Q5_0", 9, -2, "left"),
    ("llama.cpp", "Q8_0"): ("Q8_0", 9, 5, "left"),
    ("packed", "50%, dense target"): ("50%", 9, 0, "left"),
    ("packed", "50% and 4 bits, dense target"): ("50%, 4 bits", 9, 0, "left"),
    ("packed", "50%, dense target, distilled"): ("50%, distilled", -9, 0, "right"),
    ("packed", "50% and 4 bits, dense target, distilled"): ("50%, 4 bits, distilled", 9, 0, "left"),
    ("packed", "W4A16 in 64, dense target"): ("W4A16", 9, 1, "left"),
    ("PyTorch int4", "nearest, groups of 64"): ("int4, nearest", 9, 0, "left"),
}
"""The files of the embedded LLaMA that are drawn; label, its offset in points and alignment."""
_BITS = {"int4-g32": 4.5, "int4-g64": 4.25}


def main() -> None:
    """Draw the pictures."""
    OUT.mkdir(exist_ok=True)
    for draw in (formats, quality, engines, files, distillation):
        (OUT / f"{draw.__name__}.svg").write_text(on_paper(draw()), encoding="utf-8")


def formats() -> Picture:
    """Return perplexity over bits a weight of formats of one model."""
    losses = table_with("quantised", "perplexity", "by")
    stored = table_with("quantised", "bits a weight of the blocks").set_index("weights")
    losses = losses[losses["by"] != "JM"].set_index("weights")
    (dense,) = losses[losses.index == "dense"]["perplexity"].astype(float)
    losses = losses[losses.index.isin(list(LABELS))]
    packed = stored["bits a weight of the blocks"].replace("", None).reindex(losses.index)
    losses["bits"] = packed.fillna(losses["bits a weight"]).astype(float)
    losses["perplexity"] = losses["perplexity"].astype(float)

    def draw() -> Figure:
        figure, axes = _new((6.8, 3.9))
        families = [_family(str(name)) for name in losses.index]
        for family, points in losses.groupby(families):
            color, marker = FAMILIES[family]
            axes.plot(points["bits"], points["perplexity"], marker, color=color, label=family)
        axes.plot(16, dense, "*", color=INK, markersize=9, label="dense")
        for name, row in losses.iterrows():
            label = str(name).removeprefix("llama.cpp ").removesuffix(" imatrix")
            label = label.replace("% 4", "%, 4")
            _write(axes, label, (row["bits"], row["perplexity"]), *LABELS[str(name)], size=8)
        _write(axes, f"dense {dense:.1f}", (16, dense), 0, 10, "center", size=8)
        axes.set(xscale="log", yscale="log", xlim=(2.1, 19), ylim=(24, 66))
        axes.set(xlabel="bits a weight of the blocks, as stored")
        axes.set(ylabel="perplexity (lower is better)")
        _ticks(axes.xaxis, [2, 3, 4, 6, 8, 12, 16])
        _ticks(axes.yaxis, [25, 30, 40, 50, 60])
        _legend(axes, "upper right", [*FAMILIES, "dense"])
        return figure

    words = "; ".join(
        f"{name}: {row['bits']:.3g} bits, {row['perplexity']:.1f}"
        for name, row in losses.iterrows()
    )
    return picture("Perplexity over bits a weight.", words, draw)


def _family(name: str) -> str:
    if name.startswith(("llama.cpp", "PyTorch")):
        return "llama.cpp" if name.startswith("llama.cpp") else name
    return f"mrp-lightning, {'4' if name.endswith('4 bits') else '16'} bits"


def files() -> Picture:
    """Return perplexity over the bytes of GGUF files of a model that was never rounded before."""
    tables = tables_of("engine-types")
    table = next(t for t in tables if "Q2_K imatrix" in set(t["type"]))
    packed = next(t for t in tables if "Q8_0" in set(t["type"]))
    (dense,) = table[table["by"] == "dense"]["perplexity"].astype(float)
    table = pd.concat([table, packed.replace({"by": {"ours": "packed"}})])
    sizes = {(row["by"], row["type"]): row for _, row in table.iterrows()}
    points = {key: [float(sizes[key][of]) for of in ("file, MiB", "perplexity")] for key in FILES}

    def draw() -> Figure:
        figure, axes = _new((6.8, 3.6))
        for by, (name, (color, marker)) in ON_DISK.items():
            drawn = [point for (of, _), point in points.items() if of == by]
            axes.plot(*zip(*drawn, strict=True), marker, color=color, label=name)
        for key, point in points.items():
            label, *offset = FILES[key]
            _write(axes, label, (point[0], point[1]), *offset, size=8)
        axes.axhline(dense, color=RULE, linewidth=1)
        _write(axes, f"dense {dense:.3f}", (4.45, dense), 0, 7, "right", size=8)
        axes.set(xscale="log", xlim=(1.6, 4.5), ylim=(7.80, 8.03), xlabel="file, MiB")
        axes.set(ylabel="perplexity (lower is better)")
        _ticks(axes.xaxis, [2, 2.5, 3, 3.5, 4])
        _ticks(axes.yaxis, [7.8, 7.85, 7.9, 7.95, 8.0])
        _legend(axes, "upper right")
        return figure

    words = "; ".join(
        f"{of} by {ON_DISK[by][0]}: {size:.1f} MiB, {value:.3f}"
        for (by, of), (size, value) in points.items()
    )
    return picture("Perplexity over the bytes of files.", words, draw)


def quality() -> Picture:
    """Return perplexity by method and sparsity, on one axis."""
    table = table_with("smollm2", "perplexity @512")
    table = table.assign(perplexity=table["perplexity @512"].astype(float))
    (dense,) = table[table["sparsity"] == "dense"]["perplexity"]
    points = {(r.sparsity, r.method): r.perplexity for r in table.itertuples()}

    def draw() -> Figure:
        figure, axes = _new((6.8, 3.1))
        _dots(axes, SETTINGS, list(METHODS), points)
        for (_, method), value in points.items():
            if method in METHODS:
                row = -list(METHODS).index(method)
                _write(axes, f"{value:.1f}", (value, row), 0, 6, "center", va="baseline")
        axes.plot(dense, 1, "*", color=INK, markersize=9, label="dense")
        _write(axes, f"{dense:.1f}", (dense, 1), 10, 0, "left")
        axes.set(xscale="log", xlabel="perplexity (lower is better)", ylim=(-4.6, 1.5))
        axes.set_xlim(24, 1.25 * table["perplexity"].max())
        _ticks(axes.xaxis, [25, 30, 40, 50, 75, 100, 200, 400, 600])
        axes.set_yticks([1, *(-row for row in range(len(METHODS)))], ["dense", *METHODS.values()])
        _legend(axes, "lower right", ncols=2)
        return figure

    words = "; ".join(f"{of} {setting}: {value:.1f}" for (setting, of), value in points.items())
    return picture("Perplexity by method.", words, draw)


def distillation() -> Picture:
    """Return perplexity over the tokens of a distillation, on its text and on other text."""
    table = table_with("distillation", "SmolLM2", "tokens").set_index("SmolLM2")
    texts = {"WikiText2": "WikiText2, half of the text", "code": "code, no part of the text"}
    dense = {of: float(str(table.loc["dense", of])) for of in texts}
    table = table[table.index != "dense"]
    table = table.assign(tokens=table["tokens"].str.replace(",", ""))
    table = table[["tokens", *texts]].astype(float)

    def draw() -> Figure:
        figure = Figure(figsize=(6.8, 3.0), layout="constrained")
        for axes, (of, title) in zip(figure.subplots(1, 2), texts.items(), strict=True):
            axes.grid(False)
            for name, (color, marker) in DISTILLED.items():
                points = table[table.index == name]
                if points.empty:
                    continue
                style: Any = {"color": color, "marker": marker, "label": name}
                axes.plot(points["tokens"] / 1000, points[of], **style)
            axes.axhline(dense[of], color=MUTED, linewidth=0.8, linestyle="--", label="dense")
            axes.set(yscale="log", title=title, xlabel="thousand tokens")
            ticks = [8, 10, 15, 20, 25, 30, 35, 40, 45, 60]
            _ticks(axes.yaxis, [n for n in ticks if 0.95 * dense[of] < n <= 1.1 * table[of].max()])
        figure.axes[0].set_ylabel("perplexity (lower is better)")
        _legend(figure.axes[1], "upper right")
        return figure

    words = "; ".join(
        f"{name} after {row.tokens:.0f} tokens: {row.WikiText2:.1f} and {row.code:.1f}"
        for name, row in zip(table.index, table.itertuples(), strict=True)
    )
    return picture("Perplexity on WikiText2 and code over tokens distilled.", words, draw)


def engines() -> Picture:
    """Return the loss of types that engines read, by quantiser."""
    types = table_with("engine-types", "by", "perplexity", "type")
    (dense,) = types[types["by"] == "dense"]["perplexity"].astype(float)
    rows = [
        (*_of_llama(row["by"], row["type"]), row["bits of the blocks"], row["perplexity"])
        for _, row in types.iterrows()
    ]
    rows += [
        (row["grid"], _of_integers(row["by"]), _BITS.get(row["grid"], 0), row["perplexity"])
        for _, row in table_with("auto-round", "by", "perplexity").iterrows()
    ]
    table = pd.DataFrame(rows, columns=["type", "quantiser", "bits", "perplexity"])
    table = table[table["type"].isin(TYPES) & table["quantiser"].isin(QUANTISERS)]
    table = table.astype({"bits": float, "perplexity": float})
    points = {(r.quantiser, r.type): r.perplexity for r in table.itertuples()}
    bits = table.groupby("type")["bits"].first()

    def draw() -> Figure:
        figure, axes = _new((6.8, 3.6))
        _dots(axes, QUANTISERS, list(TYPES), points)
        for row, name in enumerate(TYPES):
            values = sorted(value for (_, kind), value in points.items() if kind == name)
            for value, where in zip(values, _label_places(values), strict=True):
                _write(axes, f"{value:.2f}", (value, -row), *where, va="baseline")
        axes.axvline(dense, color=MUTED, linewidth=0.8, linestyle="--")
        _write(axes, f"dense {dense:.2f}", (dense, 0.62), 4, 0, "left")
        labels = [f"{label}\n{bits[name]:.3g} bits" for name, label in TYPES.items()]
        axes.set_yticks([-row for row in range(len(TYPES))], labels)
        axes.set_xlabel("perplexity of SmolLM2-135M, rescaled, which flatters balance")
        axes.set_ylim(0.4 - len(TYPES), 0.9)
        axes.set_xlim(dense - 0.15, max(points.values()) + 0.25)
        _legend(axes, "lower right")
        return figure

    words = "; ".join(f"{of} by {by}: {value:.2f}" for (by, of), value in points.items())
    caption = "Perplexity of SmolLM2-135M with rescaled channels by type."
    return picture(caption, words, draw)


def _of_llama(by: str, kind: str) -> tuple[str, str]:
    """Return the type and the quantiser of a row of engine-types.md."""
    if by == "llama.cpp":
        name, guided, _ = kind.partition(" imatrix")
        return name, "llama.cpp, importance matrix" if guided else ""
    name, comma, option = kind.partition(", ")
    return name, f"mrp-lightning{comma}{option}"


def _of_integers(by: str) -> str:
    """Return the quantiser of a row of auto-round.md."""
    code, _, option = by.partition(", ")
    if code == "ours":
        return "mrp-lightning" if option == "own target" else f"mrp-lightning, {option}"
    return code if option == "200 steps" else ""


def _label_places(values: Sequence[float]) -> list[tuple[int, int, str]]:
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


def _new(size: tuple[float, float]) -> tuple[Figure, Axes]:
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    axes.grid(False)  # a line of the grid would cross labels
    return figure, axes


def _dots(
    axes: Axes, series: Series, rows: Sequence[str], points: Mapping[tuple[str, str], float]
) -> None:
    """Draw a row for each name, from the top, and a marker for each series' value in it."""
    for name, (color, marker) in series.items():
        values = [(points[name, of], -i) for i, of in enumerate(rows) if (name, of) in points]
        axes.plot(*zip(*values, strict=True), marker, color=color, label=name)
    for row in range(len(rows)):
        axes.axhline(0.5 - row, color=RULE, linewidth=0.6)


def _write(
    axes: Axes, text: str, point: tuple[float, float], x: float, y: float, align: str,
    *, size: float = 7.5, va: str = "center",
) -> None:  # fmt: skip
    style: Any = {"textcoords": "offset points", "ha": align, "va": va, "fontsize": size}
    axes.annotate(text, point, (x, y), color=INK, **style)


def _ticks(axis: Axis, values: Sequence[float]) -> None:
    axis.set_major_locator(FixedLocator(list(values)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def _legend(axes: Axes, where: str, order: Sequence[str] = (), ncols: int = 1) -> None:
    drawn = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    names = list(order or drawn)
    style: Any = {"frameon": False, "fontsize": 8, "labelcolor": MUTED}
    axes.legend([drawn[name] for name in names], names, loc=where, ncols=ncols, **style)


if __name__ == "__main__":
    main()
