"""Colours, by role, on light and on dark paper; a method has the same colour everywhere.

Text has a contrast of 4.5 and more with the paper, lines and marks 3 and more.
"""

from collections.abc import Iterable
from typing import NamedTuple

from mrp_lightning.experiments.page.models import METHODS


class Tone(NamedTuple):
    """One colour."""

    light: str
    dark: str


def _ramp(first: Tone, last: Tone, steps: int) -> list[Tone]:
    def between(start: str, stop: str, share: float) -> str:
        pairs = ((int(start[i : i + 2], 16), int(stop[i : i + 2], 16)) for i in (1, 3, 5))
        return "#" + "".join(f"{round(a + share * (b - a)):02x}" for a, b in pairs)

    shares = [i / (steps - 1) for i in range(steps)]
    return [
        Tone(between(first.light, last.light, x), between(first.dark, last.dark, x)) for x in shares
    ]


HEAT_STEPS = 8
_SERIES = (
    *(Tone("#7b838c", "#9da6ae"), Tone("#a06d14", "#d9a54a"), Tone("#c04a2b", "#f08c6c")),
    *(Tone("#5d7822", "#a5c25c"), Tone("#0a6d74", "#52c5c8"), Tone("#5b50a4", "#a99ff1")),
    *(Tone("#ad3977", "#e986b9"), Tone("#2d6db3", "#80b3ed"), Tone("#87583a", "#d0a285")),
    *(Tone("#3b7d50", "#80c897"), Tone("#8a3dae", "#d093eb"), Tone("#69692a", "#bebe70")),
)
MARKERS = ("o", "s", "^", "D", "P", "X", "v", "<", ">", "h", "p", "*")

ROLES: dict[str, Tone] = {
    "paper": Tone("#fdfdfb", "#15181b"),
    "surface": Tone("#f4f4f0", "#1e2226"),
    "rule": Tone("#dddedb", "#343a40"),
    "muted": Tone("#5b646d", "#a0a9b1"),
    "ink": Tone("#1c2024", "#e7e9eb"),
    "accent": Tone("#0b6e75", "#53c6c9"),
    "caution": Tone("#96500a", "#e9b266"),
    **{f"series-{i}": tone for i, tone in enumerate(_SERIES)},
    **{
        f"heat-{i}": tone
        for i, tone in enumerate(
            _ramp(Tone("#e2efed", "#20363a"), Tone("#06363b", "#a6ecea"), HEAT_STEPS)
        )
    },
}


def light(role: str) -> str:
    """The colour on light paper."""
    return ROLES[role].light


def slots(methods: Iterable[str]) -> dict[str, int]:
    """A series number for each method; those that have a name have a fixed one."""
    others = sorted(set(methods) - set(METHODS))
    free = len(_SERIES) - len(METHODS)
    return {method: i for i, method in enumerate(METHODS)} | {
        method: len(METHODS) + i % free for i, method in enumerate(others)
    }
