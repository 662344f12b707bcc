"""The tables of lab/results, for pages, pictures and figures."""

import itertools
import re
from functools import cache
from pathlib import Path

import pandas as pd

from mrp_lightning.experiments.pictures import PAPER, Picture
from mrp_lightning.solver.patterns import Dense
from mrp_lightning.solver.recipe import Recipe

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "lab/results"


def read_tables(page: str) -> list[pd.DataFrame]:
    """Return the tables of a page in Markdown, all cells as text."""
    tables: list[list[list[str]]] = []
    for last, line in itertools.pairwise(["", *page.splitlines()]):
        if line.startswith("|"):
            if not last.startswith("|"):
                tables.append([])
            tables[-1].append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return [pd.DataFrame(rows[2:], columns=rows[0]) for rows in tables if len(rows) > 2]


@cache
def tables_of(name: str) -> list[pd.DataFrame]:
    """Return the tables of a file of lab/results, all cells as text.

    Args:
        name: `evidence.csv`, the page `bits`, or `bits#LLaMA`: its tables under that heading.
    """
    if name.endswith(".csv"):
        return [pd.read_csv(RESULTS / name, dtype=str, keep_default_na=False)]
    name, _, heading = name.partition("#")
    text = (RESULTS / f"{name}.md").read_text("utf-8")
    if heading:
        level, of_heading = re.split(rf"^(#+) {re.escape(heading)}$", text, flags=re.M)[1:3]
        deepest = max(2, len(level))  # under the title of a page: all before its first section
        text = re.split(rf"^#{{1,{deepest}}} ", of_heading, flags=re.M)[0]
    return read_tables(text)


def table_with(name: str, *columns: str) -> pd.DataFrame:
    """Return the first table of a file of lab/results, as `tables_of`, that has some columns."""
    return next(table for table in tables_of(name) if set(columns) <= set(table))


def on_paper(picture: Picture) -> str:
    """Return the SVG of a picture with a background."""
    paper = f'\\1<rect width="100%" height="100%" fill="{PAPER}"/>'
    return re.sub("(<svg[^>]*>)", paper, picture.svg.decode(), count=1)


def bits_of(recipe: Recipe) -> float:
    """Return the packed bits a weight: position, value if it is kept, and share of the scale."""
    grid = recipe.grid
    value, scale = (16, 0.0) if grid is None else (grid.bits, 16 / grid.group_size)
    if isinstance(recipe.pattern, Dense):
        return value + scale
    return 1 + (1 - recipe.pattern.sparsity) * value + scale
