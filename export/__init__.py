"""Pack a pruned checkpoint so that it is smaller and faster.

After this package is imported, `AutoModelForCausalLM.from_pretrained` reads the packed formats. If
your project has a folder called `export`, import `mrp_sparse` instead, which loads and
runs them.
"""

from typing import TYPE_CHECKING, Any

import mrp_lightning as _mrp_lightning  # noqa: F401  (first: it hushes what transformers loads)
from mrp_sparse import Bitmask4Linear, BitmaskLinear, Sparse24Linear, pack, unpack

if TYPE_CHECKING:
    from export.loading import load
    from mrp_sparse import load_into

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
    # Both import transformers, for which help need not wait.
    if name == "load":
        from export import loading

        return loading.load
    if name == "load_into":
        from mrp_sparse import own_module

        return own_module.load_into
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
