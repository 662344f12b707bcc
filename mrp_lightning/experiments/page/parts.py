"""What a page is made of: tables and drawings, in parts."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mrp_lightning.experiments.page.drawing import Drawing


@dataclass(frozen=True)
class Column:
    """A column.

    Attributes:
        label: Its header.
        detail: Below the header.
        numeric: Whether it is set flush right.
    """

    label: str
    detail: str = ""
    numeric: bool = True


@dataclass(frozen=True)
class Row:
    """A row.

    Attributes:
        head: Its header.
        cells: One for each column but the first.
        slot: Colour of the method, if it is of one.
        best: Numbers of the cells that are the best of their group.
    """

    head: str
    cells: Sequence[str]
    slot: int | None = None
    best: Sequence[int] = ()


@dataclass(frozen=True)
class Table:
    """A table with rows in groups.

    Attributes:
        caption: What it shows.
        columns: The first is that of the row headers.
        groups: Rows by what is said of them all; `""` for nothing.
    """

    caption: str
    columns: Sequence[Column]
    groups: Mapping[str, Sequence[Row]]


@dataclass(frozen=True)
class Fold:
    """What is shown on request."""

    summary: str
    tables: Sequence[Table] = ()
    drawings: Sequence[Drawing] = ()


@dataclass(frozen=True)
class Part:
    """A part of the page.

    Attributes:
        title: Its heading.
        text: What is to be known to read it.
        tables: Before the drawings.
        drawings: In groups, each side by side.
        folds: At the end.
    """

    title: str
    text: str = ""
    tables: Sequence[Table] = ()
    drawings: Sequence[Sequence[Drawing]] = ()
    folds: Sequence[Fold] = ()


@dataclass
class Names:
    """File names of drawings, each given once.

    Attributes:
        prefix: Of all.
    """

    prefix: str = ""
    given: set[str] = field(default_factory=set)

    def __call__(self, *parts: str) -> str:
        """The parts as letters, digits and hyphens."""
        text = "-".join([*([self.prefix] if self.prefix else []), *parts]).replace(":", "of")
        plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "figure"
        name = next(n for n in self._tries(plain) if n not in self.given)
        self.given.add(name)
        return name

    @staticmethod
    def _tries(plain: str) -> Iterator[str]:
        yield plain
        yield from (f"{plain}-{i}" for i in range(2, 10**6))
