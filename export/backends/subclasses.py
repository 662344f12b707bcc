"""Other people's 2:4 layers: torch's tensor subclass, and torchao's, by `sparsify_` and in fp8.

Their weights are tensor subclasses, which safetensors does not write; see `torchao_format`.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.sparse import (
    SparseSemiStructuredTensor,
    SparseSemiStructuredTensorCUSPARSELT,
    SparseSemiStructuredTensorCUTLASS,
    to_sparse_semi_structured,
)

from mrp_lightning.errors import first_line
from mrp_lightning.upstream import torch_names
from mrp_sparse.packed_linear import frozen

_NO_TORCHAO = "torchao is not installed (pip install 'torchao==0.18.*')"


@dataclass(frozen=True)
class Subclass:
    """A back-end that replaces the weight of an `nn.Linear` by a tensor subclass, in place.

    `missing` gives the reason why it cannot be used on a device at all, `refuse` the reason why it
    does not take a layer.
    """

    missing: Callable[[torch.device], str | None]
    refuse: Callable[[nn.Linear], str | None]
    convert: Callable[[nn.Linear], object]


def _torch_missing(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"`to_sparse_semi_structured` takes CUDA tensors, not {device.type!r} ones"
    if torch_names.is_cutlass_forced():
        major, minor = torch.cuda.get_device_capability(device)
        if major != 8:
            return f"torch's CUTLASS kernels need sm_8x; this device is sm_{major}{minor}"
    elif not torch.backends.cusparselt.is_available():
        return f"torch {torch.__version__} was built without cuSPARSELt"
    return None


def why_not_tiled(
    kind: type[SparseSemiStructuredTensor], shape: tuple[int, ...], dtype: torch.dtype
) -> str | None:
    """The reason why one of torch's classes of 2:4 tensors has no form of a weight, or `None`."""
    tiles = torch_names.tiles_of_sparse24(kind, dtype)
    if dtype == torch.float32 or tiles is None:
        name = str(dtype).removeprefix("torch.")
        return f"torch's 2:4 tensors take float16 and bfloat16, not {name}"
    (rows, columns), (row_tile, column_tile) = shape, tiles
    if rows % row_tile or columns % column_tile:
        return f"{rows}×{columns} is not a multiple of {row_tile}×{column_tile}"
    return None


def _torch_refuse(linear: nn.Linear) -> str | None:
    forced = torch_names.is_cutlass_forced()
    kind = SparseSemiStructuredTensorCUTLASS if forced else SparseSemiStructuredTensorCUSPARSELT
    return why_not_tiled(kind, linear.weight.shape, linear.weight.dtype)


def _torch_convert(linear: nn.Linear) -> None:
    linear.weight = frozen(to_sparse_semi_structured(linear.weight.detach().contiguous()))


def _torchao_missing(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"torchao's 2:4 tensors are for CUDA devices, and this is {device.type!r}"
    if importlib.util.find_spec("torchao") is None:
        return _NO_TORCHAO
    if importlib.util.find_spec("torchao.sparsity") is None:
        return "this torchao has no `torchao.sparsity`; 0.18 was the last to have it"
    return _torch_missing(device)


def _torchao_convert(linear: nn.Linear) -> None:
    from torchao.sparsity import semi_sparse_weight, sparsify_

    linear.weight = frozen(linear.weight.detach().contiguous())
    sparsify_(linear, semi_sparse_weight())


def _fp8_missing(device: torch.device) -> str | None:
    if importlib.util.find_spec("torchao") is None:
        return _NO_TORCHAO
    if device.type != "cuda":
        return f"torchao's fp8 2:4 kernel runs on CUDA devices, not on {device.type!r}"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) != (9, 0):
        return f"torchao's fp8 2:4 kernel is for sm_90; this device is sm_{major}{minor}"
    import torchao

    # The operator's schema is always there, its kernel only where the compiled library loaded.
    try:
        tile = torch.zeros(64, 64, device=device, dtype=torch.float8_e4m3fn)
        torch.ops.torchao.to_sparse_semi_structured_cutlass_sm9x_f8(tile)
    except (AttributeError, RuntimeError) as error:
        return (
            f"torchao {torchao.__version__} has no fp8 2:4 kernel for this torch "
            f"(CUDA {torch.version.cuda}; its wheels are built for CUDA 13): {first_line(error)}"
        )
    return None


def _fp8_refuse(linear: nn.Linear) -> str | None:
    if linear.weight.dtype != torch.bfloat16:
        name = str(linear.weight.dtype).removeprefix("torch.")
        return f"fp8 with scales by row starts from bfloat16, not {name}"
    rows, columns = linear.weight.shape
    if columns % 32 or rows % 16:  # the kernel's tile
        return f"the fp8 kernel needs in % 32 == 0 and out % 16 == 0: {rows}×{columns}"
    return None


def _fp8_convert(linear: nn.Linear) -> None:
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_
    from torchao.quantization.quantize_.workflows import Float8PackingFormat

    config = Float8DynamicActivationFloat8WeightConfig(
        granularity=PerRow(), packing_format=Float8PackingFormat.SPARSE_2D_DATA_2D_METADATA
    )
    linear.weight = frozen(linear.weight.detach().contiguous())
    quantize_(linear, config)


SUBCLASSES = {
    "torch": Subclass(_torch_missing, _torch_refuse, _torch_convert),
    "torchao": Subclass(_torchao_missing, _torch_refuse, _torchao_convert),
    "torchao-fp8": Subclass(_fp8_missing, _fp8_refuse, _fp8_convert),
}
