"""Bars for long work. The working functions know them as a way to iterate."""

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers.utils import logging as transformers_logging

Track = Callable[[Iterable[Any], int | None, str], Iterable[Any]]
"""Iterates, and shows how far it is: takes the items, their number if it is known, and a word of
what is done with them."""


def silently(items: Iterable[Any], total: int | None, description: str) -> Iterable[Any]:
    """Iterate without a bar."""
    del total, description
    return items


@contextmanager
def bars() -> Iterator[Track]:
    """Show a bar on standard error for each iteration; none where that is not a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    off = not sys.stderr.isatty()
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=off) as progress:
        yield lambda items, total, description: progress.track(
            items, total=total, description=description
        )


def hush_transformers() -> None:
    """Have transformers say nothing of each file that it loads, and show bars on terminals only."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
