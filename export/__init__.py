"""Make a pruned checkpoint small and fast.

Importing this package teaches `AutoModelForCausalLM.from_pretrained` the packed formats.
"""

import mrp_lightning as _mrp_lightning  # noqa: F401  (first: it hushes what transformers loads)
from export.backends.torchao_format import load
from export.kernels import dispatch as _dispatch  # noqa: F401  (registers the operators' kernels)
from export.packed.bitmask4_linear import Bitmask4Linear
from export.packed.bitmask_linear import BitmaskLinear
from export.packed.own_module import load_into
from export.packed.sparse24_format import pack, unpack
from export.packed.sparse24_linear import Sparse24Linear

__all__ = [
    "Bitmask4Linear",
    "BitmaskLinear",
    "Sparse24Linear",
    "load",
    "load_into",
    "pack",
    "unpack",
]
