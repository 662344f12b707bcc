"""Triton kernels that read the packed format as it lies on disk: no second copy of a weight.

A packed row holds, for each group of four input columns, two 16-bit values (one 32-bit word here)
and one nibble i₀ | i₁<<2 with the columns they belong to. `gemv` picks the two activations of a
group by shifting the 64 bits that hold all four of them; `gemm` rebuilds the four columns in
registers and multiplies densely; `unpack` writes them out. Importing this module needs Triton.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _widen(bits, BF16: tl.constexpr):  # type: ignore[no-untyped-def]
    """The low 16 bits of an int32, as float32."""
    if BF16:  # bfloat16 is the upper half of float32
        wide = (bits << 16).to(tl.float32, bitcast=True)
    else:
        wide = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return wide


@triton.jit
def _gemv(  # type: ignore[no-untyped-def]
    x_ptr,
    values_ptr,
    meta_ptr,
    bias_ptr,
    y_ptr,
    out_features,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    BF16: tl.constexpr,
    BIAS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    partial = tl.zeros([ROWS, GROUPS], tl.float32)
    for start in range(0, COLUMNS // 4, GROUPS):
        group = start + tl.arange(0, GROUPS)
        inside = (row < out_features)[:, None] & (group < COLUMNS // 4)[None, :]
        two = tl.load(
            values_ptr + row[:, None] * (COLUMNS // 4) + group[None, :], mask=inside, other=0
        )
        # Each byte once, for two neighbours: no other way gives the nibbles the weights' layout.
        pair = start // 2 + tl.arange(0, GROUPS // 2)
        whole = (row < out_features)[:, None] & (pair < COLUMNS // 8)[None, :]
        byte = tl.load(
            meta_ptr + row[:, None] * (COLUMNS // 8) + pair[None, :], mask=whole, other=0
        ).to(tl.int32)
        nibble = tl.join(byte, byte >> 4).reshape(ROWS, GROUPS)
        # As wide as the weights, though all rows read the same: loads of one shape share a layout,
        # and nothing has to be exchanged between threads.
        four = tl.load(x_ptr + row[:, None] * 0 + group[None, :], mask=inside, other=0)
        first = (four >> ((nibble & 3) << 4).to(tl.int64)).to(tl.int32)
        second = (four >> ((nibble & 12) << 2).to(tl.int64)).to(tl.int32)
        partial += _widen(two, BF16) * _widen(first, BF16)
        partial += _widen(two >> 16, BF16) * _widen(second, BF16)
    y = tl.sum(partial, 1)
    if BIAS:
        y += tl.load(bias_ptr + row, mask=row < out_features, other=0).to(tl.float32)
    tl.store(y_ptr + row, y.to(y_ptr.dtype.element_ty), mask=row < out_features)


@triton.jit
def _dense_tile(  # type: ignore[no-untyped-def]
    values_ptr,
    meta_ptr,
    row,
    group,
    out_features,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The bits of rows × BLOCK dense columns, as int32 with the value in the lower half."""
    inside = (row < out_features)[:, None] & (group < COLUMNS // 4)[None, :]
    two = tl.load(values_ptr + row[:, None] * (COLUMNS // 4) + group[None, :], mask=inside, other=0)
    byte = tl.load(
        meta_ptr + row[:, None] * (COLUMNS // 8) + (group // 2)[None, :], mask=inside, other=0
    )
    nibble = (byte.to(tl.int32) >> ((group % 2) * 4)[None, :]) & 15
    i0 = nibble & 3
    i1 = nibble >> 2
    low = two & 0xFFFF
    high = (two >> 16) & 0xFFFF
    # i0 < i1, so column 0 can only hold the first value and column 3 only the second.
    c0 = tl.where(i0 == 0, low, 0)
    c1 = tl.where(i0 == 1, low, tl.where(i1 == 1, high, 0))
    c2 = tl.where(i0 == 2, low, tl.where(i1 == 2, high, 0))
    c3 = tl.where(i1 == 3, high, 0)
    return tl.join(tl.join(c0, c2), tl.join(c1, c3)).reshape(ROWS, BLOCK)


@triton.jit(do_not_specialize=["tokens"])  # one compilation for any number of tokens
def _gemm(  # type: ignore[no-untyped-def]
    x_ptr,
    values_ptr,
    meta_ptr,
    bias_ptr,
    y_ptr,
    tokens,
    out_features,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BF16: tl.constexpr,
    BIAS: tl.constexpr,
    WIDE: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    y = tl.zeros([ROWS, TOKENS], tl.float32)
    for start in range(0, COLUMNS, BLOCK):
        group = start // 4 + tl.arange(0, BLOCK // 4)
        weight = _dense_tile(values_ptr, meta_ptr, row, group, out_features, COLUMNS, ROWS, BLOCK)
        column = start + tl.arange(0, BLOCK)
        x = tl.load(
            x_ptr + token[None, :] * COLUMNS + column[:, None],
            mask=(token < tokens)[None, :] & (column < COLUMNS)[:, None],
            other=0,
        )
        if WIDE:  # the interpreter has no bfloat16 products
            y += tl.dot(_widen(weight, BF16), _widen(x.to(tl.int32), BF16))
        elif BF16:
            y += tl.dot(
                weight.to(tl.int16).to(tl.bfloat16, bitcast=True), x.to(tl.bfloat16, bitcast=True)
            )
        else:
            y += tl.dot(
                weight.to(tl.int16).to(tl.float16, bitcast=True), x.to(tl.float16, bitcast=True)
            )
    if BIAS:
        y += tl.load(bias_ptr + row, mask=row < out_features, other=0).to(tl.float32)[:, None]
    tl.store(
        y_ptr + token[None, :] * out_features + row[:, None],
        y.to(y_ptr.dtype.element_ty),
        mask=(token < tokens)[None, :] & (row < out_features)[:, None],
    )


@triton.jit
def _unpack(  # type: ignore[no-untyped-def]
    values_ptr,
    meta_ptr,
    y_ptr,
    out_features,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    start = tl.program_id(1) * BLOCK
    group = start // 4 + tl.arange(0, BLOCK // 4)
    weight = _dense_tile(values_ptr, meta_ptr, row, group, out_features, COLUMNS, ROWS, BLOCK)
    column = start + tl.arange(0, BLOCK)
    tl.store(
        y_ptr + row[:, None] * COLUMNS + column[None, :],
        weight.to(tl.int16),
        mask=(row < out_features)[:, None] & (column < COLUMNS)[None, :],
    )


def interpreting() -> bool:
    """Whether Triton runs in its interpreter (`TRITON_INTERPRET=1`), where CPU tensors work."""
    return not isinstance(_gemv, triton.runtime.JITFunction)


def gemv(
    x: Tensor,
    values: Tensor,
    meta: Tensor,
    bias: Tensor | None,
    *,
    rows: int = 8,
    groups: int = 128,
    warps: int = 8,
) -> Tensor:
    """Multiply one token, y = W x + b: x is (1, in), y is (1, out).

    Sums in float32. With the default tile (a thread has four groups), the code that Triton 3.6 and
    3.9 make for sm_90 has no shared memory and no barrier in the loop.

    Args:
        x: float16 or bfloat16, like the values.
        values: (out, in/2).
        meta: (out, in/8), uint8.
        bias: (out,) or None.
        rows: output rows a program, a power of two.
        groups: groups of four columns a step, a power of two.
        warps: warps a program.
    """
    out_features, columns = values.shape[0], 2 * values.shape[1]
    y = _result(1, out_features, x)
    grid = (triton.cdiv(out_features, rows),)
    with _on(x):
        _gemv[grid](
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
            num_warps=warps,
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
    columns: int = 128,
    warps: int = 4,
    stages: int = 3,
) -> Tensor:
    """Y = X Wᵀ + b for a few tokens, loaded sparse and multiplied dense: x is (tokens, in).

    Args:
        x: float16 or bfloat16, like the values.
        values: (out, in/2).
        meta: (out, in/8), uint8.
        bias: (out,) or None.
        tokens: tokens a program, a power of two ≥ 16.
        rows: output rows a program, a power of two ≥ 16.
        columns: dense columns a step, a power of two ≥ 16.
        warps: warps a program.
        stages: software pipeline stages.
    """
    num_tokens, width = x.shape
    out_features = values.shape[0]
    y = _result(num_tokens, out_features, x)
    grid = (triton.cdiv(out_features, rows), triton.cdiv(num_tokens, tokens))
    with _on(x):
        _gemm[grid](
            _words(x, torch.int16),
            _words(values, torch.int32),
            meta,
            _readable(bias),
            y,
            num_tokens,
            out_features,
            COLUMNS=width,
            TOKENS=tokens,
            ROWS=rows,
            BLOCK=columns,
            BF16=x.dtype == torch.bfloat16,
            BIAS=bias is not None,
            WIDE=interpreting(),
            num_warps=warps,
            num_stages=stages,
        )
    return y.to(x.dtype)


def unpack(values: Tensor, meta: Tensor, *, rows: int = 16, columns: int = 256) -> Tensor:
    """The dense weight (out, in) of a packed one, in one pass over memory; bit for bit."""
    out_features, width = values.shape[0], 2 * values.shape[1]
    y = torch.empty(out_features, width, dtype=torch.int16, device=values.device)
    grid = (triton.cdiv(out_features, rows), triton.cdiv(width, columns))
    with _on(values):
        _unpack[grid](
            _words(values, torch.int32), meta, y, out_features, width, ROWS=rows, BLOCK=columns
        )
    return y.view(values.dtype)


def _words(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The same bits in words of `dtype`, from an address that vector loads may start at."""
    tensor = tensor.contiguous()
    if tensor.data_ptr() % 16:
        tensor = tensor.clone()
    return tensor.view(dtype)


def _result(tokens: int, out_features: int, x: Tensor) -> Tensor:
    # The interpreter truncates where the hardware rounds to bfloat16.
    dtype = torch.float32 if interpreting() else x.dtype
    return torch.empty(tokens, out_features, dtype=dtype, device=x.device)


def _readable(bias: Tensor | None) -> Tensor | None:
    # Nor can the interpreter read bfloat16.
    return bias.float() if interpreting() and bias is not None else bias


def _on(tensor: Tensor) -> Any:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(tensor.device if tensor.is_cuda else -1)
