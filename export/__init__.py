"""Pack a pruned checkpoint so that it is smaller and faster.

After this package is imported, `AutoModelForCausalLM.from_pretrained` reads the packed formats. If
your project has a folder called `export`, import `mrp_lightning.packed` instead, which loads and
runs them.
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
