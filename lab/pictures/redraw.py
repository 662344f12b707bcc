"""The pictures of the pages that sweeps write, from the tables of these pages.

    python lab/pictures/redraw.py

`lab/page.py` draws them with their page. This draws them again where the runs are no longer there.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import pandas as pd
from page import on_paper
from pages.excess import draw_excess
from pages.peers import NO_PEERS, read_peers, read_tables

from mrp_lightning import MethodError
from mrp_lightning.experiments.pictures import Scale, draw_lines
from mrp_lightning.experiments.trials import canonical_method

RESULTS = Path(__file__).parents[1] / "results"
PAGES = {"results": None, "frontier": "originals.md"}
PAGES["real-model"] = PAGES["frontier"]
"""The pages, and where the values of other codes are."""

LABELS = {"Wanda": "wanda", "SparseGPT": "SS"}
RECIPES = "JM"
"""The methods of the recipes of these pages."""


def main() -> None:
    """Draw all pictures."""
    for page, peers in PAGES.items():
        found = read_peers(RESULTS / peers) if peers else NO_PEERS
        for model, table in models(RESULTS / f"{page}.md").items():
            for column in [name for name in table if name.startswith("perplexity")]:
                draw(page, model, table, column, found.get((model, "text"), {}))
    for model, table in models(RESULTS / "ablations.md").items():
        for option in ("damping", "num_samples"):
            for setting, held in table[table[option] != ""].groupby("sparsity", sort=False):
                draw_option(model, str(setting), option, held)


def models(page: Path) -> dict[str, pd.DataFrame]:
    """Return the tables of results of a page, by the models that their headings name."""
    heading, found = "", {}
    for part in re.split(r"^(#+ .*)$", page.read_text("utf-8"), flags=re.M):
        if part.startswith("#"):
            heading = part.lstrip("# ")
        tables = [t for t in read_tables(part) if {"sparsity", "method"} <= set(t)]
        for table in [table for table in tables if "relative loss" in table]:
            found[heading] = table
    return found


def draw(page: str, model: str, table: pd.DataFrame, column: str, peers: dict) -> None:
    """One picture, if the page shows it."""
    held = table[table[column] != ""]
    means, deviations = zip(*map(numbers, held[column]), strict=True)
    values = pd.DataFrame({"mean": means, "deviation": deviations}, held["method"])
    dense = next((m for m, of in zip(means, held["sparsity"], strict=True) if of == "dense"), None)
    panels = {
        setting: values[(held["sparsity"] == setting).to_numpy()]
        for setting in dict.fromkeys(held["sparsity"])
        if setting != "dense"
    }
    panels = {setting: panel for setting, panel in panels.items() if len(panel) > 1}
    file = f"{page}/{model}-{column.partition(' @')[0].replace(' ', '-')}.svg"
    if f"({file})" not in (RESULTS / f"{page}.md").read_text("utf-8"):
        return
    methods = {str(label): method_of(str(label)) for label in held["method"]}
    name = column.partition(" @")[0]
    is_text = " " not in name
    drawn = draw_excess(name, model, panels, methods, dense=dense, peers=peers if is_text else {})
    (RESULTS / file).write_text(on_paper(drawn), encoding="utf-8")


def draw_option(model: str, setting: str, option: str, held: pd.DataFrame) -> None:
    """Perplexity over the values of an option."""
    (column,) = [name for name in held if name.startswith("perplexity")]
    rows = [
        (row["method"], float(row[option]), *numbers(row[column])) for _, row in held.iterrows()
    ]
    table = pd.DataFrame(rows, columns=["label", "place", "mean", "spread"])
    shaped = table.pivot_table(["mean", "spread"], "place", "label", "first", sort=False)
    means, spread = shaped["mean"].sort_index(), shaped["spread"].sort_index()
    methods = {str(label): method_of(str(label)) for label in means}
    how = (methods, Scale(column, "{:.3f}".format, zero=False))
    band = (means - spread, means + spread)
    drawn = draw_lines(option, model, means, *how, across=option, band=band)
    file = f"ablations/{model}-{setting.replace(':', 'of').rstrip('%')}-{option}.svg"
    (RESULTS / file).write_text(on_paper(drawn), encoding="utf-8")


def numbers(cell: str) -> tuple[float, float]:
    """Mean and deviation of a cell such as `51.491 ± 0.233`."""
    mean, _, deviation = cell.replace(",", "").strip("*").partition(" ± ")
    return float(mean.strip("*")), float(deviation.lstrip("<").strip("*") or "nan")


def method_of(label: str) -> str:
    """Return the canonical method of a label."""
    try:
        return canonical_method(LABELS.get(label, label))
    except MethodError:
        return RECIPES


if __name__ == "__main__":
    main()
