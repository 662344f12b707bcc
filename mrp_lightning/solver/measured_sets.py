"""Which units to remove where each set has to be measured: greedily, then by exchanges.

It is what `column_sets` does where the losses of sets follow from two matrices. Here they follow
from nothing but a measurement: without an expert, a router chooses others.
"""

from collections.abc import Callable, Sequence

Measure = Callable[[Sequence[tuple[int, ...]]], Sequence[float]]
"""Gives the losses of some sets of units."""

_LEAST_GAIN = 1e-6
"""Exchanges that lower the loss by a smaller fraction are rounding."""


def measured_set(measure: Measure, units: int, count: int) -> tuple[list[int], float, int]:
    """Remove one unit after another, each time the one with which the least is lost; then exchange.

    A removed unit and a kept one are exchanged, each time the pair that lowers the loss most, until
    none does. It measures units·count sets, and count·(units − count) a round of exchanges.

    Args:
        measure: Gives the losses of sets, each in the order of the units.
        units: Number of units.
        count: Number of units to remove.

    Returns:
        The removed units in order, their loss, and the number of exchanges.
    """
    removed: list[int] = []
    loss = 0.0
    for _ in range(count):
        rest = [unit for unit in range(units) if unit not in removed]
        removed, loss = _best(measure, [[*removed, unit] for unit in rest])
    swaps = 0
    while True:
        rest = [unit for unit in range(units) if unit not in removed]
        others = [[*(x for x in removed if x != back), out] for back in removed for out in rest]
        best, lower = _best(measure, others)
        if not loss - lower > _LEAST_GAIN * loss:
            return removed, loss, swaps
        removed, loss, swaps = best, lower, swaps + 1


def _best(measure: Measure, sets: list[list[int]]) -> tuple[list[int], float]:
    """The set of the lowest loss, the first of those that are equal, and its loss."""
    ordered = [tuple(sorted(each)) for each in sets]
    losses = measure(ordered)
    best = min(range(len(ordered)), key=lambda i: losses[i])
    return list(ordered[best]), float(losses[best])
