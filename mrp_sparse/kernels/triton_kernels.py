"""Triton kernels that read the packed format as stored on disk, without a second copy of a weight.

Importing this module needs Triton. `triton_programs.py` holds the device code.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from mrp_sparse.kernels.triton_programs import gemm_program, gemv_program, unpack_program


def interpreting() -> bool:
    """Return whether Triton interprets (`TRITON_INTERPRET=1`), so that CPU tensors work."""
    return not isinstance(gemv_program, triton.runtime.JITFunction)


def gemv(x: Tensor, values: Tensor, meta: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply one token, y = W x + b: x is (1, in), y is (1, out).

    Sums are in float32.

    Args:
        x: Input of dtype float16 or bfloat16, like the values.
        values: Kept values (out, in / 2).
        meta: Columns of the kept values, uint8 (out, in / 8).
        bias: Added to each output, (out,), or `None`.
    """
    out_features, columns = values.shape[0], 2 * values.shape[1]
    y = _result(1, out_features, x)
    # The fastest of nine sizes for the square layer of lab/results/gpu/llama2-7b-auto.json. In each
    # step a thread reads four groups of a row: with another number, Triton would exchange data
    # between threads. Four groups for each of 32 threads are 128 groups a warp.
    rows, groups = 4, 256
    with _on(x):
        gemv_program[(triton.cdiv(out_features, rows),)](
            _words(x, torch.int64),
            _words(values, torch.int32),
            meta,
            _readable(bias),
            y,
            out_features,
            COLUMNS=columns,
            ROWS=rows,
            GROUPS=groups,
            BF16=x.dtype == torch.bfloat16,
            BIAS=bias is not None,
            num_warps=rows * groups // 128,
        )
    return y.to(x.dtype)


def gemm(x: Tensor, values: Tensor, meta: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply a few tokens, Y = X Wᵀ + b with x (tokens, in), with a packed weight as dense tiles.

    A program multiplies 16 tokens by 16 rows. It has a warp for each of four parts of the columns,
    so that few rows still make enough work. The arguments are those of `gemv`.
    """
    num_tokens, width = x.shape
    out_features = values.shape[0]
    y = _result(num_tokens, out_features, x)
    tokens, rows, split, columns = 16, 16, 4, 128
    with _on(x):
        gemm_program[(triton.cdiv(out_features, rows), triton.cdiv(num_tokens, tokens))](
            _words(x, torch.int16),
            _words(values, torch.int64),
            meta,
            _readable(bias),
            y,
            num_tokens,
            out_features,
            COLUMNS=width,
            TOKENS=tokens,
            ROWS=rows,
            PAIRS=columns // 8,
            SPLIT=split,
            BF16=x.dtype == torch.bfloat16,
            BIAS=bias is not None,
            WIDE=interpreting(),
            num_warps=split,
            num_stages=3,
        )
    return y.to(x.dtype)


def unpack(values: Tensor, meta: Tensor) -> Tensor:
    """Return the dense weight (out, in) of 16-bit values, bit by bit, in one pass over memory."""
    out_features, width = values.shape[0], 2 * values.shape[1]
    rows, groups = 8, 128
    # A group of four columns of 16 bits is one int64, which a thread writes at once.
    y = torch.empty(out_features, width // 4, dtype=torch.int64, device=values.device)
    grid = (triton.cdiv(out_features, rows), triton.cdiv(width // 4, groups))
    with _on(values):
        unpack_program[grid](
            _words(values, torch.int32), meta, y, out_features, width, ROWS=rows, GROUPS=groups
        )
    return y.view(values.dtype)


def _words(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the same bits as words of `dtype`, at an address that is aligned for vector loads."""
    tensor = tensor.contiguous()
    # A slice of a larger tensor may begin at any element; a clone begins aligned.
    if tensor.data_ptr() % 16:
        tensor = tensor.clone()
    return tensor.view(dtype)


def _result(tokens: int, out_features: int, x: Tensor) -> Tensor:
    # The interpreter truncates where the hardware rounds to bfloat16.
    dtype = torch.float32 if interpreting() else x.dtype
    return torch.empty(tokens, out_features, dtype=dtype, device=x.device)


def _readable(bias: Tensor | None) -> Tensor | None:
    # The interpreter cannot read bfloat16 either.
    return bias.float() if interpreting() and bias is not None else bias


def _on(tensor: Tensor) -> Any:
    """Make the tensor's device the current one, on which Triton launches."""
    return torch.cuda.device(tensor.device if tensor.is_cuda else -1)
