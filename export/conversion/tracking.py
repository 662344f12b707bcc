"""Bars for long work, which the working functions know only as a way to iterate."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

T = TypeVar("T")


class Track(Protocol):
    """Iterate, and show how far it is."""

    def __call__(self, sequence: Iterable[T], total: int | None, description: str) -> Iterable[T]:
        """The same items; `total` is how many there are, `None` if that is not known."""
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
