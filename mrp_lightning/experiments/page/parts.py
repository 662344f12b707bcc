"""What a page is made of: tables and pictures, in parts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mrp_lightning.experiments.page.style import Picture


@dataclass(frozen=True)
class Column:
    """A column.

    Attributes:
        label: The header.
        detail: What stands below the header.
        numeric: Whether the column is set flush right.
    """

    label: str
    detail: str = ""
    numeric: bool = True


@dataclass(frozen=True)
class Row:
    """A row.

    Attributes:
        head: The header.
        cells: One text for each column but the first.
        method: The canonical method that the row is of; it decides the colour.
        best: The indices of the cells that are the best of their group.
    """

    head: str
    cells: Sequence[str]
    method: str | None = None
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
    pictures: Sequence[Picture] = ()


@dataclass(frozen=True)
class Part:
    """A part of the page.

    Attributes:
        title: The heading.
        text: What has to be known to read it.
        tables: The tables, which stand before the pictures.
        pictures: Groups of pictures; those of one group stand side by side.
        folds: What is shown on request, at the end.
    """

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
