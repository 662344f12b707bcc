"""Linear layers with a packed weight, and models of such layers.

After this package is imported, `AutoModelForCausalLM.from_pretrained` reads the packed formats,
also if transformers is imported later. `import export` does the same and has shorter names.
"""

from typing import TYPE_CHECKING, Any

from mrp_lightning.formats.sparse24_format import pack, unpack
from mrp_lightning.kernels import dispatch as _dispatch  # noqa: F401  (registers the operators)
from mrp_lightning.packed.bitmask4_linear import Bitmask4Linear
from mrp_lightning.packed.bitmask_linear import BitmaskLinear
from mrp_lightning.packed.registration import register
from mrp_lightning.packed.sparse24_linear import Sparse24Linear

if TYPE_CHECKING:
    from mrp_lightning.packed.own_module import load_into

__all__ = ["Bitmask4Linear", "BitmaskLinear", "Sparse24Linear", "load_into", "pack", "unpack"]

register()


def __getattr__(name: str) -> Any:
    if name == "load_into":  # transformers is loaded with it
        from mrp_lightning.packed import own_module

        return own_module.load_into
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
