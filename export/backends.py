"""A whole model on one back-end: our operator, or the tensor subclasses of torch and torchao.

auto         our operator, the kernel chosen by measured times, cuSPARSELt's layout for prefill
triton       our operator with the Triton kernels alone
torch        torch's `to_sparse_semi_structured`
torchao      torchao's `sparsify_`
torchao-fp8  torchao's fp8 + 2:4, which changes what the model computes

A layer that a back-end refuses stays dense, and is listed.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.sparse import (
    SparseSemiStructuredTensor,
    SparseSemiStructuredTensorCUSPARSELT,
    SparseSemiStructuredTensorCUTLASS,
    to_sparse_semi_structured,
)

from export.speed_options import BACKENDS, TARGETS
from mrp_lightning.errors import OptionError, first_line
from mrp_lightning.upstream import torch_names
from mrp_sparse.kernels.candidates import (
    KERNELS,
    Call,
    compress,
    triton_missing,
    usable,
    why_not_compressible,
)
from mrp_sparse.kernels.dispatch import STORED_DENSE, KernelTimes, known_times
from mrp_sparse.packed_linear import Sparse24Linear, frozen

_NO_TORCHAO = "torchao is not installed (pip install 'torchao==0.18.*')"


@dataclass(frozen=True)
class _Subclass:
    """A back-end that replaces the weight of an `nn.Linear` by a tensor subclass, in place.

    `missing` returns why the back-end cannot be used on a device, `refuse` why it cannot run a
    layer; both return `None` otherwise.
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


def _why_not_tiled(
    kind: type[SparseSemiStructuredTensor], shape: tuple[int, ...], dtype: torch.dtype
) -> str | None:
    """Return why one of torch's 2:4 tensor classes cannot hold a weight, `None` if it can."""
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
    return _why_not_tiled(kind, linear.weight.shape, linear.weight.dtype)


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

    # The operator's schema always exists, its kernel only if the compiled library was loaded.
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
    "torch": _Subclass(_torch_missing, _torch_refuse, _torch_convert),
    "torchao": _Subclass(_torchao_missing, _torch_refuse, _torchao_convert),
    "torchao-fp8": _Subclass(_fp8_missing, _fp8_refuse, _fp8_convert),
}


TORCHAO_METHOD = "mrp_torchao24"
TORCHAO_VERSION = 1
"""`quant_method` and `format_version` of exports with torchao's tensors."""


def why_not_storable(shape: tuple[int, int], dtype: torch.dtype) -> str | None:
    """Return why torchao cannot store a 2:4 weight, `None` if it can."""
    return _why_not_tiled(SparseSemiStructuredTensorCUTLASS, shape, dtype)


def store_torchao(weight: Tensor) -> Tensor:
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


def restore_torchao(tensor: Tensor) -> Tensor:
    """Return the weight of a tensor of torchao, equal to the bit; any other tensor unchanged."""
    return tensor.to_dense() if isinstance(tensor, SparseSemiStructuredTensorCUTLASS) else tensor


def run_on_torchao(model: Any, names: list[str]) -> Any:
    """Convert layers in place, and return the model; an `OptionError` lists all that it refuses."""
    layers = {name: model.get_submodule(name) for name in names}
    # All layers are asked before the first is converted, so that an error leaves the model
    # unchanged.
    reasons = {name: SUBCLASSES["torchao"].refuse(layer) for name, layer in layers.items()}
    if refused := [f"  {name}: {reason}" for name, reason in reasons.items() if reason]:
        raise OptionError("torchao cannot run these layers:\n" + "\n".join(refused))
    for layer in layers.values():
        SUBCLASSES["torchao"].convert(layer)
    return model


def apply(model: nn.Module, backend: str = "auto", target: str = "both") -> dict[str, str]:
    """Prepare all `Sparse24Linear` layers of a model in place, on their device.

    Layers become dense again if the back-end cannot run them or, with `auto`, `not_faster` advises
    so. Returns the reason for each, by name. With `auto`, prefill also needs each weight in
    cuSPARSELt's layout, another 0.5625 of the dense bytes; decode alone does not.

    Raises:
        OptionError: An unknown back-end or target, or a back-end that cannot run here at all.
    """
    if backend not in BACKENDS:
        raise OptionError(f"`--backend {backend}` is none of {', '.join(BACKENDS)}.")
    if target not in TARGETS:
        raise OptionError(f"`--target {target}` is none of {', '.join(TARGETS)}.")
    layers = {n: m for n, m in model.named_modules() if isinstance(m, Sparse24Linear)}
    # All devices are checked before the first layer changes: an error leaves the model unchanged.
    for device in {layer.weight.device for layer in layers.values()}:
        check_backend(backend, device)
    dense = {}
    for name, layer in layers.items():
        prepared, reason = _prepare(layer, backend, target)
        if prepared is not layer:
            model.set_submodule(name, prepared)
        if reason is not None:
            dense[name] = reason
    return dense


def _prepare(layer: Sparse24Linear, backend: str, target: str) -> tuple[nn.Module, str | None]:
    """Return the layer as a back-end runs it, with the reason if it becomes dense."""
    if backend in SUBCLASSES:
        linear = layer.to_linear()
        reason = SUBCLASSES[backend].refuse(linear)
        if reason is None:
            SUBCLASSES[backend].convert(linear)
        return linear, reason
    # The layout is made before the kernels are asked: `_call` reports it, and cuSPARSELt refuses a
    # layer without it.
    if backend == "auto" and target != "decode" and why_not_compressible(_call(layer)) is None:
        layer.compressed = compress(layer.weight, layer.weight_meta)
    reason = _refusal(layer, backend)
    if reason is None and backend == "auto":
        reason = not_faster(layer, known_times(layer.weight.device), target)
    return (layer if reason is None else layer.to_linear()), reason


def check_backend(backend: str, device: torch.device) -> None:
    """Raise an `OptionError` if a back-end cannot run on a device."""
    if reason := why_not_here(backend, device):
        raise OptionError(f"`--backend {backend}` cannot run here: {reason}.")


def why_not_here(backend: str, device: torch.device) -> str | None:
    """Return why a back-end cannot run on a device, `None` if it can."""
    if backend in SUBCLASSES:
        return SUBCLASSES[backend].missing(device)
    if device.type != "cuda":
        return f"it needs a CUDA device, and the layers are on {device.type!r}"
    return triton_missing(device) if backend == "triton" else None


def _call(layer: Sparse24Linear, tokens: int = 1) -> Call:
    weight, compressed = layer.weight, layer.compressed is not None
    shape = layer.out_features, layer.in_features
    return Call(tokens, *shape, weight.dtype, weight.device, compressed)


def _refusal(layer: Sparse24Linear, backend: str) -> str | None:
    """Return why none of our sparse kernels can run the layer, `None` if one can."""
    names = ("triton-gemm",) if backend == "triton" else ("triton-gemm", "cusparselt")
    reasons = [KERNELS[name].refuse(_call(layer)) for name in names]
    return None if None in reasons else "; ".join(reason for reason in reasons if reason)


def not_faster(layer: Sparse24Linear, kernel_times: KernelTimes, target: str) -> str | None:
    """Return the reason to keep a layer dense, `None` if its sparse form may be faster.

    A layer stays dense if, at every number of tokens of the target, no kernel that can run it was
    measured to be faster than the dense product. A number of tokens without a time of the dense
    product counts in favour of the sparse form, which is smaller.
    """
    verdicts = []
    for tokens in TARGETS[target]:
        call = _call(layer, tokens)
        rows = kernel_times.at(call)
        dense = next((row for row in rows if row.kernel == STORED_DENSE), None)
        # Without a dense time nothing is proven against the sparse form, and one such number of
        # tokens is enough to keep it. The same holds for one number at which it is faster.
        if dense is None:
            return None
        kernels = usable(call)
        sparse = next((row for row in rows if row.kernel in kernels), None)
        if sparse is None:
            verdicts.append(f"no kernel ran at {dense.tokens} tokens")
        elif sparse.microseconds < dense.microseconds:
            return None
        else:
            ratio = dense.microseconds / sparse.microseconds
            verdicts.append(f"{ratio:.2f}× at {dense.tokens} tokens")
    return f"not faster on this device: {', '.join(verdicts)}"
