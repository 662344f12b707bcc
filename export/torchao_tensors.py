"""torchao's 2:4 tensors: CUTLASS' layout on disk, cuSPARSELt's in memory, by `sparsify_`."""

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn
from torch.sparse import SparseSemiStructuredTensorCUSPARSELT, SparseSemiStructuredTensorCUTLASS

from mrp_lightning.errors import OptionError
from mrp_lightning.upstream import torch_names
from mrp_sparse.packed_linear import frozen

METHOD = "mrp_torchao24"
VERSION = 1
"""`quant_method` and `format_version` of exports with torchao's tensors."""


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


def why_not_storable(shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
    """Return why a 2:4 weight cannot be stored, `None` if it can."""
    return _why_not_tiled(SparseSemiStructuredTensorCUTLASS, shape, dtype)


def _why_not_tiled(kind: Any, shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
    """Return why one of torch's 2:4 tensor classes cannot hold a weight, `None` if it can."""
    tiles = torch_names.tiles_of_sparse24(kind, dtype)
    if dtype == torch.float32 or tiles is None:
        name = str(dtype).removeprefix("torch.")
        return f"torch's 2:4 tensors take float16 and bfloat16, not {name}"
    (rows, columns), (row_tile, column_tile) = shape, tiles
    if rows % row_tile or columns % column_tile:
        return f"{rows}×{columns} is not a multiple of {row_tile}×{column_tile}"
    return None


def store(weight: Tensor) -> Tensor:
    """Return torchao's tensor on the CPU for a 2:4 weight (rows, columns) on a CUDA device."""
    made: Any = SparseSemiStructuredTensorCUTLASS.from_dense(weight.contiguous())
    # The transposed forms are left out: only products with the transposed weight, as in training,
    # read them, and they would double the file.
    return SparseSemiStructuredTensorCUTLASS(
        weight.shape,
        packed=made.packed.cpu(),
        meta=made.meta.cpu(),
        packed_t=None,
        meta_t=None,
        compressed_swizzled_bitmask=None,
    )


def restore(tensor: Tensor) -> Tensor:
    """Return the weight of a stored tensor, equal to the bit; any other tensor unchanged."""
    return tensor.to_dense() if isinstance(tensor, SparseSemiStructuredTensorCUTLASS) else tensor


def sparsify(model: nn.Module, names: list[str]) -> None:
    """Convert linear layers of 2:4 weights on a CUDA device in place.

    Raises:
        OptionError: torchao cannot run layers, of which the message lists all; none is converted.
    """
    layers: dict[str, Any] = {name: model.get_submodule(name) for name in names}
    forced = torch_names.is_cutlass_forced()
    kind = SparseSemiStructuredTensorCUTLASS if forced else SparseSemiStructuredTensorCUSPARSELT
    reasons = {
        name: _why_not_tiled(kind, layer.weight.shape, layer.weight.dtype)
        for name, layer in layers.items()
    }
    if refused := [f"  {name}: {reason}" for name, reason in reasons.items() if reason]:
        raise OptionError("torchao cannot run these layers:\n" + "\n".join(refused))
    from torchao.sparsity import semi_sparse_weight, sparsify_

    for layer in layers.values():
        layer.weight = frozen(layer.weight.detach().contiguous())
        sparsify_(layer, semi_sparse_weight())
