"""Splitting columns and rows into ranges."""

from collections.abc import Iterator


def split_range(start: int, stop: int, width: int) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of consecutive ranges of `width`, the last one shorter where need be."""
    for first in range(start, stop, width):
        yield first, min(first + width, stop)
