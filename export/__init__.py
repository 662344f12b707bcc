"""Make a pruned checkpoint small and fast.

Importing this package teaches `AutoModelForCausalLM.from_pretrained` the packed formats.
"""

from export.kernels import dispatch as _dispatch  # noqa: F401  (registers the operators' kernels)
from export.packed.bitmask_layer import BitmaskLinear
from export.packed.format import pack, unpack
from export.packed.huggingface import load
from export.packed.layer import Sparse24Linear

__all__ = ["BitmaskLinear", "Sparse24Linear", "load", "pack", "unpack"]
