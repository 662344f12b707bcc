"""Layers whose weights other modules multiply with, found in the source of these."""

import functools
import inspect
import re
from typing import Any

from torch import nn


def is_read_directly(model: nn.Module, name: str) -> bool:
    """Whether a layer's weight is multiplied by the module that holds it, and not by the layer.

    Mamba multiplies by `self.dt_proj.weight`, and torch's `MultiheadAttention` by its `out_proj`'s:
    such code needs the dense matrix.
    """
    owner, _, child = name.rpartition(".")
    parent = model.get_submodule(owner)
    kind: Any = type(parent)
    return isinstance(parent, nn.MultiheadAttention) or child in _read_directly(kind)


@functools.cache
def _read_directly(kind: type) -> frozenset[str]:
    """Names of the children whose weights the code of a class multiplies with."""
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):  # a class without a file, such as one typed at a prompt
        return frozenset()
    weight = r"self\.(\w+)\.weight\b"
    uses = rf"{weight}\s*@|@\s*{weight}|\blinear\([^()]*,\s*{weight}"
    return frozenset(name for found in re.findall(uses, source) for name in found if name)
