"""`make figures`: the figures of README and docs, from the tables in lab/results.

    python lab/figures.py          # writes the figures anew
    python lab/figures.py --check  # names those that differ, and changes nothing

`lab/figures.yaml` lists passages of each page. In a passage, `{TABLE > CELL > … > COLUMN}` stands
for a figure: TABLE is a file of lab/results, `bits#LLaMA` the tables under its heading "LLaMA", and
the one row with all of these cells gives the value of the column. `{… > COLUMN:.2f}` writes it in
another format than `.1f`. `{A / B}` is a quotient, `{A - B}` a difference, and `{A - B / C - D}`
the quotient of two differences. `{A?}` is a figure whose run may not be made yet: a dash until its
row is there. White space in a passage matches any white space of the page.
"""

import argparse
import re
from collections.abc import Iterator, Mapping
from decimal import ROUND_HALF_UP, Decimal, localcontext
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import yaml
from pages.peers import read_tables

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "lab/results"
PASSAGES = Path(__file__).with_suffix(".yaml")
_SLOT = re.compile(r"\{([^{}]+)\}")
_MISSING = "–"
_FIGURE = rf"(?:\d[\d,]*(?:\.\d+)?|{_MISSING})"
_FORMAT = "1f"


class Figure(NamedTuple):
    """A figure of a page.

    Attributes:
        source: The slot in the passage.
        start: Its first character in the page.
        end: The end of its characters.
        written: The figure in the page.
        value: The figure from the table.
    """

    source: str
    start: int
    end: int
    written: str
    value: str


def main() -> None:
    """Write the figures of all pages, or check them."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="Change nothing.")
    check = parser.parse_args().check
    differing = []
    for page, passages in read_passages().items():
        text = (ROOT / page).read_text("utf-8")
        figures = [figure for passage in passages for figure in figures_of(text, passage)]
        wrong = [figure for figure in figures if figure.written != figure.value]
        differing += [f"{page}: {each.written} is {each.value}: {each.source}" for each in wrong]
        if wrong and not check:
            (ROOT / page).write_text(replaced(text, wrong), encoding="utf-8")
    print("\n".join(differing) or "All figures are those of the tables.")
    raise SystemExit(1 if check and differing else 0)


def read_passages() -> Mapping[str, list[str]]:
    """Return the passages of each page."""
    passages: Mapping[str, list[str]] = yaml.safe_load(PASSAGES.read_text("utf-8"))
    return passages


def figures_of(text: str, passage: str) -> Iterator[Figure]:
    """Yield the figures of a passage in the text of a page, with their values in the tables.

    Raises:
        ValueError: The passage is not in the text exactly once.
    """
    pieces = _SLOT.split(passage.strip())
    literal = [r"\s+".join(map(re.escape, re.split(r"\s+", piece))) for piece in pieces[::2]]
    matches = list(re.finditer(f"({_FIGURE})".join(literal), text))
    if len(matches) != 1:
        raise ValueError(f"The page has {len(matches)} passages like this, not one: {passage!r}")
    for number, slot in enumerate(pieces[1::2], start=1):
        (start, end), written = matches[0].span(number), matches[0][number]
        yield Figure(slot, start, end, written, value_of(slot))


def value_of(slot: str) -> str:
    """Return the figure of a slot, without a percent sign: that is part of the passage.

    Raises:
        ValueError: There is no such table, or not exactly one such row with a number.
    """
    path, _, form = slot.partition(":.")
    if path.endswith("?") and not all(map(rows_of, cells_in(path.removesuffix("?")))):
        return _MISSING
    with localcontext(rounding=ROUND_HALF_UP):  # as decimals: a float of 30.25 is rounded to 30.2
        value, *divisors = map(difference_of, path.removesuffix("?").split(" / "))
        for divisor in divisors:
            value /= divisor
        return format(value, f".{form or _FORMAT}").removesuffix("%")


def cells_in(path: str) -> list[str]:
    """Return the paths of all cells in an expression of cells."""
    return re.split(" - | / ", path)


def difference_of(path: str) -> Decimal:
    """Return the number in a cell, or the difference of the numbers in two."""
    first, *others = map(cell_of, path.split(" - "))
    return first - sum(others)


def cell_of(path: str) -> Decimal:
    """Return the number in the column of the one row with these cells."""
    cells = rows_of(path)
    if len(cells) != 1:
        raise ValueError(f"Not one row of lab/results has {path!r}, but {len(cells)}.")
    (cell,) = cells
    number = re.match(r"[\d,]+(\.\d+)?", cell)
    if number is None:
        raise ValueError(f"{path}: the cell is {cell!r}, no number.")
    return Decimal(number[0].replace(",", ""))


def rows_of(path: str) -> set[str]:
    """Return the different cells of the column in the rows that have all cells of a path."""
    name, *cells, column = (part.strip() for part in path.split(" > "))
    return {
        str(row[column]).strip("*")
        for table in tables_of(name)
        if column in table
        for _, row in table.iterrows()
        if set(cells) <= set(row)
    }


@cache
def tables_of(name: str) -> list[pd.DataFrame]:
    """Return the tables of a file of lab/results, all cells as text."""
    if name.endswith(".csv"):
        return [pd.read_csv(RESULTS / name, dtype=str, keep_default_na=False)]
    name, _, heading = name.partition("#")
    text = (RESULTS / f"{name}.md").read_text("utf-8")
    if heading:
        level, of_heading = re.split(rf"^(#+) {re.escape(heading)}$", text, flags=re.M)[1:3]
        deepest = max(2, len(level))  # under the title of a page: all before its first section
        text = re.split(rf"^#{{1,{deepest}}} ", of_heading, flags=re.M)[0]
    return read_tables(text)


def replaced(text: str, figures: list[Figure]) -> str:
    """Return a text with its figures replaced by their values."""
    for figure in sorted(figures, key=lambda figure: -figure.start):
        text = text[: figure.start] + figure.value + text[figure.end :]
    return text


if __name__ == "__main__":
    main()
