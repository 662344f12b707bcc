"""Every method has one name, one place in the order and one name that readers know it by."""

from mrp_lightning.solver.compensations import ColumnSweep, NoCompensation
from mrp_lightning.solver.exact import ExactCompensation
from mrp_lightning.solver.methods import MASKS, NAMED, parse_method

METHODS = ("magnitude", "wanda", "SS", "MS", "SM", "MM")
"""The paper's methods in the order in which they are shown; all others follow."""

_LABELS = {"wanda": "Wanda", "SS": "SparseGPT"}
_CANONICAL = {pair: name for name, pair in reversed(NAMED.items())}  # the first of several names
_COMPENSATIONS = [each.name for each in (NoCompensation, ColumnSweep, ExactCompensation)]
_PAIRS = [f"{mask}+{compensation}" for mask in MASKS for compensation in _COMPENSATIONS]
_ORDER = list(dict.fromkeys((*METHODS, *(_CANONICAL.get(pair, pair) for pair in _PAIRS))))


def canonical_method(name: str) -> str:
    """The one name of a method: `sparsegpt` and `S+S` are `SS`, `wanda+M` is itself.

    Raises:
        MethodError: There is no such method.
    """
    method = parse_method(name)
    pair = f"{method.mask.name}+{method.compensation.name}"
    return _CANONICAL.get(pair, pair)


def method_label(method: str | None) -> str:
    """What the field calls a canonical method; nothing for the dense model."""
    return "" if method is None else _LABELS.get(method, method)


def method_rank(method: str) -> int:
    """The place of a canonical method in the order; it decides its colour and marker, too."""
    return _ORDER.index(method)
