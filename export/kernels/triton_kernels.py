"""Triton kernels that read the packed format as it lies on disk: no second copy of a weight.

A packed row holds, for each group of four input columns, two 16-bit values (one 32-bit word here)
and one nibble i₀ | i₁<<2 with the columns they belong to. `gemv` picks the two activations of a
group by shifting the 64 bits that hold all four of them; `gemm` shifts the two values to where they
belong and multiplies densely; `unpack` writes that out. Importing this module needs Triton.
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
def _columns(two, nibble):  # type: ignore[no-untyped-def]
    """The four columns of a group as one int64: each kept value, shifted to where it belongs."""
    first = (two & 0xFFFF).to(tl.int64) << ((nibble & 3) << 4).to(tl.int64)
    second = ((two >> 16) & 0xFFFF).to(tl.int64) << ((nibble & 12) << 2).to(tl.int64)
    return first | second


@triton.jit
def _column(even, odd, NUMBER: tl.constexpr):  # type: ignore[no-untyped-def]
    """One of the four columns of two groups; their new axis comes before those that follow."""
    return tl.join(
        (even >> (16 * NUMBER)).to(tl.int16),
        (odd >> (16 * NUMBER)).to(tl.int16),
    )


@triton.jit
def _operand(bits, BF16: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bits of an int16, as what `tl.dot` multiplies."""
    if WIDE:  # the interpreter has no bfloat16 products
        value = _widen(bits.to(tl.int32), BF16)
    elif BF16:
        value = bits.to(tl.bfloat16, bitcast=True)
    else:
        value = bits.to(tl.float16, bitcast=True)
    return value


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
    PAIRS: tl.constexpr,
    SPLIT: tl.constexpr,
    BF16: tl.constexpr,
    BIAS: tl.constexpr,
    WIDE: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    token = (tl.program_id(1) * TOKENS + tl.arange(0, TOKENS))[None, :]
    # Two groups are one byte of meta and one word of values: tiles of one shape, so that decoding
    # exchanges nothing between threads.
    if SPLIT == 1:
        weight_row, x_token = row, token
        weight_pair = tl.arange(0, PAIRS)[None, :]
        x_column = tl.arange(0, 8 * PAIRS)[:, None]
        y = tl.zeros([ROWS, TOKENS], tl.float32)
    else:  # a batch of products, one a warp
        weight_row, x_token = row[None, :, :], token[None, :, :]
        part = tl.arange(0, SPLIT)[:, None] * PAIRS
        weight_pair = (part + tl.arange(0, PAIRS)[None, :])[:, None, :]
        x_column = (8 * part + tl.arange(0, 8 * PAIRS)[None, :])[:, :, None]
        y = tl.zeros([SPLIT, ROWS, TOKENS], tl.float32)
    for start in range(0, COLUMNS // 8, SPLIT * PAIRS):
        pair = start + weight_pair
        inside = (weight_row < out_features) & (pair < COLUMNS // 8)
        at = weight_row * (COLUMNS // 8) + pair
        kept = tl.load(values_ptr + at, mask=inside, other=0)
        byte = tl.load(meta_ptr + at, mask=inside, other=0).to(tl.int32)
        even = _columns(kept.to(tl.int32), byte)
        odd = _columns((kept >> 32).to(tl.int32), byte >> 4)
        weight = tl.join(
            tl.join(_column(even, odd, 0), _column(even, odd, 2)),
            tl.join(_column(even, odd, 1), _column(even, odd, 3)),
        )
        weight = weight.reshape(y.shape[:-1] + (8 * PAIRS,))  # noqa: RUF005  (Triton cannot unpack)
        column = 8 * start + x_column
        inside = (x_token < tokens) & (column < COLUMNS)
        x = tl.load(x_ptr + x_token * COLUMNS + column, mask=inside, other=0)
        y = tl.dot(_operand(weight, BF16, WIDE), _operand(x, BF16, WIDE), y)
    if SPLIT > 1:
        y = tl.sum(y, 0)
    if BIAS:
        y += tl.load(bias_ptr + row, mask=row < out_features, other=0).to(tl.float32)
    tl.store(
        y_ptr + token * out_features + row,
        y.to(y_ptr.dtype.element_ty),
        mask=(token < tokens) & (row < out_features),
    )


@triton.jit
def _unpack(  # type: ignore[no-untyped-def]
    values_ptr,
    meta_ptr,
    y_ptr,
    out_features,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    group = (tl.program_id(1) * GROUPS + tl.arange(0, GROUPS))[None, :]
    inside = (row < out_features) & (group < COLUMNS // 4)
    two = tl.load(values_ptr + row * (COLUMNS // 4) + group, mask=inside, other=0)
    byte = tl.load(meta_ptr + row * (COLUMNS // 8) + group // 2, mask=inside, other=0).to(tl.int32)
    weight = _columns(two, byte >> (group % 2 * 4))
    tl.store(y_ptr + row * (COLUMNS // 4) + group, weight, mask=inside)


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
) -> Tensor:
    """Multiply one token, y = W x + b: x is (1, in), y is (1, out).

    Sums in float32. A thread takes four groups of a row a step: with more of them, or fewer, Triton
    exchanges them between threads.

    Args:
        x: Input of dtype float16 or bfloat16, like the values.
        values: Kept values (out, in / 2).
        meta: Columns of the kept values, uint8 (out, in / 8).
        bias: Added to each output, (out,), or `None`.
        rows: Output rows of a program, a power of two.
        groups: Groups of four columns of a step, a power of two; rows × groups is at least 128.
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
    """Y = X Wᵀ + b for a few tokens, loaded sparse and multiplied dense: x is (tokens, in).

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
        _gemm[grid](
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
            num_warps=split if split > 1 else rows // 16,
            num_stages=stages,
        )
    return y.to(x.dtype)


def unpack(values: Tensor, meta: Tensor, *, rows: int = 8, groups: int = 128) -> Tensor:
    """The dense weight (out, in) of a packed one, in one pass over memory; bit for bit."""
    out_features, width = values.shape[0], 2 * values.shape[1]
    y = torch.empty(out_features, width // 4, dtype=torch.int64, device=values.device)
    grid = (triton.cdiv(out_features, rows), triton.cdiv(width // 4, groups))
    with _on(values):
        _unpack[grid](
            _words(values, torch.int32), meta, y, out_features, width, ROWS=rows, GROUPS=groups
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
