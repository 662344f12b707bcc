"""Weights in a library's own layout, kept beside the packed ones they were made from.

The packed weight is what is stored and what every kernel of ours reads. cuSPARSELt needs a layout
of its own, another 0.5625 of the dense bytes. It is built when asked for and never inside the
operator: what a CUDA graph records while it captures must not be built there.
"""

import weakref
from dataclasses import dataclass

from torch import Tensor

_FORMS: dict[tuple[int, str], "_Form"] = {}


@dataclass(frozen=True)
class _Form:
    weight: weakref.ref[Tensor]
    version: int
    data: Tensor


def keep(values: Tensor, kind: str, data: Tensor) -> None:
    """Remember `data` as the `kind` form of a packed weight, for as long as that weight lives."""
    key = (values.data_ptr(), kind)

    def forget(reference: weakref.ref[Tensor]) -> None:
        form = _FORMS.get(key)
        if form is not None and form.weight is reference:
            del _FORMS[key]

    _FORMS[key] = _Form(weakref.ref(values, forget), _version(values), data)


def find(values: Tensor, kind: str) -> Tensor | None:
    """The form of a packed weight, or None: never built, or of values that changed since.

    Found by address, so that aliases which a compiler makes count as the same weight. An address
    cannot be another weight's while the one it was kept for is alive.
    """
    form = _FORMS.get((values.data_ptr(), kind))
    if form is None:
        return None
    weight = form.weight()
    if weight is None or weight.data_ptr() != values.data_ptr() or weight.shape != values.shape:
        return None
    return form.data if _version(weight) == form.version else None


def nbytes(values: Tensor) -> int:
    """Bytes of all forms of a packed weight."""
    return sum(f.data.nbytes for key, f in _FORMS.items() if key[0] == values.data_ptr())


def drop(values: Tensor) -> None:
    """Forget all forms of a packed weight."""
    for key in [key for key in _FORMS if key[0] == values.data_ptr()]:
        del _FORMS[key]


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
