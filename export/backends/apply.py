"""Put a model with packed layers on a back-end; what a back-end refuses stays dense and is listed.

auto         our operator, the kernel chosen by measured times, cuSPARSELt's layout for prefill
triton       our operator with the Triton kernels alone
torch        torch's `to_sparse_semi_structured`
torchao      torchao's `sparsify_`
torchao-fp8  torchao's fp8 + 2:4, which changes what the model computes
"""

from collections.abc import Mapping

import torch
from torch import nn

from export.backends.subclasses import SUBCLASSES
from mrp_lightning.errors import OptionError
from mrp_sparse.kernels.candidates import (
    KERNELS,
    Call,
    compress,
    triton_missing,
    usable,
    why_not_compressible,
)
from mrp_sparse.kernels.dispatch import STORED_DENSE, KernelTimes, known_times
from mrp_sparse.packed_linear import Sparse24Linear

BACKENDS = ("auto", "triton", *SUBCLASSES)
TARGETS: Mapping[str, tuple[int, ...]] = {
    "decode": (1, 8),
    "prefill": (1024, 4096),
    "both": (1, 8, 1024, 4096),
}
"""The numbers of tokens that decide whether a layer is worth keeping sparse."""


def apply(model: nn.Module, backend: str = "auto", target: str = "both") -> dict[str, str]:
    """Prepare all `Sparse24Linear` layers of a model in place, on the device where they are.

    Layers that the back-end does not take are made dense again; the reason for each is returned by
    its name. Prefill takes each weight in cuSPARSELt's layout, too, another 0.5625 of the dense
    bytes; decode alone does without.

    Raises:
        OptionError: An unknown back-end or target, or a back-end that cannot run here at all.
    """
    if backend not in BACKENDS:
        raise OptionError(f"`--backend {backend}` is none of {', '.join(BACKENDS)}.")
    if target not in TARGETS:
        raise OptionError(f"`--target {target}` is none of {', '.join(TARGETS)}.")
    layers = {n: m for n, m in model.named_modules() if isinstance(m, Sparse24Linear)}
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
    """The layer as a back-end runs it, and the reason if that is dense."""
    if backend in SUBCLASSES:
        linear = layer.to_linear()
        reason = SUBCLASSES[backend].refuse(linear)
        if reason is None:
            SUBCLASSES[backend].convert(linear)
        return linear, reason
    if backend == "auto" and target != "decode" and why_not_compressible(_call(layer)) is None:
        layer.compressed = compress(layer.weight, layer.weight_meta)
    reason = _refusal(layer, backend)
    if reason is None and backend == "auto":
        reason = not_faster(layer, known_times(layer.weight.device), target)
    return (layer if reason is None else layer.to_linear()), reason


def check_backend(backend: str, device: torch.device) -> None:
    """Refuse a back-end that cannot run on a device at all, by an `OptionError`."""
    if reason := why_not_here(backend, device):
        raise OptionError(f"`--backend {backend}` cannot run here: {reason}.")


def why_not_here(backend: str, device: torch.device) -> str | None:
    """The reason why a back-end cannot run on a device at all, or `None`."""
    if backend in SUBCLASSES:
        return SUBCLASSES[backend].missing(device)
    if device.type != "cuda":
        return f"it needs a CUDA device, and the layers are on {device.type!r}"
    return triton_missing() if backend == "triton" else None


def _call(layer: Sparse24Linear, tokens: int = 1) -> Call:
    weight, compressed = layer.weight, layer.compressed is not None
    shape = layer.out_features, layer.in_features
    return Call(tokens, *shape, weight.dtype, weight.device, compressed)


def _refusal(layer: Sparse24Linear, backend: str) -> str | None:
    """The reason why no sparse kernel of ours takes the layer, or `None`."""
    names = ("triton-gemm",) if backend == "triton" else ("triton-gemm", "cusparselt")
    reasons = [KERNELS[name].refuse(_call(layer)) for name in names]
    return None if None in reasons else "; ".join(reason for reason in reasons if reason)


def not_faster(layer: Sparse24Linear, times: KernelTimes, target: str) -> str | None:
    """The reason to keep a layer dense, or `None` where its sparse form may pay.

    There is one if, at every number of tokens of the target, no kernel that can run this layer was
    measured to be faster than a dense weight. What was not measured counts for the small form.
    """
    verdicts = []
    for tokens in TARGETS[target]:
        call = _call(layer, tokens)
        rows = times.at(call)
        dense = next((row for row in rows if row.kernel == STORED_DENSE), None)
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
