"""Triton kernels for bitmasks of 16 and of 4 bits, which read the packed tensors as stored on disk.

A program takes some rows and walks along their columns: the rank of a kept weight among those of
its row, which a prefix sum of the bits gives, is where its value lies. Grids and loops depend on
shapes alone, so that no call waits for the device, and a CUDA graph records each. Nothing outside
the tensors is read, whatever the bits say. Importing this module needs Triton.

The sizes of a program were chosen without a device, and are not measured yet.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mrp_sparse.kernels.triton_kernels import _on, _readable, _result, interpreting
from mrp_sparse.kernels.triton_programs import _operand, _widen

GROUP = 64
"""Columns that share a scale."""
_ROWS, _TOKENS, _WARPS = 16, 16, 4


@triton.jit
def _kept(bits_ptr, row, column, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return which of some columns are kept, as int32, and their ranks among these."""
    byte = tl.load(
        bits_ptr + row[:, None] * ((COLUMNS + 7) // 8) + column[None, :] // 8,
        mask=column[None, :] < COLUMNS,
        other=0,
    ).to(tl.int32)
    kept = (byte >> (column % 8)[None, :]) & 1
    # Without the weight itself: its rank is the number of weights kept before it.
    return kept, tl.cumsum(kept, 1) - kept


@triton.jit
def _values(values_ptr, position, size, kept, rank):  # type: ignore[no-untyped-def]
    """Return the 16 bits of each weight, and where the values of the next columns begin."""
    # Damaged bits may count more values than there are: `size` bounds every read.
    at = position[:, None] + rank
    inside = (kept == 1) & (at >= 0) & (at < size)
    return tl.load(values_ptr + at, mask=inside, other=0), position + tl.sum(kept, 1)


@triton.jit
def _coded(nibbles_ptr, position, size, kept, rank, scale, BF16: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the weights of a group of columns, and where the nibbles of the next begin."""
    at = position[:, None] + rank // 2
    inside = (kept == 1) & (at >= 0) & (at < size)
    byte = tl.load(nibbles_ptr + at, mask=inside, other=0).to(tl.int32)
    code = (byte >> (rank % 2 * 4)) & 15
    number = tl.where(code < 8, code - 8, code - 7)  # from −8 to −1, or from 1 to 8
    weight = tl.where(inside, number.to(tl.float32) * scale[:, None], 0.0)
    if WIDE:  # the interpreter has no bfloat16 products
        rounded = weight
    elif BF16:
        rounded = weight.to(tl.bfloat16)
    else:
        rounded = weight.to(tl.float16)
    # Groups begin at whole bytes: one of n codes takes ⌈n / 2⌉.
    return rounded, position + (tl.sum(kept, 1) + 1) // 2


@triton.jit
def _decoded(  # type: ignore[no-untyped-def]
    values_ptr,
    bits_ptr,
    scales_ptr,
    row,
    start,
    position,
    size,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    CODED: tl.constexpr,
    BF16: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Return STEP columns of some rows, as 16 bits or, of codes, numbers; and the next position."""
    column = start + tl.arange(0, STEP)
    kept, rank = _kept(bits_ptr, row, column, COLUMNS)
    if CODED:
        # STEP is GROUP: one scale of each row serves the whole step.
        groups: tl.constexpr = (COLUMNS + STEP - 1) // STEP
        bits = tl.load(scales_ptr + row * groups + start // STEP).to(tl.int32)
        scale = _widen(bits, BF16)
        weight, position = _coded(values_ptr, position, size, kept, rank, scale, BF16, WIDE)
    else:
        weight, position = _values(values_ptr, position, size, kept, rank)
    return weight, position


@triton.jit(do_not_specialize=["tokens", "size"])  # one compilation for any number of both
def product_program(  # type: ignore[no-untyped-def]
    x_ptr,
    values_ptr,
    bits_ptr,
    scales_ptr,
    offsets_ptr,
    bias_ptr,
    y_ptr,
    tokens,
    out_features,
    size,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    STEP: tl.constexpr,
    CODED: tl.constexpr,
    BF16: tl.constexpr,
    BIAS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Multiply TOKENS tokens by ROWS rows, STEP columns at a time."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    # Rows past the end read the last row again, so that loads need no mask; the store drops them.
    # `position` carries the values of earlier columns, so that columns are walked in order.
    read = tl.minimum(row, out_features - 1)
    position = tl.load(offsets_ptr + read)
    y = tl.zeros([ROWS, TOKENS], tl.float32)
    for start in range(0, COLUMNS, STEP):
        column = start + tl.arange(0, STEP)
        weight, position = _decoded(
            values_ptr,
            bits_ptr,
            scales_ptr,
            read,
            start,
            position,
            size,
            COLUMNS,
            STEP,
            CODED,
            BF16,
            WIDE,
        )
        if not CODED:
            weight = _operand(weight, BF16, WIDE)
        # Weights past the last column are 0 already. The mask of x is needed all the same: an
        # address past the row may hold NaN, and 0 · NaN is NaN.
        inside = (token < tokens)[None, :] & (column < COLUMNS)[:, None]
        x = tl.load(x_ptr + token[None, :] * COLUMNS + column[:, None], mask=inside, other=0)
        y = tl.dot(weight, _operand(x, BF16, WIDE), y)
    if BIAS:
        y += tl.load(bias_ptr + read).to(tl.float32)[:, None]
    tl.store(
        y_ptr + token[None, :] * out_features + row[:, None],
        y.to(y_ptr.dtype.element_ty),
        mask=(token < tokens)[None, :] & (row < out_features)[:, None],
    )


@triton.jit(do_not_specialize=["size"])
def unpack_program(  # type: ignore[no-untyped-def]
    values_ptr,
    bits_ptr,
    scales_ptr,
    offsets_ptr,
    y_ptr,
    out_features,
    size,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    CODED: tl.constexpr,
    BF16: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Write ROWS rows as dense values, STEP columns at a time."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    read = tl.minimum(row, out_features - 1)
    position = tl.load(offsets_ptr + read)
    for start in range(0, COLUMNS, STEP):
        column = start + tl.arange(0, STEP)
        weight, position = _decoded(
            values_ptr,
            bits_ptr,
            scales_ptr,
            read,
            start,
            position,
            size,
            COLUMNS,
            STEP,
            CODED,
            BF16,
            WIDE,
        )
        tl.store(
            # rows · columns of a large weight passes 2³¹.
            y_ptr + row[:, None].to(tl.int64) * COLUMNS + column[None, :],
            weight,
            mask=(row < out_features)[:, None] & (column < COLUMNS)[None, :],
        )


def product(
    x: Tensor,
    values: Tensor,
    bits: Tensor,
    scales: Tensor | None,
    offsets: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """Multiply a few tokens, Y = X Wᵀ + b with x (tokens, columns); sums are in float32.

    Args:
        x: Input of dtype float16 or bfloat16, like the values or the scales.
        values: Kept values, or codes of them, two in a byte, if there are scales.
        bits: Their columns, uint8 (rows, ceil(columns / 8)).
        scales: Scales (rows, ceil(columns / 64)) of codes, or `None`.
        offsets: The index of each row's first value or byte, int64 (rows,).
        bias: Added to each output, (rows,), or `None`.
    """
    tokens, columns = x.shape
    rows = bits.shape[0]
    y = _result(tokens, rows, x)
    grid = (triton.cdiv(rows, _ROWS), triton.cdiv(tokens, _TOKENS))
    with _on(x):
        product_program[grid](
            x.contiguous().view(torch.int16),
            *_operands(values, bits, scales, offsets),
            _readable(bias),
            y,
            tokens,
            rows,
            values.numel(),
            COLUMNS=columns,
            TOKENS=_TOKENS,
            BIAS=bias is not None,
            **_options(x.dtype, scales),
        )
    return y.to(x.dtype)


def unpack(
    values: Tensor, bits: Tensor, scales: Tensor | None, offsets: Tensor, columns: int
) -> Tensor:
    """Return the dense weight (rows, columns), in one pass over memory; see `product`."""
    dtype = values.dtype if scales is None else scales.dtype
    rows = bits.shape[0]
    # Values of 16 bits are copied as integers; codes become numbers, which the interpreter has in
    # float32 alone.
    written = torch.int16 if scales is None else _result(0, 0, scales).dtype
    y = torch.empty(rows, columns, dtype=written, device=bits.device)
    with _on(bits):
        unpack_program[(triton.cdiv(rows, _ROWS),)](
            *_operands(values, bits, scales, offsets),
            y,
            rows,
            values.numel(),
            COLUMNS=columns,
            **_options(dtype, scales),
        )
    return y.view(dtype) if scales is None else y.to(dtype)


def _operands(values: Tensor, bits: Tensor, scales: Tensor | None, offsets: Tensor) -> list[Any]:
    """Return the tensors as integers: the interpreter cannot read bfloat16."""
    if scales is None:
        return [values.contiguous().view(torch.int16), bits.contiguous(), None, offsets]
    return [values.contiguous(), bits.contiguous(), scales.contiguous().view(torch.int16), offsets]


def _options(dtype: torch.dtype, scales: Tensor | None) -> dict[str, Any]:
    return {
        "ROWS": _ROWS,
        "STEP": GROUP,
        "CODED": scales is not None,
        "BF16": dtype == torch.bfloat16,
        "WIDE": interpreting(),
        "num_warps": _WARPS,
    }
