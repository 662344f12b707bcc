"""torchao's 2:4 tensors on disk, in the layout of CUTLASS, which no library or device changes.

cuSPARSELt's layout, in which they run on most devices, depends on its version: it is made at load.
The file is a pickle, since safetensors holds no tensor subclasses, and is read as tensors only.
"""

from typing import Any

import torch
from torch import Tensor
from torch.sparse import SparseSemiStructuredTensorCUTLASS as Stored

from export.backends.subclasses import SUBCLASSES, why_not_tiled
from mrp_lightning.errors import OptionError

QUANT_METHOD = "mrp_torchao24"
FORMAT_VERSION = 1


def why_not_storable(shape: tuple[int, int], dtype: torch.dtype) -> str | None:
    """The reason why torchao has no tensor for a 2:4 weight, or `None`."""
    return why_not_tiled(Stored, shape, dtype)


def store(weight: Tensor) -> Tensor:
    """The tensor to write, on the CPU, of a 2:4 weight (rows, columns) on a CUDA device."""
    made: Any = Stored.from_dense(weight.contiguous())
    return Stored(
        weight.shape,
        packed=made.packed.cpu(),
        meta=made.meta.cpu(),
        packed_t=None,
        meta_t=None,
        compressed_swizzled_bitmask=None,
    )


def restore(tensor: Tensor) -> Tensor:
    """The weight of a stored tensor, bit by bit; any other tensor as it is."""
    return tensor.to_dense() if isinstance(tensor, Stored) else tensor


def run_on_torchao(model: Any, names: list[str]) -> Any:
    """Convert layers in place, on the device where they are."""
    layers = {name: model.get_submodule(name) for name in names}
    reasons = {name: SUBCLASSES["torchao"].refuse(layer) for name, layer in layers.items()}
    if refused := [f"  {name}: {reason}" for name, reason in reasons.items() if reason]:
        raise OptionError("torchao cannot run these layers:\n" + "\n".join(refused))
    for layer in layers.values():
        SUBCLASSES["torchao"].convert(layer)
    return model
