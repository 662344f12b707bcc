"""Make a pruned checkpoint small and fast.

Importing this package teaches `AutoModelForCausalLM.from_pretrained` the packed formats.
"""

import mrp_lightning as _mrp_lightning  # noqa: F401  (first: it hushes what transformers loads)
from export.backends.torchao_format import load
from export.kernels import dispatch as _dispatch  # noqa: F401  (registers the operators' kernels)
from export.packed.bitmask_layer import BitmaskLinear
from export.packed.format import pack, unpack
from export.packed.layer import Sparse24Linear
from export.packed.own_module import load_into

__all__ = ["BitmaskLinear", "Sparse24Linear", "load", "load_into", "pack", "unpack"]
