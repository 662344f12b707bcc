"""The bitmask format: one bit for each weight, and the values of the non-zero weights.

`mrp_sparse/FORMAT.md` describes it byte by byte. Nothing here knows files, layers or devices.
"""

import torch
from torch import Tensor

from mrp_ground.errors import PatternError
from mrp_sparse.formats.packed_format import PackedFormat, as_integers, why_no_matrix

BYTE = 8
"""Columns that share a byte of `bits`; the first of them is the lowest bit."""
_WEIGHTS_AT_A_TIME = 2**20


def bytes_of(columns: int) -> int:
    """Return the number of bytes of a row's bits."""
    return -(-columns // BYTE)


def count_kept(weight: Tensor) -> int:
    """Return the number of weights that are not zero."""
    return int(_kept(weight).sum())


def pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Pack a weight: its non-zero values and a bitmask. −0.0 is a zero; NaN is none.

    Args:
        weight: A weight (rows, columns) of a floating dtype.

    Returns:
        The kept values, row after row in the order of their columns, 1-D in the weight's dtype; and
        bits, uint8 (rows, ceil(columns / 8)), 1 at their positions.

    Raises:
        PatternError: The weight is no matrix.
    """
    if reason := why_no_matrix(weight.shape):
        raise PatternError(f"This weight cannot be packed: {reason}.")
    # torch selects by indices of 16 bytes a value: chunks of rows bound that memory.
    some = weight.split(max(1, _WEIGHTS_AT_A_TIME // max(1, weight.shape[1])))
    values, bits = zip(*map(_pack_rows, some), strict=True)
    return torch.cat(values).view(weight.dtype), torch.cat(bits)


def _pack_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values, as integers, and the bits of some rows."""
    kept = _kept(weight)
    # Integers keep every bit of NaN.
    return as_integers(weight)[kept], pack_places(kept)


def pack_places(kept: Tensor) -> Tensor:
    """Return the bits, uint8 (rows, ceil(columns / 8)), of bool `kept` (rows, columns)."""
    octets = torch.nn.functional.pad(kept, (0, -kept.shape[1] % BYTE)).unflatten(1, (-1, BYTE))
    places = torch.tensor([1 << b for b in range(BYTE)], dtype=torch.uint8, device=kept.device)
    return (octets * places).sum(dim=2, dtype=torch.uint8)


def unpack(values: Tensor, bits: Tensor, columns: int) -> Tensor:
    """Return the weight (rows, columns) that was packed, bit by bit, but −0.0 as +0.0."""
    shifts = torch.arange(BYTE, dtype=torch.uint8, device=bits.device)
    # `masked_scatter_` takes the values row after row, the order in which `pack` writes them.
    kept = (bits[:, :, None] >> shifts & 1).flatten(1)[:, :columns].bool()
    integers = as_integers(values)
    weight = integers.new_zeros(kept.shape).masked_scatter_(kept, integers)
    return weight.view(values.dtype)


def row_offsets(bits: Tensor) -> Tensor:
    """Return the index of the first value of each row, int64 (rows,)."""
    # The sum before each row, without its own values: the first row begins at 0.
    counts = count_bits(bits)
    return counts.cumsum(0) - counts


def damage(values: Tensor, bits: Tensor, columns: int) -> str | None:
    """Return why these tensors cannot be the result of `pack`, `None` if they can."""
    if bits.dtype != torch.uint8:
        return f"expected uint8, got {bits.dtype}"
    marked = int(count_bits(bits).sum())
    if marked != values.numel():
        return f"{marked} weights are marked as kept, and there are {values.numel()} values"
    # Equal counts are not enough: `unpack` drops bits past the last column, and all later values
    # would move by one.
    return f"bits are set beyond its {columns} columns" if unused_bits(bits, columns) else None


def unused_bits(bits: Tensor, columns: int) -> bool:
    """Return whether bits are set beyond the last column."""
    unused = columns % BYTE
    return bool(unused) and bool((bits[:, -1] >> unused).any())


def count_bits(bits: Tensor) -> Tensor:
    """Return the number of set bits of each row (rows, bytes), int64 (rows,)."""
    counts = [byte.bit_count() for byte in range(256)]
    set_bits = torch.tensor(counts, dtype=torch.uint8, device=bits.device)
    # Indices of int32 take four bytes for each of `bits`; to index with brackets takes twelve.
    return set_bits.index_select(0, bits.flatten().int()).view_as(bits).sum(dim=1)


def _kept(weight: Tensor) -> Tensor:
    """Return where any bit but the sign is set: NaN and denormals count on every CPU."""
    if weight.dtype.itemsize == 1:
        # Some kinds of float8 have a NaN where −0.0 would be. In float32 none is denormal.
        return weight.float() != 0
    # The largest integer of 16, 32 or 64 bits has all bits but the sign.
    integers = as_integers(weight)
    return integers & torch.iinfo(integers.dtype).max != 0


def _empty(shape: tuple[int, int], count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    bits = torch.empty(shape[0], bytes_of(shape[1]), dtype=torch.uint8)
    return torch.empty(count, dtype=dtype), bits


BITMASK = PackedFormat(
    option="bitmask",
    name="bitmask",
    version=1,
    companions=("weight_bits",),
    pack=pack,
    unpack=unpack,
    empty=_empty,
    damage=damage,
    why_not=why_no_matrix,
    operator="linear_bitmask",
    row_offsets=row_offsets,
)
