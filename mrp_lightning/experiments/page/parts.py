"""What a page is made of: tables and pictures, in parts."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mrp_lightning.experiments.page.drawing import Picture


class Column(NamedTuple):
    """A column: its header, what stands below that, and whether it holds numbers or prose."""

    label: str
    detail: str = ""
    numeric: bool = True
    prose: bool = False


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
    """A table: the first column is that of the headers of rows, which stand in named groups."""

    caption: str
    columns: Sequence[Column]
    groups: Mapping[str, Sequence[Row]]


class Fold(NamedTuple):
    """What is shown on request."""

    summary: str
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()


class Part(NamedTuple):
    """A part of the page: what has to be known, tables, groups of pictures, and folds."""

    title: str
    text: str = ""
    tables: Sequence[Table] = ()
    pictures: Sequence[Sequence[Picture]] = ()
    folds: Sequence[Fold] = ()

    @property
    def all_pictures(self) -> list[Picture]:
        """Every picture, those of the folds, too."""
        shown = [picture for group in self.pictures for picture in group]
        return shown + [picture for fold in self.folds for picture in fold.pictures]
