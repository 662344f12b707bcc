"""torchao's 2:4 tensors, which `sparsify_` makes of packed layers on a CUDA device."""

import importlib.util
from typing import Any

import torch
from torch import nn
from torch.sparse import SparseSemiStructuredTensorCUSPARSELT, SparseSemiStructuredTensorCUTLASS

from mrp_lightning.errors import OptionError
from mrp_lightning.upstream import torch_names
from mrp_sparse.packed_linear import Sparse24Linear, frozen

METHOD = "mrp_torchao24"
"""`quant_method` of packed 2:4 directories whose layers torchao multiplies."""


def missing(device: torch.device) -> str | None:
    """Return why torchao's tensors cannot be used on a device, `None` if they can."""
    if device.type != "cuda":
        return f"torchao's 2:4 tensors are for CUDA devices, and this is {device.type!r}"
    if importlib.util.find_spec("torchao") is None:
        return "torchao is not installed (pip install 'torchao==0.18.*')"
    if importlib.util.find_spec("torchao.sparsity") is None:
        return "this torchao has no `torchao.sparsity`; 0.18 was the last to have it"
    if torch_names.is_cutlass_forced():
        major, minor = torch.cuda.get_device_capability(device)
        if major != 8:
            return f"torch's CUTLASS kernels need sm_8x; this device is sm_{major}{minor}"
    elif not torch.backends.cusparselt.is_available():
        return f"torch {torch.__version__} was built without cuSPARSELt"
    return None


def why_not(shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
    """Return why torch's tensors cannot hold a 2:4 weight, `None` if they can."""
    forced = torch_names.is_cutlass_forced()
    kind = SparseSemiStructuredTensorCUTLASS if forced else SparseSemiStructuredTensorCUSPARSELT
    tiles = torch_names.tiles_of_sparse24(kind, dtype)
    if dtype == torch.float32 or tiles is None:
        name = str(dtype).removeprefix("torch.")
        return f"torch's 2:4 tensors take float16 and bfloat16, not {name}"
    (rows, columns), (row_tile, column_tile) = shape, tiles
    if rows % row_tile or columns % column_tile:
        return f"{rows}×{columns} is not a multiple of {row_tile}×{column_tile}"
    return None


def sparsify(model: nn.Module, names: list[str]) -> None:
    """Convert the weights of 2:4 layers, packed or dense, to torchao's tensors, in place.

    Raises:
        OptionError: torchao cannot run layers, of which the message lists all; none is converted.
    """
    layers: dict[str, Any] = {name: model.get_submodule(name) for name in names}
    reasons = {
        name: why_not((layer.out_features, layer.in_features), layer.weight.dtype)
        for name, layer in layers.items()
    }
    if refused := [f"  {name}: {reason}" for name, reason in reasons.items() if reason]:
        raise OptionError("torchao cannot run these layers:\n" + "\n".join(refused))
    from torchao.sparsity import semi_sparse_weight, sparsify_

    for name, layer in layers.items():
        linear = layer.to_linear() if isinstance(layer, Sparse24Linear) else layer
        linear.weight = frozen(linear.weight.detach().contiguous())
        sparsify_(linear, semi_sparse_weight())
        model.set_submodule(name, linear)
