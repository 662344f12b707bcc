"""The colours, markers and dashes of methods in pictures, the same in all of them."""

from collections.abc import Iterator, Sequence
from typing import Any

from mrp_lightning.experiments.pictures import SERIES
from mrp_lightning.experiments.trials import method_rank

_DASHES = ((0, ()), (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.2, 1, 1.2)))
_MARKERS = ("o", "s", "^", "D", "P", "X", "v", "<", ">", "h", "p", "*")


def color_of(method: str) -> str:
    """Return the colour of a canonical method."""
    return SERIES[method_rank(method) % len(SERIES)]


def marker_of(method: str) -> str:
    """Return the marker of a canonical method."""
    return _MARKERS[method_rank(method) % len(_MARKERS)]


def line_styles(methods: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the options of each line of a picture, by canonical method.

    The method determines colour and marker, the order among lines of one method the dashes. Lines
    and open markers become smaller from line to line, so that coinciding lines are all visible.
    """
    for i, method in enumerate(methods):
        later = i / (len(methods) - 1) if len(methods) > 1 else 1.0
        yield {
            "color": color_of(method),
            "marker": marker_of(method),
            "linestyle": _DASHES[methods[:i].count(method) % len(_DASHES)],
            "linewidth": 2.6 - 1.6 * later,
            "markersize": 8 - 4 * later,
            "markerfacecolor": "none",
            "markeredgewidth": 1.2,
        }
