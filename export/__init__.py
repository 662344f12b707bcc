"""Make a pruned checkpoint small and fast.

Importing this package teaches `AutoModelForCausalLM.from_pretrained` the packed formats. What
loads and runs them is `mrp_lightning.packed`, which no folder of the user's called `export` hides.
"""

from typing import TYPE_CHECKING, Any

import mrp_lightning as _mrp_lightning  # noqa: F401  (first: it hushes what transformers loads)
from mrp_lightning.packed import Bitmask4Linear, BitmaskLinear, Sparse24Linear, pack, unpack

if TYPE_CHECKING:
    from export.backends.torchao_format import load
    from mrp_lightning.packed import load_into

__all__ = [
    "Bitmask4Linear",
    "BitmaskLinear",
    "Sparse24Linear",
    "load",
    "load_into",
    "pack",
    "unpack",
]


def __getattr__(name: str) -> Any:
    # Both load transformers, which commands that only tell their options need not wait for.
    if name == "load":
        from export.backends import torchao_format

        return torchao_format.load
    if name == "load_into":
        from mrp_lightning.packed import own_module

        return own_module.load_into
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
