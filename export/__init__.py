"""Pack a pruned checkpoint so that it is smaller and faster.

After this package is imported, `AutoModelForCausalLM.from_pretrained` reads the packed formats. If
your project has a folder called `export`, import `mrp_sparse` instead, which loads and
runs them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import mrp_lightning as _mrp_lightning  # noqa: F401  (first: it silences torchao's import)
from mrp_ground.upstream import import_after as _import_after

if TYPE_CHECKING:
    from export.loading import load
    from mrp_sparse import Bitmask4Linear, BitmaskLinear, Sparse24Linear, load_into, pack, unpack

__all__ = [
    "Bitmask4Linear",
    "BitmaskLinear",
    "Sparse24Linear",
    "load",
    "load_into",
    "pack",
    "unpack",
]

# `mrp_sparse` does so itself when imported, but it loads torch, for which help need not wait.
_import_after("transformers.quantizers.auto", "mrp_sparse.huggingface")


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("export.loading" if name == "load" else "mrp_sparse"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
