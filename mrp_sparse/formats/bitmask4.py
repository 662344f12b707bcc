"""The four-bit bitmask format: one bit for each weight, a nibble for each non-zero one, and scales.

`mrp_sparse/FORMAT.md` describes it byte by byte. Nothing here knows files, layers or devices.
"""

import torch
from torch import Tensor

from mrp_ground.errors import FormatError, PatternError
from mrp_sparse.formats.bitmask import bytes_of, count_bits, pack_places, unused_bits
from mrp_sparse.formats.packed_format import PackedFormat, why_no_matrix

GROUP = 64
"""Columns of a group, which share a scale, and whose nibbles begin at a byte."""
_LARGEST = 8
"""Codes are −8 to 8 without zero, which is not stored: nibble n is n − 8, or n − 7 from 8 on."""
_SIGNIFICANT = 5
"""Significant bits of a scale: with at most three of a code, products have eight, as bfloat16."""
_SMALLEST, _GREATEST = 2.0**-100, 2.0**100
"""The range of the scales."""
_WEIGHTS_AT_A_TIME = 2**20


def num_groups(columns: int) -> int:
    """Return the number of scales of a row."""
    return -(-columns // GROUP)


def count_bytes(weight: Tensor) -> int:
    """Return the number of bytes of a weight's nibbles."""
    return sum(
        int(bytes_of_groups((rows != 0).sum(2)).sum()) for rows in map(_grouped, _some_rows(weight))
    )


def pack(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pack a weight: a code of four bits for each non-zero value.

    Args:
        weight: A weight (rows, columns) of a floating dtype, on the grid of four bits: each is
            a whole number from −8 to 8 times the scale of its row and its 64 columns.

    Returns:
        The codes, uint8, two in a byte, group after group in the order of their columns; the bits
        that mark their columns, uint8 (rows, ceil(columns / 8)); and the scales
        (rows, ceil(columns / 64)) in the weight's dtype.

    Raises:
        PatternError: The weight is no matrix.
        FormatError: The weight is not on the grid, or a scale is no number of its dtype, as can be
            among subnormal numbers of float16. The message names the first such row and group.
    """
    if reason := why_no_matrix(weight.shape):
        raise PatternError(f"This weight cannot be packed: {reason}.")
    codes, scales = decompose(weight)
    stored = scales.to(weight.dtype)
    # The grid's products are rounded, and the scale alone may need more bits than they do.
    if bool((rounded := stored != scales).any()):
        row, group = rounded.nonzero()[0].tolist()
        end = min((group + 1) * GROUP, weight.shape[1])
        raise FormatError(
            f"Row {row}, columns {group * GROUP} to {end - 1} (group {group}): expected a scale "
            f"in {weight.dtype}, got {scales[row, group]:.5g}, which would be rounded to "
            f"{stored[row, group]:.5g}. Leave the layer dense."
        )
    nibbles = torch.cat([_pack_rows(rows) for rows in _some_rows(codes)])
    return nibbles, pack_places(codes != 0), stored


def decompose(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of a weight that lies on the grid.

    Each weight is code·scale, rounded to the weight's dtype. Of several possible scales that of the
    smallest codes is taken; a group of zeros has the scale 1.

    Args:
        weight: (rows, columns), floating point.

    Returns:
        The codes −8 to 8, int8 (rows, columns), and the scales, float32 (rows, groups).

    Raises:
        FormatError: Some group of a row has no such scale; the message names the first group.
    """
    parts = [_fit(rows.detach()) for rows in _some_rows(weight)]
    codes, scales, fits = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    if not bool(fits.all()):
        row, group = (~fits).nonzero()[0].tolist()
        end = min((group + 1) * GROUP, weight.shape[1])
        raise FormatError(
            f"Row {row}, columns {group * GROUP} to {end - 1} (group {group}): no scale makes "
            f"these weights codes from {-_LARGEST} to {_LARGEST}, as 4 bits with groups of {GROUP} "
            "need. The weight was changed after it was put on its grid, or is on another one: give "
            "its `bits` and `group_size`, or its `grid`."
        )
    return codes, scales


def _fit(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales and whether these give the weight: int8 (rows, columns), (rows, groups).

    The largest absolute value of a group, divided by a code, leaves one scale for that code.
    """
    values = _grouped(weight.to(torch.promote_types(weight.dtype, torch.float32)))
    peaks = values.abs().amax(2)
    codes, scales = torch.zeros_like(values), torch.ones_like(peaks)
    waiting = peaks != 0  # NaN waits, too, and never fits
    for code in range(1, _LARGEST + 1):
        scale = _round_scales(peaks / code)
        # This test of one number per group leaves few groups to be rounded in full.
        tried = (waiting & ((code * scale).to(weight.dtype) == peaks)).nonzero(as_tuple=True)
        targets, factors = values[tried], scale[tried][:, None]
        chosen = (targets / factors).round_().clamp_(-_LARGEST, _LARGEST)
        fits = ((chosen * factors).to(weight.dtype) == targets).all(1)
        solved = tuple(index[fits] for index in tried)
        codes[solved], scales[solved] = chosen[fits], factors[fits, 0]
        waiting[solved] = False
    return codes.flatten(1)[:, : weight.shape[1]].to(torch.int8), scales.float(), ~waiting


def _round_scales(scales: Tensor) -> Tensor:
    """Return the nearest numbers of `_SIGNIFICANT` bits in the range of scales."""
    clamped = scales.clamp(_SMALLEST, _GREATEST)
    # Mantissas of `frexp` are in [½, 1): the quantum is 2^(exponent − significant bits).
    exponents = torch.frexp(clamped).exponent - _SIGNIFICANT
    quanta = torch.ldexp(torch.ones_like(clamped), exponents).clamp_(min=_SMALLEST)
    return (clamped / quanta).round_().mul_(quanta)


def _grouped(matrix: Tensor) -> Tensor:
    """Return (rows, columns) as (rows, groups, 64), the last group padded with zeros."""
    padded = torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % GROUP))
    return padded.reshape(len(matrix), -1, GROUP)


def _some_rows(weight: Tensor) -> tuple[Tensor, ...]:
    return weight.split(max(1, _WEIGHTS_AT_A_TIME // max(1, weight.shape[1])))


def _pack_rows(codes: Tensor) -> Tensor:
    """Return the bytes of the nibbles of some rows."""
    groups = _grouped(codes).flatten(0, 1)
    kept = groups != 0
    # −8 … −1 become 0 … 7, and 1 … 8 become 8 … 15: the gap at 0 needs no code.
    nibbles = (groups + 8 - (groups > 0).to(torch.int8)).view(torch.uint8)
    # Non-zero codes go to the front of their group, zeros to the extra column behind it.
    places = torch.where(kept, kept.cumsum(1) - 1, GROUP)
    front = nibbles.new_zeros(len(groups), GROUP + 1).scatter_(1, places, nibbles)
    pairs = front[:, 0:GROUP:2] | front[:, 1:GROUP:2] << 4
    # An odd group ends with an unused high nibble, so that each group begins at a byte and can be
    # read, or cut, without those before it.
    return pairs[_first(bytes_of_groups(kept.sum(1)), GROUP // 2)]


def unpack(nibbles: Tensor, bits: Tensor, scales: Tensor, columns: int) -> Tensor:
    """Return the weight (rows, columns) in the scales' dtype, bit by bit, but −0.0 as +0.0.

    The host reads no value and copies nothing to the device, so that a CUDA graph can capture it.
    """
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    rows, groups = bits.shape[0], num_groups(columns)
    kept = (groups_of_bits(bits)[:, :, None] >> shifts & 1).bool().view(rows, groups, GROUP)
    if not nibbles.numel():
        return scales.new_zeros(rows, columns)
    # The n-th stored code of a group is nibble n % 2 of its byte n // 2.
    # Indices of int32 take half the memory of torch's default, and reach 2³¹ − 1 bytes.
    number = kept.cumsum(2, dtype=torch.int32) - 1
    lengths = bytes_of_groups(number[:, :, -1] + 1).flatten()
    starts = lengths.cumsum(0, dtype=torch.int32) - lengths
    # Before the first kept weight of a group `number` is −1, and empty groups at the end start past
    # the last byte: the clamp makes these indices valid, and `where` drops their values.
    byte = (starts.view(rows, groups, 1) + (number >> 1)).clamp(0, nibbles.numel() - 1)
    pairs = nibbles.index_select(0, byte.flatten()).view(kept.shape)
    nibble = pairs >> (number & 1).to(torch.uint8) * 4 & 15
    codes = nibble.to(torch.int8) - 8 + (nibble > 7).to(torch.int8)
    values = codes.to(scales.dtype) * scales[:, :, None]
    weight = torch.where(kept, values, torch.zeros_like(values))
    return weight.view(rows, groups * GROUP)[:, :columns].contiguous()


def round_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round activations to 8 bits, with a scale for each token and group of columns.

    A scale s is a 127th of the group's largest magnitude, and at least the smallest normal number.
    The numbers are x / s, rounded half to even.

    Args:
        x: (tokens, columns), floating point.

    Returns:
        The numbers from −127 to 127, int8 (tokens, groups, 64), the last group padded with zeros;
        and the scales, float32 (tokens, groups), Inf or NaN where an activation is.
    """
    groups = _grouped(x.float())
    scales = (groups.abs().amax(2) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    return (groups / scales[:, :, None]).round_().to(torch.int8), scales


def multiply_rounded(x: Tensor, nibbles: Tensor, bits: Tensor, scales: Tensor) -> Tensor:
    """Return x̂ Wᵀ, float32 (tokens, rows), for the activations x̂ that `round_tokens` returns.

    With codes c and scales s of rows r, and numbers n and scales z of tokens t, this is
    Σ_g s[r, g]·z[t, g]·Σ_i c[r, g, i]·n[t, g, i], where the inner sums are exact.
    """
    numbers, factors = round_tokens(x)
    # Of scales 1 the weights are the codes. Inner sums are at most 64·8·127 < 2²⁴, so that float32
    # holds each as an integer.
    codes = _grouped(unpack(nibbles, bits, torch.ones_like(scales), x.shape[1]).float())
    total = torch.zeros(len(x), len(codes), device=x.device)
    for group in range(codes.shape[1]):
        sums = numbers[:, group].float() @ codes[:, group].T
        total += sums * (factors[:, group, None] * scales[:, group].float())
    return total


def row_offsets(bits: Tensor) -> Tensor:
    """Return the index of the first byte of each row in the nibbles, int64 (rows,)."""
    lengths = _lengths(bits)
    return lengths.cumsum(0) - lengths


def damage(nibbles: Tensor, bits: Tensor, scales: Tensor, columns: int) -> str | None:
    """Return why these tensors cannot be the result of `pack`, `None` if they can."""
    if nibbles.dtype != torch.uint8 or bits.dtype != torch.uint8:
        return f"expected uint8, got {nibbles.dtype} for the codes and {bits.dtype} for the bits"
    if not scales.is_floating_point():
        return f"the scales are {scales.dtype}, no floating dtype"
    needed = int(_lengths(bits).sum())
    if needed != nibbles.numel():
        return f"the weights marked as kept take {needed} bytes, and there are {nibbles.numel()}"
    if unused_bits(bits, columns):
        return f"bits are set beyond its {columns} columns"
    # No code is larger than 8: if −8·scale is finite, so is each weight of the group.
    if count := int((~(scales * -_LARGEST).isfinite()).sum()):
        return f"{count} scales are not finite, or make weights that are not"
    return None


def _lengths(bits: Tensor) -> Tensor:
    """Return the bytes of the nibbles of each row, int64 (rows,)."""
    lengths = bytes_of_groups(count_bits(groups_of_bits(bits)))
    return lengths.view(len(bits), -1).sum(dim=1)


def bytes_of_groups(counts: Tensor) -> Tensor:
    """Return the bytes of the nibbles of groups with `counts` kept weights."""
    return counts + 1 >> 1


def groups_of_bits(bits: Tensor) -> Tensor:
    """Return the bits (rows, bytes) group after group, uint8 (rows · groups, 8)."""
    return torch.nn.functional.pad(bits, (0, -bits.shape[1] % (GROUP // 8))).view(-1, GROUP // 8)


def _first(counts: Tensor, width: int) -> Tensor:
    """Return bool (..., width), True at the first `counts` (...) positions."""
    return torch.arange(width, device=counts.device) < counts[..., None]


def _empty(shape: tuple[int, int], count: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    rows, columns = shape
    bits = torch.empty(rows, bytes_of(columns), dtype=torch.uint8)
    scales = torch.empty(rows, num_groups(columns), dtype=dtype)
    return torch.empty(count, dtype=torch.uint8), bits, scales


BITMASK4 = PackedFormat(
    option="bitmask4",
    name="bitmask4",
    version=1,
    companions=("weight_bits", "weight_scales"),
    pack=pack,
    unpack=unpack,
    empty=_empty,
    damage=damage,
    why_not=why_no_matrix,
    operator="linear_bitmask4",
    row_offsets=row_offsets,
    activations=("int8",),
)
