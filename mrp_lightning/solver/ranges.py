"""Ranges of columns and rows that are worked on in turn."""

import logging
from collections.abc import Callable, Iterator
from typing import TypeVar

from mrp_lightning.environment import is_out_of_memory

log = logging.getLogger(__name__)

ELEMENTS = 2**26
"""Elements of the temporaries of one solve; more rows than that are solved in turn."""

Found = TypeVar("Found")


def split_range(start: int, stop: int, width: int) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of consecutive ranges of `width`, the last one shorter where need be."""
    for first in range(start, stop, width):
        yield first, min(first + width, stop)


def by_rows(work: Callable[[slice], Found], rows: int, columns: int) -> list[Found]:
    """Work on ranges of the rows of a matrix, as many at a time as memory allows.

    Where there is not enough memory for a range, `work` is called again with half of it, so it has
    to go on from whatever it left behind. Returns what it returned for each range; what a single
    row has no memory for is raised.
    """
    found = []
    start, most = 0, max(1, ELEMENTS // max(1, columns))
    while start < rows:
        stop = min(start + most, rows)
        try:
            found.append(work(slice(start, stop)))
            start = stop
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error) or stop - start == 1:
                raise
            most = (stop - start) // 2
            log.warning("No memory for %d rows at a time: going on with %d.", stop - start, most)
    return found
