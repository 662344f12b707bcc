"""Triton kernels for bitmasks of 16 and of 4 bits, which read the packed tensors as stored on disk.

A row's bits are read as words of 32 columns, one lane of a warp for each column: the number of bits
set below its own is the rank of a kept weight among those of the word, and where the word's values
begin is a running sum of such counts. So that few rows still make enough work, a row's words are
cut into parts, which are walked side by side: the bits are counted once before, for the beginning
of each part. Grids and loops depend on shapes alone, so that no call waits for the device, and a
CUDA graph records each. Nothing outside the tensors is read, whatever the bits say. Importing this
module needs Triton.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from mrp_sparse.kernels.triton_kernels import _on, _readable, _result, _words, interpreting
from mrp_sparse.kernels.triton_programs import _operand, _widen

GROUP = 64
"""Columns that share a scale: two words. Parts are of whole groups."""
_MOST = tl.constexpr(2**30)


class Sizes(NamedTuple):
    """The sizes of a program, all powers of two.

    Attributes:
        rows: Rows of a program; at least 16 for several tokens.
        parts: Parts of a row, of each of which a step decodes one word. For one token a warp takes
            some parts of all its program's rows, which share the input's registers.
        warps: Warps of a program.
        unroll: Steps whose loads are issued together, so that a warp waits for memory less often.
        tokens: Tokens of a program; 1, or at least 16.
    """

    rows: int
    parts: int
    warps: int
    unroll: int = 1
    tokens: int = 1


ONE_TOKEN = Sizes(rows=4, parts=8, warps=4, unroll=2)
SOME_TOKENS = Sizes(rows=16, parts=8, warps=8, tokens=16)
MORE_TOKENS = Sizes(rows=16, parts=4, warps=4, tokens=64)
UNPACK = Sizes(rows=4, parts=4, warps=4, unroll=4)


@triton.jit
def _count(word, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the number of bits set in each int32."""
    if WIDE:  # the interpreter has no such instruction: sums of 2, 4 and 8 bits side by side
        pairs = word - ((word >> 1) & 0x55555555)
        fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
        count = (((fours + (fours >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24
    else:
        count = libdevice.popc(word)
    return count


@triton.jit
def _bits(bits_ptr, row, word, inside, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return words of rows; 0, hence no kept columns, where `inside` is false."""
    return tl.load(bits_ptr + row * WORDS + word, mask=inside, other=0)


@triton.jit
def _starts(  # type: ignore[no-untyped-def]
    bits_ptr,
    row,
    part,
    AXIS: tl.constexpr,
    WORDS: tl.constexpr,
    EACH: tl.constexpr,
    CODED: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Return the number of values, or codes, of a row before each of its parts."""
    kept = row * 0 + part * 0
    # As wide as a word, so that starts come in the layout of the weights that they lead to.
    for start in range(0, EACH // 2, 32):
        group = (start + tl.arange(0, 32))[None, None, :]
        word = part[:, :, None] * EACH + 2 * group
        inside = (row[:, :, None] >= 0) & (group < EACH // 2) & (word < WORDS)
        first = _bits(bits_ptr, row[:, :, None], word, inside, WORDS)
        second = _bits(bits_ptr, row[:, :, None], word + 1, inside, WORDS)
        count = _count(first, WIDE) + _count(second, WIDE)
        if CODED:  # groups begin at whole bytes, which hold two codes
            count += count & 1
        kept += tl.sum(count, 2)
    return tl.cumsum(kept, AXIS) - kept


@triton.jit
def _rows(values_ptr, offsets_ptr, row, size, CODED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the address of each row's first value, and the number of values from there on."""
    offset = tl.load(offsets_ptr + row)
    # Damaged bits may count more values than there are: this number bounds every read. One row
    # has fewer than 2³⁰ values, so that 32 bits count them.
    room = tl.where(offset < 0, 0, tl.maximum(tl.minimum(size - offset, _MOST), 0)).to(tl.int32)
    if CODED:
        room = tl.minimum(room, _MOST // 2) * 2
    return values_ptr + offset, room


@triton.jit
def _shifted(byte, shift, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return int32 shifted to the right."""
    if WIDE:
        shifted = byte >> shift
    else:  # of a byte the compiler would shift 16 bits, and spend four instructions on bounds
        shifted = tl.inline_asm_elementwise(
            "shr.u32 $0, $1, $2;", "=r,r,r", [byte, shift], tl.int32, is_pure=True, pack=1
        )
    return shifted


@triton.jit
def _decoded(  # type: ignore[no-untyped-def]
    row_ptr,
    room,
    word,
    position,
    scales_ptr,
    CODED: tl.constexpr,
    BF16: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Return the 32 weights of each word, as 16 bits or, of codes, in float32."""
    bit = (1 << tl.arange(0, 32))[None, None, :]
    # `bit - 1` are the bits below: the weights that are kept before.
    at = position[:, :, None] + _count(word[:, :, None] & (bit - 1), WIDE)
    inside = ((word[:, :, None] & bit) != 0) & (at < room[:, :, None])
    if CODED:
        byte = tl.load(row_ptr[:, :, None] + (at >> 1), mask=inside, other=0).to(tl.int32)
        code = _shifted(byte, (at & 1) << 2, WIDE) & 15
        # 0 … 7 are −8 … −1, and 8 … 15 are 1 … 8: ⌊9 · code / 8⌋ − 8. A float32 between 2²³ and 2²⁴
        # is an integer in its lower bits: conversions take four times as long as sums.
        number = (((code * 9) >> 3) | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0
        scale = _widen(tl.load(scales_ptr).to(tl.int32), BF16)
        weight = tl.where(inside, number * scale[:, :, None], 0.0)
    else:
        weight = tl.load(row_ptr[:, :, None] + at, mask=inside, other=0)
    return weight


@triton.jit
def _advanced(position, word, number, CODED: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return where the values of the next words begin, after word `number` of each part."""
    position += _count(word, WIDE)
    if CODED:  # a group ends after an odd word, and the next one begins at a whole byte
        position += position & number & 1
    return position


@triton.jit
def _walked(  # type: ignore[no-untyped-def]
    bits_ptr,
    scales_ptr,
    row_ptr,
    room,
    row,
    part,
    number,
    position,
    WORDS: tl.constexpr,
    EACH: tl.constexpr,
    CODED: tl.constexpr,
    BF16: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Return the weights of word `number` of each part, its first column, and the next position."""
    at = part * EACH + number
    word = _bits(bits_ptr, row, at, at < WORDS, WORDS)
    if CODED:
        scales_ptr += row * (WORDS // 2) + tl.minimum(at, WORDS - 1) // 2
    weight = _decoded(row_ptr, room, word, position, scales_ptr, CODED, BF16, WIDE)
    return weight, at[:, :, None] * 32, _advanced(position, word, number, CODED, WIDE)


@triton.jit
def _lanes(WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return 0 to 31, which the compiler cannot see: a lane for each column.

    Of columns in order it would give each thread eight, for one wide access, and then exchange the
    decoded weights, whose addresses have no order, between all threads.
    """
    return _count((1 << tl.arange(0, 32)) - 1, WIDE)


@triton.jit(do_not_specialize=["size"])
def one_token_program(  # type: ignore[no-untyped-def]
    x_ptr,
    values_ptr,
    bits_ptr,
    scales_ptr,
    offsets_ptr,
    bias_ptr,
    y_ptr,
    out_features,
    size,
    COLUMNS: tl.constexpr,
    WORDS: tl.constexpr,
    EACH: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    UNROLL: tl.constexpr,
    CODED: tl.constexpr,
    BF16: tl.constexpr,
    BIAS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Multiply one token by ROWS rows."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # Rows past the end read the last row again, so that loads need no mask; the store drops them.
    row = tl.minimum(rows, out_features - 1)[:, None]
    part = tl.arange(0, PARTS)[None, :]
    start = _starts(bits_ptr, row, part, 1, WORDS, EACH, CODED, WIDE)
    base, room = _rows(values_ptr, offsets_ptr, row, size, CODED)
    partial = tl.zeros([ROWS, PARTS, 32], tl.float32)
    for step in tl.range(0, EACH, loop_unroll_factor=UNROLL):
        weight, first, start = _walked(
            bits_ptr, scales_ptr, base, room, row, part, step, start, WORDS, EACH, CODED, BF16, WIDE
        )
        if not CODED:
            weight = _widen(weight.to(tl.int32), BF16)
        # An address past the row may hold NaN, and 0 · NaN is NaN.
        column = first + _lanes(WIDE)[None, None, :]
        x = tl.load(x_ptr + column, mask=column < COLUMNS, other=0).to(tl.int32)
        partial += weight * _widen(x, BF16)
    # Each lane has sums of its own until here: threads exchange data once, not in every step.
    y = tl.sum(tl.sum(partial, 2), 1)
    if BIAS:
        y += tl.load(bias_ptr + tl.minimum(rows, out_features - 1)).to(tl.float32)
    tl.store(y_ptr + rows, y.to(y_ptr.dtype.element_ty), mask=rows < out_features)


@triton.jit(do_not_specialize=["tokens", "size"])  # one compilation for any number of both
def some_tokens_program(  # type: ignore[no-untyped-def]
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
    WORDS: tl.constexpr,
    EACH: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    UNROLL: tl.constexpr,
    TOKENS: tl.constexpr,
    CODED: tl.constexpr,
    BF16: tl.constexpr,
    BIAS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Multiply TOKENS tokens by ROWS rows: a batch of products, one for each part of a row."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    row = tl.minimum(rows, out_features - 1)[None, :]
    part = tl.arange(0, PARTS)[:, None]
    start = _starts(bits_ptr, row, part, 0, WORDS, EACH, CODED, WIDE)
    base, room = _rows(values_ptr, offsets_ptr, row, size, CODED)
    y = tl.zeros([PARTS, ROWS, TOKENS], tl.float32)
    for step in tl.range(0, EACH, loop_unroll_factor=UNROLL):
        weight, first, start = _walked(
            bits_ptr, scales_ptr, base, room, row, part, step, start, WORDS, EACH, CODED, BF16, WIDE
        )
        if not CODED:
            weight = _operand(weight, BF16, WIDE)
        elif not WIDE:
            weight = weight.to(tl.bfloat16 if BF16 else tl.float16)
        column = first + tl.arange(0, 32)[None, :, None]
        inside = (token < tokens)[None, None, :] & (column < COLUMNS)
        x = tl.load(x_ptr + token[None, None, :] * COLUMNS + column, mask=inside, other=0)
        y = tl.dot(weight, _operand(x, BF16, WIDE), y)
    total = tl.sum(y, 0)
    if BIAS:
        total += tl.load(bias_ptr + tl.minimum(rows, out_features - 1)).to(tl.float32)[:, None]
    tl.store(
        y_ptr + token[None, :] * out_features + rows[:, None],
        total.to(y_ptr.dtype.element_ty),
        mask=(token < tokens)[None, :] & (rows < out_features)[:, None],
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
    WORDS: tl.constexpr,
    EACH: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    UNROLL: tl.constexpr,
    CODED: tl.constexpr,
    BF16: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Write ROWS rows as dense values."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    row = tl.minimum(rows, out_features - 1)
    part = tl.arange(0, PARTS)[None, :]
    start = _starts(bits_ptr, row, part, 1, WORDS, EACH, CODED, WIDE)
    base, room = _rows(values_ptr, offsets_ptr, row, size, CODED)
    # rows · columns of a large weight passes 2³¹.
    y_row_ptr = y_ptr + row.to(tl.int64) * COLUMNS
    for step in tl.range(0, EACH, loop_unroll_factor=UNROLL):
        weight, first, start = _walked(
            bits_ptr, scales_ptr, base, room, row, part, step, start, WORDS, EACH, CODED, BF16, WIDE
        )
        column = first + _lanes(WIDE)[None, None, :]
        # Rows past the end write the last row once more: its very values.
        tl.store(
            y_row_ptr[:, :, None] + column,
            weight.to(y_ptr.dtype.element_ty),
            mask=column < COLUMNS,
        )


def product(
    x: Tensor,
    values: Tensor,
    bits: Tensor,
    scales: Tensor | None,
    offsets: Tensor,
    bias: Tensor | None,
    sizes: Sizes | None = None,
) -> Tensor:
    """Multiply a few tokens, Y = X Wᵀ + b with x (tokens, columns); sums are in float32.

    Args:
        x: Input of dtype float16 or bfloat16, like the values or the scales.
        values: Kept values, or codes of them, two in a byte, if there are scales.
        bits: Their columns, uint8 (rows, ceil(columns / 8)).
        scales: Scales (rows, ceil(columns / 64)) of codes, or `None`.
        offsets: The index of each row's first value or byte, int64 (rows,).
        bias: Added to each output, (rows,), or `None`.
        sizes: The sizes of a program; by default those chosen for this number of tokens.
    """
    tokens, columns = x.shape
    rows = bits.shape[0]
    if sizes is None:
        sizes = ONE_TOKEN if tokens == 1 else SOME_TOKENS if tokens <= 16 else MORE_TOKENS
    y = _result(tokens, rows, x)
    operands = (x.contiguous().view(torch.int16), *_operands(values, bits, scales, offsets))
    outputs = (_readable(bias), y)
    options = _options(x.dtype, columns, scales, sizes) | {"BIAS": bias is not None}
    row_programs = triton.cdiv(rows, sizes.rows)
    with _on(x):
        if sizes.tokens == 1:
            one_token_program[(row_programs,)](*operands, *outputs, rows, values.numel(), **options)
        else:
            grid = (row_programs, triton.cdiv(tokens, sizes.tokens))
            some_tokens_program[grid](
                *operands, *outputs, tokens, rows, values.numel(), TOKENS=sizes.tokens, **options
            )
    return y.to(x.dtype)


def unpack(
    values: Tensor,
    bits: Tensor,
    scales: Tensor | None,
    offsets: Tensor,
    columns: int,
    sizes: Sizes = UNPACK,
) -> Tensor:
    """Return the dense weight (rows, columns), in one pass over memory; see `product`."""
    dtype = values.dtype if scales is None else scales.dtype
    rows = bits.shape[0]
    # Values of 16 bits are copied as integers; codes become numbers, which the interpreter has in
    # float32 alone.
    written = torch.int16 if scales is None else _result(0, 0, scales).dtype
    y = torch.empty(rows, columns, dtype=written, device=bits.device)
    with _on(bits):
        unpack_program[(triton.cdiv(rows, sizes.rows),)](
            *_operands(values, bits, scales, offsets),
            y,
            rows,
            values.numel(),
            **_options(dtype, columns, scales, sizes),
        )
    return y.view(dtype) if scales is None else y.to(dtype)


def _operands(values: Tensor, bits: Tensor, scales: Tensor | None, offsets: Tensor) -> list[Any]:
    """Return the tensors as integers: the interpreter cannot read bfloat16."""
    # Few models have columns that are no multiple of a group: their bits are padded in each call.
    odd = -bits.shape[1] % (GROUP // 8)
    words = _words(F.pad(bits, (0, odd)) if odd else bits, torch.int32)
    if scales is None:
        return [values.contiguous().view(torch.int16), words, None, offsets]
    return [values.contiguous(), words, scales.contiguous().view(torch.int16), offsets]


def _options(
    dtype: torch.dtype, columns: int, scales: Tensor | None, sizes: Sizes
) -> dict[str, Any]:
    groups = triton.cdiv(columns, GROUP)
    return {
        "COLUMNS": columns,
        "WORDS": 2 * groups,
        "EACH": 2 * triton.cdiv(groups, sizes.parts),
        "ROWS": sizes.rows,
        "PARTS": sizes.parts,
        "UNROLL": sizes.unroll,
        "CODED": scales is not None,
        "BF16": dtype == torch.bfloat16,
        "WIDE": interpreting(),
        "num_warps": sizes.warps,
    }
