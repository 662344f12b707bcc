"""Triton kernels that read the packed format as stored on disk, without a second copy of a weight.

A packed row holds, for each group of four input columns, two 16-bit values (one 32-bit word here)
and one nibble i₀ | i₁<<2 with their columns in the group. `gemv_program` selects the two
activations of a group by shifting the 64 bits that hold all four; `gemm_program` shifts the two
values to their columns and multiplies densely; `unpack_program` writes the shifted values.

Importing this module needs Triton.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _widen(bits, BF16: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the low 16 bits of an int32 as float32."""
    if BF16:  # bfloat16 is the upper half of float32
        wide = (bits << 16).to(tl.float32, bitcast=True)
    else:
        wide = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return wide


@triton.jit
def gemv_program(  # type: ignore[no-untyped-def]
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
    """Multiply one token by ROWS rows, GROUPS groups a step."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    partial = tl.zeros([ROWS, GROUPS], tl.float32)
    for start in tl.range(0, COLUMNS // 4, GROUPS, loop_unroll_factor=1):
        group = start + tl.arange(0, GROUPS)
        inside = (row < out_features)[:, None] & (group < COLUMNS // 4)[None, :]
        two = tl.load(
            values_ptr + row[:, None] * (COLUMNS // 4) + group[None, :], mask=inside, other=0
        )
        # Each byte is loaded once for two adjacent groups: only so the nibbles get the weights'
        # layout.
        pair = start // 2 + tl.arange(0, GROUPS // 2)
        whole = (row < out_features)[:, None] & (pair < COLUMNS // 8)[None, :]
        byte = tl.load(
            meta_ptr + row[:, None] * (COLUMNS // 8) + pair[None, :], mask=whole, other=0
        ).to(tl.int32)
        # The even group is the low nibble. Bits above a nibble stay: each use masks them.
        nibble = tl.join(byte, byte >> 4).reshape(ROWS, GROUPS)
        # As wide as the weights, although all rows read the same values: loads of one shape share a
        # layout, so that threads exchange nothing.
        four = tl.load(x_ptr + row[:, None] * 0 + group[None, :], mask=inside, other=0)
        # Column i of a group is bits 16·i to 16·i + 15. `(nibble & 12) << 2` is 16·i₁.
        first = (four >> ((nibble & 3) << 4).to(tl.int64)).to(tl.int32)
        second = (four >> ((nibble & 12) << 2).to(tl.int64)).to(tl.int32)
        partial += _widen(two, BF16) * _widen(first, BF16)
        partial += _widen(two >> 16, BF16) * _widen(second, BF16)
    # Each group has a sum of its own until here: threads exchange data once, not in every step.
    y = tl.sum(partial, 1)
    if BIAS:
        y += tl.load(bias_ptr + row, mask=row < out_features, other=0).to(tl.float32)
    tl.store(y_ptr + row, y.to(y_ptr.dtype.element_ty), mask=row < out_features)


@triton.jit
def _columns(two, nibble):  # type: ignore[no-untyped-def]
    """Return the four columns of a group as one int64: each kept value at its column."""
    first = (two & 0xFFFF).to(tl.int64) << ((nibble & 3) << 4).to(tl.int64)
    second = ((two >> 16) & 0xFFFF).to(tl.int64) << ((nibble & 12) << 2).to(tl.int64)
    return first | second


@triton.jit
def _column(even, odd, NUMBER: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return column NUMBER of two adjacent groups, joined along a new last axis."""
    return tl.join(
        (even >> (16 * NUMBER)).to(tl.int16),
        (odd >> (16 * NUMBER)).to(tl.int16),
    )


@triton.jit
def _operand(bits, BF16: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return int16 bits as the floating-point operand of `tl.dot`."""
    if WIDE:  # the interpreter has no bfloat16 products
        value = _widen(bits.to(tl.int32), BF16)
    elif BF16:
        value = bits.to(tl.bfloat16, bitcast=True)
    else:
        value = bits.to(tl.float16, bitcast=True)
    return value


@triton.jit(do_not_specialize=["tokens"])  # one compilation for any number of tokens
def gemm_program(  # type: ignore[no-untyped-def]
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
    """Multiply TOKENS tokens by ROWS rows, the columns in SPLIT parts, PAIRS bytes a step."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    token = (tl.program_id(1) * TOKENS + tl.arange(0, TOKENS))[None, :]
    # Two groups are one byte of meta and one word of values: tiles of one shape, so that decoding
    # exchanges nothing between threads. They make a batch of products, one a warp.
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
        # The axes that the joins add are (group, column // 2, column % 2): flattened, they are in
        # the order of the columns.
        weight = tl.join(
            tl.join(_column(even, odd, 0), _column(even, odd, 2)),
            tl.join(_column(even, odd, 1), _column(even, odd, 3)),
        )
        weight = weight.reshape(y.shape[:-1] + (8 * PAIRS,))  # noqa: RUF005  (Triton cannot unpack)
        column = 8 * start + x_column
        # Both operands are 0 past the last column, so that the last step may be partial.
        inside = (x_token < tokens) & (column < COLUMNS)
        x = tl.load(x_ptr + x_token * COLUMNS + column, mask=inside, other=0)
        y = tl.dot(_operand(weight, BF16, WIDE), _operand(x, BF16, WIDE), y)
    y = tl.sum(y, 0)
    if BIAS:
        y += tl.load(bias_ptr + row, mask=row < out_features, other=0).to(tl.float32)
    tl.store(
        y_ptr + token * out_features + row,
        y.to(y_ptr.dtype.element_ty),
        mask=(token < tokens) & (row < out_features),
    )


@triton.jit
def unpack_program(  # type: ignore[no-untyped-def]
    values_ptr,
    meta_ptr,
    y_ptr,
    out_features,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Write ROWS rows of GROUPS groups as dense values."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    group = (tl.program_id(1) * GROUPS + tl.arange(0, GROUPS))[None, :]
    inside = (row < out_features) & (group < COLUMNS // 4)
    two = tl.load(values_ptr + row * (COLUMNS // 4) + group, mask=inside, other=0)
    byte = tl.load(meta_ptr + row * (COLUMNS // 8) + group // 2, mask=inside, other=0).to(tl.int32)
    weight = _columns(two, byte >> (group % 2 * 4))
    tl.store(y_ptr + row * (COLUMNS // 4) + group, weight, mask=inside)


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
