"""A page is made of parts with tables and pictures. HTML and Markdown draw the same parts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Column(NamedTuple):
    """A column: its header, what stands below that, and whether it holds numbers, text or prose."""

    label: str
    detail: str = ""
    kind: str = "number"


class Row(NamedTuple):
    """A row: its header, and a text for each column but the first.

    `method` is the canonical method that the row is of, which decides the colour, and `best` holds
    the indices of the cells that are the best of their group.
    """

    head: str
    cells: Sequence[str]
    method: str | None = None
    best: Sequence[int] = ()


class Table(NamedTuple):
    """A table: the first column is that of the headers of rows, which stand in named groups.

    `group` says what the names of the groups are.
    """

    caption: str
    columns: Sequence[Column]
    groups: Mapping[str, Sequence[Row]]
    group: str = "sparsity"


@dataclass(frozen=True)
class Picture:
    """A picture: as SVG without a background, and as PNG on light paper, for use elsewhere.

    `name` is that of its file, without the ending, which pictures of a page may share. The caption
    stands above it, and `alt` says what it shows in words and numbers. A wide one takes the width
    of the page.
    """

    name: str
    caption: str
    alt: str
    svg: bytes
    png: bytes
    wide: bool = False


class Fold(NamedTuple):
    """Tables and pictures that are folded away until the reader asks for them."""

    summary: str
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()


class Step(NamedTuple):
    """Something to do next, and the command that does it."""

    text: str
    command: str = ""


@dataclass(frozen=True)
class Part:
    """A part of the page: what has to be known, pictures, tables, steps, and folds.

    All of a folded part but its title is shown on request.
    """

    title: str
    text: str = ""
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()
    folds: Sequence[Fold] = ()
    steps: Sequence[Step] = ()
    folded: bool = False

    @property
    def all_pictures(self) -> list[Picture]:
        """Every picture, those of the folds, too."""
        return [*self.pictures, *(picture for fold in self.folds for picture in fold.pictures)]


def columns(*labels: str) -> list[Column]:
    """Columns by their headers: of numbers, or of text where a colon follows."""
    kinds = {label: "text" if label.endswith(":") else "number" for label in labels}
    return [Column(label.removesuffix(":"), kind=kind) for label, kind in kinds.items()]
