"""Changing how modules run, for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Let an attribute of this one object, as a rule a method, stand in for that of its class.

    Replacements nest: the last one counts, and what it replaced comes back after it. A module keeps
    its hooks and all else.
    """
    own = vars(owner)
    before = {name: own[name]} if name in own else {}
    own[name] = value
    try:
        yield
    finally:
        own.pop(name, None)
        own.update(before)


@contextmanager
def every_layer_called() -> Iterator[None]:
    """Let torch's own encoders and attention call their layers; fused, no hook sees these.

    Fused, an encoder with padding passes nested tensors, which have no shape, between its blocks.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
