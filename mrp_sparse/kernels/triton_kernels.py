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


def gemv(
    x: Tensor,
    values: Tensor,
    meta: Tensor,
    bias: Tensor | None,
    *,
    rows: int = 8,
    groups: int = 128,
    unroll: int = 1,
) -> Tensor:
    """Multiply one token, y = W x + b: x is (1, in), y is (1, out).

    Sums are in float32. In each step a thread reads four groups of a row: with another number,
    Triton would exchange data between threads.

    Args:
        x: Input of dtype float16 or bfloat16, like the values.
        values: Kept values (out, in / 2).
        meta: Columns of the kept values, uint8 (out, in / 8).
        bias: Added to each output, (out,), or `None`.
        rows: Output rows of a program, a power of two.
        groups: Groups of four columns of a step, a power of two; rows × groups is at least 128.
        unroll: Number of steps whose loads are issued together, so that a warp waits for memory
            less often.
    """
    out_features, columns = values.shape[0], 2 * values.shape[1]
    y = _result(1, out_features, x)
    grid = (triton.cdiv(out_features, rows),)
    with _on(x):
        gemv_program[grid](
            _words(x, torch.int64),
            _words(values, torch.int32),
            meta,
            _readable(bias),
            y,
            out_features,
            COLUMNS=columns,
            ROWS=rows,
            GROUPS=groups,
            UNROLL=unroll,
            BF16=x.dtype == torch.bfloat16,
            BIAS=bias is not None,
            # Four groups for each of 32 threads are 128 groups a warp.
            num_warps=rows * groups // 128,
        )
    return y.to(x.dtype)


def gemm(
    x: Tensor,
    values: Tensor,
    meta: Tensor,
    bias: Tensor | None,
    *,
    tokens: int = 16,
    rows: int = 64,
    split: int = 1,
    columns: int = 128,
    stages: int = 3,
) -> Tensor:
    """Multiply a few tokens, Y = X Wᵀ + b with x (tokens, in), with a packed weight as dense tiles.

    Without a split a program has a warp for each 16 of its rows. With one it has a warp for each
    part of the columns, so that few rows still make enough work.

    Args:
        x: Input of dtype float16 or bfloat16, like the values.
        values: Kept values (out, in / 2).
        meta: Columns of the kept values, uint8 (out, in / 8).
        bias: Added to each output, (out,), or `None`.
        tokens: Tokens of a program, a power of two ≥ 16.
        rows: Output rows of a program, a power of two ≥ 16.
        split: Number of parts of the columns, a power of two.
        columns: Dense columns of each part in a step, a power of two ≥ 128.
        stages: Stages of the software pipeline.
    """
    num_tokens, width = x.shape
    out_features = values.shape[0]
    y = _result(num_tokens, out_features, x)
    grid = (triton.cdiv(out_features, rows), triton.cdiv(num_tokens, tokens))
    with _on(x):
        gemm_program[grid](
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
            # A matrix instruction has 16 rows: a warp for each 16, or one for each part.
            num_warps=split if split > 1 else rows // 16,
            num_stages=stages,
        )
    return y.to(x.dtype)


def unpack(values: Tensor, meta: Tensor, *, rows: int = 8, groups: int = 128) -> Tensor:
    """Return the dense weight (out, in) of 16-bit values, bit by bit, in one pass over memory."""
    out_features, width = values.shape[0], 2 * values.shape[1]
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
