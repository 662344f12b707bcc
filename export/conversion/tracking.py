"""Bars for long work. The working functions know them as a way to iterate."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

T = TypeVar("T")


class Track(Protocol):
    """A way to iterate that shows how far it is."""

    def __call__(self, sequence: Iterable[T], total: int | None, description: str) -> Iterable[T]:
        """Give the items one by one.

        Args:
            sequence: The items.
            total: Number of items; `None` if it is not known.
            description: What is done with them, for the bar.
        """
        ...


def silently(sequence: Iterable[T], total: int | None, description: str) -> Iterable[T]:
    """Iterate without a bar."""
    del total, description
    return sequence


@contextmanager
def bars() -> Iterator[Track]:
    """Show a bar on standard error for each iteration; none where that is not a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    off = not sys.stderr.isatty()
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=off) as progress:

        def track(sequence: Iterable[T], total: int | None, description: str) -> Iterable[T]:
            return progress.track(sequence, total=total, description=description)

        yield track
