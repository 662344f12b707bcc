"""`make figures`: the figures of README and docs, from the tables in lab/results.

    python lab/figures.py          # writes the figures anew
    python lab/figures.py --check  # names those that differ, and changes nothing

`lab/figures.yaml` lists passages of each page. In a passage, `{TABLE > CELL > … > COLUMN}` stands
for a figure: TABLE is a name of `tables.tables_of`, and the one row with all of these cells gives
the value of the column. `{… > COLUMN:.2f}` writes it in another format than `.1f`. `{A / B}` is a
quotient, `{A - B}` a difference, and `{A - B / C - D}` the quotient of two differences. White space
in a passage matches any white space of the page.
"""

import argparse
import re
from collections.abc import Iterator, Mapping
from decimal import ROUND_HALF_UP, Decimal, localcontext
from pathlib import Path
from typing import NamedTuple

import yaml
from tables import ROOT, tables_of

_SLOT = re.compile(r"\{([^{}]+)\}")
_FIGURE = r"\d[\d,]*(?:\.\d+)?"
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
    text = Path(__file__).with_suffix(".yaml").read_text("utf-8")
    passages: Mapping[str, list[str]] = yaml.safe_load(text)
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
    with localcontext(rounding=ROUND_HALF_UP):  # as decimals: a float of 30.25 is rounded to 30.2
        value, *divisors = map(_difference, path.split(" / "))
        for divisor in divisors:
            value /= divisor
        return format(value, f",.{form or _FORMAT}").removesuffix("%")


def _difference(path: str) -> Decimal:
    first, *others = map(_cell, path.split(" - "))
    return first - sum(others)


def _cell(path: str) -> Decimal:
    """Return the number in the column of the one row with these cells."""
    name, *cells, column = (part.strip() for part in path.split(" > "))
    values = {
        str(row[column]).strip("*")
        for table in tables_of(name)
        if column in table
        for _, row in table.iterrows()
        if set(cells) <= set(row)
    }
    if len(values) != 1:
        raise ValueError(f"Not one row of lab/results has {path!r}, but {len(values)}.")
    number = re.match(r"[\d,]+(\.\d+)?", *values)
    if number is None:
        raise ValueError(f"{path}: the cell is {values.pop()!r}, no number.")
    return Decimal(number[0].replace(",", ""))


def replaced(text: str, figures: list[Figure]) -> str:
    """Return a text with its figures replaced by their values."""
    for figure in sorted(figures, key=lambda figure: -figure.start):
        text = text[: figure.start] + figure.value + text[figure.end :]
    return text


if __name__ == "__main__":
    main()
