"""The kernels that the operator can run on a CUDA device, and the calls that each cannot run.

All of them map (tokens, in) with a packed weight to (tokens, out). They read the packed format;
cuSPARSELt alone needs a layout of its own, another 0.5625 of the dense bytes, which `compress`
builds beforehand: what a CUDA graph records must not be built inside the operator.
"""

import functools
import importlib.util
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mrp_ground.errors import first_line
from mrp_sparse.formats.sparse24 import spread
from mrp_sparse.kernels import cusparselt

log = logging.getLogger(__name__)

_TRITON_DTYPES = (torch.float16, torch.bfloat16)
LARGEST = 2**31
"""Triton addresses elements with 32 bits."""
SOME_TOKENS = 256
"""The most tokens of the kernel for small batches, which decodes a weight for every 16 to 64
tokens."""


class PackedWeight(NamedTuple):
    """The weight W (out, in) of a layer, as kernels read it.

    The values are (out, in / 2), `meta` has their columns, uint8 (out, in / 8), and `compressed` is
    W in cuSPARSELt's layout.
    """

    values: Tensor
    meta: Tensor
    compressed: Tensor | None = None


# Frozen, hence hashable: `dispatch.choose` caches its result by the call.
@dataclass(frozen=True)
class Call:
    """The shapes of a product to compute: (tokens, in) times the transpose of (out, in).

    `compressed` is true if the weight also exists in cuSPARSELt's layout.
    """

    tokens: int
    out_features: int
    in_features: int
    dtype: torch.dtype
    device: torch.device
    compressed: bool = False


@dataclass(frozen=True)
class Kernel:
    """A way to multiply with a packed weight.

    Attributes:
        multiply: Called as `multiply(x, weight, bias, **config)`: x Wᵀ + bias for x (tokens, in).
        refuse: Returns why the kernel cannot run a call, `None` if it can.
        configs: The configurations to measure; without measurements, the first one is used.
    """

    multiply: Callable[..., Tensor]
    refuse: Callable[[Call], str | None]
    configs: tuple[Mapping[str, int], ...] = ({},)


# Cached by device, so that the trial runs, and its failure is logged, only once.
@functools.cache
def triton_missing(device: torch.device) -> str | None:
    """Return the reason why Triton cannot be used on a device, or `None`.

    A small weight is unpacked once: Triton builds its driver and each launcher with a C compiler,
    which slim images lack, and reports that only when a program is launched.
    """
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; CUDA builds of torch bring it along"
    if device.type != "cuda" and not _interpreting():
        return f"Triton runs on CUDA devices (or with TRITON_INTERPRET=1), not on {device}"
    from mrp_sparse.kernels import triton_kernels

    try:
        values = torch.zeros(1, 4, dtype=torch.float16, device=device)
        meta = torch.zeros(1, 1, dtype=torch.uint8, device=device)
        triton_kernels.unpack(values, meta)
    except Exception as error:  # of any type: from Triton, the compiler or the driver
        reason = f"Triton cannot run a program here ({first_line(error)})"
        log.warning(
            "%s. Packed 2:4 layers run without it, more slowly. Triton needs a C compiler (gcc or "
            "clang) and Python's headers (python3-dev).",
            reason,
        )
        return reason
    return None


def _refuse_triton(call: Call) -> str | None:
    if reason := triton_missing(call.device):
        return reason
    if call.dtype not in _TRITON_DTYPES:
        name = str(call.dtype).removeprefix("torch.")
        return f"the Triton kernels take float16 and bfloat16, not {name}"
    # A byte of `meta` holds two groups of four columns, and programs read whole bytes.
    if call.in_features % 8:
        return f"in_features {call.in_features} is not a multiple of 8"
    # Of W (out·in), x (tokens·in) and y (tokens·out) the largest decides.
    wide = max(call.out_features, call.in_features)
    largest = max(call.out_features * call.in_features, call.tokens * wide)
    if largest >= LARGEST:
        return f"{largest} elements in one tensor; at most {LARGEST - 1}"
    return None


def _refuse_gemv(call: Call) -> str | None:
    if call.tokens != 1:
        return f"the matrix-vector kernel takes one token, not {call.tokens}"
    return _refuse_triton(call)


def _refuse_gemm(call: Call) -> str | None:
    if not call.tokens:
        return "there are no tokens"
    if call.tokens > SOME_TOKENS:
        return f"the kernel for small batches takes at most {SOME_TOKENS} tokens, not {call.tokens}"
    return _refuse_triton(call)


def _refuse_cusparselt(call: Call) -> str | None:
    if not call.tokens:
        return "there are no tokens"
    if reason := why_not_compressible(call):
        return reason
    # Not built on demand, since the operator may run inside a CUDA graph.
    return None if call.compressed else "the weight was not compressed for cuSPARSELt"


def why_not_compressible(call: Call) -> str | None:
    """Return the reason why a weight cannot have cuSPARSELt's layout, or `None`."""
    missing = cusparselt.missing(call.device)
    return missing or cusparselt.refuse(call.out_features, call.in_features, call.dtype)


def compress(values: Tensor, meta: Tensor) -> Tensor:
    """Return a packed weight in cuSPARSELt's layout.

    Raises:
        RuntimeError: The library refuses the weight; see `why_not_compressible`.
    """
    return cusparselt.compress(_unpacked(values, meta))


def _by_triton(
    kernel: str, x: Tensor, weight: PackedWeight, bias: Tensor | None, **config: int
) -> Tensor:
    from mrp_sparse.kernels import triton_kernels

    multiply: Callable[..., Tensor] = getattr(triton_kernels, kernel)
    return multiply(x, weight.values, weight.meta, bias, **config)


def _cusparselt(x: Tensor, weight: PackedWeight, bias: Tensor | None, **config: int) -> Tensor:
    assert weight.compressed is not None
    return cusparselt.matmul(x, weight.compressed, bias, **config)


def _unpack_dense(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    return F.linear(x, _unpacked(weight.values, weight.meta), bias)


def _unpacked(values: Tensor, meta: Tensor) -> Tensor:
    """Return the dense weight, by the Triton kernel where it runs, else by `spread`."""
    # With one token the size of W alone can be refused.
    call = Call(1, values.shape[0], 2 * values.shape[1], values.dtype, values.device)
    if values.is_cuda and _refuse_triton(call) is None:
        from mrp_sparse.kernels import triton_kernels

        return triton_kernels.unpack(values, meta)
    return spread(values, meta)


def _interpreting() -> bool:
    from mrp_sparse.kernels import triton_kernels

    return triton_kernels.interpreting()


# Without measurements few tokens take the first usable kernel in its first configuration: both
# orders are behaviour. `unpack-dense` is last, since it refuses nothing.
KERNELS: dict[str, Kernel] = {
    "triton-gemv": Kernel(
        functools.partial(_by_triton, "gemv"),
        _refuse_gemv,
        (
            *(
                {"rows": rows, "groups": groups}
                for rows, groups in ((4, 256), (2, 512), (1, 1024), (8, 128), (16, 128), (4, 128))
            ),
            *({"rows": rows, "groups": 128, "unroll": 4} for rows in (8, 4, 2)),
        ),
    ),
    "triton-gemm": Kernel(
        functools.partial(_by_triton, "gemm"),
        _refuse_gemm,
        (
            *({"rows": 16, "columns": 128, "split": split} for split in (4, 2, 8)),
            {"rows": 16, "columns": 256, "split": 4},
            {"rows": 32, "columns": 128, "split": 4},
            *({"rows": rows, "columns": 128} for rows in (64, 128)),
            {"rows": 32, "columns": 256, "stages": 2},  # with 3 Triton 3.9 spills on sm_90
            {"rows": 64, "columns": 256},
            {"rows": 16, "columns": 128, "split": 4, "tokens": 32},
            *({"rows": rows, "columns": 128, "tokens": 64} for rows in (64, 128)),
        ),
    ),
    "cusparselt": Kernel(_cusparselt, _refuse_cusparselt),
    "unpack-dense": Kernel(_unpack_dense, lambda _: None),
}
"""The kernels by name, in the order of preference without measurements."""


def usable(call: Call) -> dict[str, Kernel]:
    """Return the kernels that can run a call, among them always `unpack-dense`."""
    return {name: kernel for name, kernel in KERNELS.items() if kernel.refuse(call) is None}
