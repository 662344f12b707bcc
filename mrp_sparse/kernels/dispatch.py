"""`linear24` on CUDA devices: a kernel for each number of tokens.

tokens            kernel          reads
1                 triton-gemv     the packed format
2 to 64           triton-gemm     the packed format
more              cusparselt      its own layout, if `Sparse24Linear.compress` built it
without a layout  unpack-dense    the packed format, for a dense product

The order is that of the times on an H200 in lab/results/gpu/llama2-7b-auto.md: × dense, gemv is
1.64 to 2.00 at one token, where gemm is at most 1.18; gemm is 0.99 to 1.16 at 16, where cuSPARSELt
is at most 0.66; cuSPARSELt is 1.38 to 1.43 at 2048, and unpacking at most 0.87. In between, nothing
was measured. Where Triton cannot run, its tokens take the next kernel that can.

cuSPARSELt multiplies with the sparse tensor cores (sm_80 and newer). Each call sets up its product
on the host, so that it is only fast inside a CUDA graph, and its default algorithm is often slow.
Its layout depends on library and device: it is built on demand and never written to disk.
"""

import functools
import importlib.util
import logging

import torch
import torch.nn.functional as F
from torch import Tensor

from mrp_ground.errors import first_line
from mrp_sparse import upstream
from mrp_sparse.formats.sparse24 import spread
from mrp_sparse.kernels.operator import linear24

log = logging.getLogger(__name__)

_FEW_TOKENS = 64
"""Number of tokens up to which the time is that of reading the weight."""
_DTYPES = (torch.float16, torch.bfloat16)
_LARGEST = 2**31
"""Triton addresses elements with 32 bits."""
_WEIGHT_MULTIPLE, _TOKEN_MULTIPLE = 16, 8
"""The numbers of rows and columns, and of tokens, that cuSPARSELt takes are multiples of these."""


@linear24.register_kernel("cuda")
def multiply(
    x: Tensor,
    weight: Tensor,
    meta: Tensor,
    bias: Tensor | None,
    compressed: Tensor | None = None,
) -> Tensor:
    """Compute `linear24` by the kernel that `choose` returns.

    Raises:
        ValueError: Input and weight differ in dtype.
    """
    if x.dtype != weight.dtype:
        raise ValueError(
            f"The input is {x.dtype} and the packed weight {weight.dtype}; cast one of them."
        )
    rows, columns = weight.shape[0], 2 * weight.shape[1]
    flat = x.reshape(-1, columns)
    kernel = choose(len(flat), (rows, columns), x.dtype, x.device, compressed is not None)
    if kernel == "cusparselt":
        assert compressed is not None
        y = _by_cusparselt(flat, compressed, bias)
    elif kernel == "unpack-dense":
        y = F.linear(flat, _unpacked(weight, meta), bias)
    else:
        from mrp_sparse.kernels import triton_kernels

        run = triton_kernels.gemv if kernel == "triton-gemv" else triton_kernels.gemm
        y = run(flat, weight, meta, bias)
    return y.view(*x.shape[:-1], rows)


@functools.lru_cache(maxsize=4096)  # every product asks
def choose(
    tokens: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    compressed: bool = False,
) -> str:
    """Return the name of the kernel for a number of tokens and a weight (rows, columns).

    `compressed` is true if the weight also exists in cuSPARSELt's layout, which is not built on
    demand: the operator may run inside a CUDA graph.
    """
    if 0 < tokens <= _FEW_TOKENS and _fits_triton(tokens, shape, dtype, device):
        name = "triton-gemv" if tokens == 1 else "triton-gemm"
    else:
        name = "cusparselt" if compressed and tokens else "unpack-dense"
    log.debug("%d tokens by %s in %s on %s run by %s", tokens, shape, dtype, device, name)
    return name


def _fits_triton(
    tokens: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> bool:
    """Return whether Triton runs here, and takes this dtype and these sizes."""
    rows, columns = shape
    # Of W (rows·columns), x (tokens·columns) and y (tokens·rows) the largest decides.
    largest = max(rows * columns, tokens * max(shape))
    # A byte of `meta` holds two groups of four columns, and programs read whole bytes.
    fits = dtype in _DTYPES and columns % 8 == 0 and largest < _LARGEST
    return fits and triton_missing(device) is None


# Cached by device, so that the trial runs, and its failure is logged, only once.
@functools.cache
def triton_missing(device: torch.device) -> str | None:
    """Return the reason why Triton cannot be used on a device, or `None`.

    A small weight is unpacked once: Triton builds its driver and each launcher with a C compiler,
    which slim images lack, and reports that only when a program is launched.
    """
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; CUDA builds of torch bring it along"
    from mrp_sparse.kernels import triton_kernels

    if device.type != "cuda" and not triton_kernels.interpreting():
        return f"Triton runs on CUDA devices (or with TRITON_INTERPRET=1), not on {device}"
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


def _unpacked(values: Tensor, meta: Tensor) -> Tensor:
    """Return the dense weight, by the Triton kernel where it runs, else by `spread`."""
    shape = values.shape[0], 2 * values.shape[1]
    if values.is_cuda and _fits_triton(1, shape, values.dtype, values.device):
        from mrp_sparse.kernels import triton_kernels

        return triton_kernels.unpack(values, meta)
    return spread(values, meta)


def why_not_compressed(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> str | None:
    """Return the reason why cuSPARSELt cannot multiply with a weight (rows, columns), or `None`."""
    if dtype not in _DTYPES:
        name = str(dtype).removeprefix("torch.")
        return f"cuSPARSELt takes float16 and bfloat16 here, not {name}"
    if any(size % _WEIGHT_MULTIPLE for size in shape):
        sizes = "×".join(map(str, shape))
        return f"cuSPARSELt needs both dimensions in multiples of {_WEIGHT_MULTIPLE}, not {sizes}"
    if device.type != "cuda":
        return f"cuSPARSELt runs on CUDA devices, not on {device.type!r}"
    # The build is checked before the capability, since that question starts CUDA.
    if not torch.backends.cusparselt.is_available():
        return f"torch {torch.__version__} was built without cuSPARSELt"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"sparse tensor cores need sm_80 or newer; this device is sm_{major}{minor}"
    return None


def _by_cusparselt(x: Tensor, compressed: Tensor, bias: Tensor | None) -> Tensor:
    """Return x Wᵀ + b (tokens, rows), contiguous, for x (tokens, columns)."""
    # The sparse operand is the left one, hence W xᵀ, which is transposed back. Padded tokens give
    # the last rows of y, which the slice drops: rows do not influence each other.
    padding = -len(x) % _TOKEN_MULTIPLE
    padded = F.pad(x, (0, 0, 0, padding)) if padding else x.contiguous()
    return upstream.matmul_cusparselt(compressed, padded.t(), bias)[: len(x)]
