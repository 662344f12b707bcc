"""Run models with packed sparse weights: formats, kernels, layers and a plug-in for transformers.

After this package is imported, `AutoModelForCausalLM.from_pretrained` reads the packed formats,
also if transformers is imported later. `import export` does the same, and adds `export.load`.
"""

from typing import TYPE_CHECKING, Any

from mrp_ground.upstream import import_after
from mrp_sparse.formats.sparse24 import pack, unpack
from mrp_sparse.kernels import dispatch as _dispatch  # noqa: F401  (registers the operators)
from mrp_sparse.packed_linear import Bitmask4Linear, BitmaskLinear, Sparse24Linear

if TYPE_CHECKING:
    from mrp_sparse.own_module import load_into

__all__ = ["Bitmask4Linear", "BitmaskLinear", "Sparse24Linear", "load_into", "pack", "unpack"]

__version__ = "0.1.0"

import_after("transformers.quantizers.auto", "mrp_sparse.huggingface")


def __getattr__(name: str) -> Any:
    if name == "load_into":  # transformers is loaded with it
        from mrp_sparse import own_module

        return own_module.load_into
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
