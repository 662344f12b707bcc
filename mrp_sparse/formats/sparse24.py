"""The packed 2:4 format: two values and one nibble for every four weights of a row.

`mrp_sparse/FORMAT.md` describes it byte by byte. Nothing here knows files, layers or devices.
"""

import torch
from torch import Tensor

from mrp_ground.arguments import checked
from mrp_ground.errors import FormatError, PatternError
from mrp_sparse.formats.packed_format import PackedFormat, why_no_matrix

GROUP = 4
"""Consecutive input columns that share a nibble; at most half of them are not zero."""
_COLUMNS_MULTIPLE = 2 * GROUP
"""The number of columns is a multiple of this, since a byte of `meta` holds two groups."""


def _slots(bits: int) -> tuple[int, int]:
    """Return the two stored columns of a group whose non-zero columns are the set bits."""
    columns = range(GROUP)
    # The sort is stable: columns that are not zero, then the others, both ascending. The two are
    # then ordered, so that a nibble with first ≥ second shows damage.
    nonzero_first = sorted(columns, key=lambda column: not bits >> column & 1)
    first, second = sorted(nonzero_first[:2])
    return first, second


_SLOTS = [_slots(bits) for bits in range(2**GROUP)]
_NIBBLES = [first | second << 2 for first, second in _SLOTS]


def broken_groups(weight: Tensor) -> int:
    """Count the groups of four columns, the last maybe narrower, with more than two non-zeros."""
    padded = torch.nn.functional.pad(weight != 0, (0, -weight.shape[1] % GROUP))
    return int((padded.unflatten(1, (-1, GROUP)).sum(dim=2) > 2).sum())


def positive_zeros(weight: Tensor) -> tuple[Tensor, int]:
    """Return the weight with −0.0 replaced by +0.0, all other bits equal, and the number of −0.0.

    Negative zeros come from products of a weight with a bool; the format cannot store the sign of a
    removed weight.
    """
    negative = (weight == 0) & weight.signbit()
    return torch.where(negative, torch.zeros_like(weight), weight), int(negative.sum())


def why_not_packable(shape: tuple[int, ...]) -> str | None:
    """Return the reason why a weight of this shape has no packed form, or `None`."""
    if reason := why_no_matrix(shape):
        return reason
    if not shape[1] or shape[1] % _COLUMNS_MULTIPLE:
        return f"in_features {shape[1]} is not a multiple of {_COLUMNS_MULTIPLE}"
    return None


@checked
def pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Pack a 2:4 weight: two values of every four, and their columns.

    A group with fewer than two non-zeros keeps zeros from its lowest free columns, so that every
    group has exactly two values. −0.0 is kept as +0.0.

    Args:
        weight: A weight (rows, columns) of a floating dtype; columns: a positive multiple of 8.

    Returns:
        The kept values (rows, columns / 2) in the weight's dtype, and meta, the columns that they
        were in, uint8 (rows, columns / 8).

    Raises:
        PatternError: The shape does not fit, or a group has more than two non-zeros.
    """
    if reason := why_not_packable(weight.shape):
        raise PatternError(f"This weight cannot be packed: {reason}.")
    if broken := broken_groups(weight):
        raise PatternError(
            f"This weight is not 2:4: {broken} of {weight.numel() // GROUP} groups of four columns "
            "have more than two non-zeros."
        )
    # Only groups with fewer than two non-zeros store a zero: −0.0 would survive there alone.
    groups = positive_zeros(weight)[0].unflatten(1, (-1, GROUP))
    nonzero = groups != 0
    bits = sum(nonzero[..., column].to(torch.int32) << column for column in range(GROUP))
    assert isinstance(bits, Tensor)
    # `bits` is below 16: two small tables replace sorting each group.
    slots = torch.tensor(_SLOTS, device=weight.device)[bits]
    nibbles = torch.tensor(_NIBBLES, dtype=torch.uint8, device=weight.device)[bits]
    values = groups.gather(2, slots).flatten(1)
    return values, nibbles[:, 0::2] | nibbles[:, 1::2] << 4


@checked
def unpack(values: Tensor, meta: Tensor) -> Tensor:
    """Return the 2:4 weight (rows, columns) that `pack` packed, bit by bit, but −0.0 as +0.0.

    Args:
        values: The two kept values of every four columns, (rows, columns / 2), of any floating
            dtype, which the result has.
        meta: Their columns in each four, as `pack` gives them, uint8 (rows, columns / 8): four bits
            a group, the low ones first, two for either column from 0 to 3.

    Raises:
        FormatError: The tensors cannot be the result of packing.
    """
    shapes = f"values {tuple(values.shape)} and meta {tuple(meta.shape)}, {meta.dtype}"
    fits = values.ndim == meta.ndim == 2 and (meta.shape[0], 4 * meta.shape[1]) == values.shape
    if not fits or meta.dtype != torch.uint8:
        raise FormatError(
            "`unpack` needs the two tensors that `pack` gave: values (rows, columns / 2), and meta "
            f"(rows, columns / 8), uint8. Got {shapes}."
        )
    if damage := _damage(meta):
        raise FormatError(f"`meta` is damaged: {damage}. Pack the weight again.")
    return spread(values, meta)


def spread(values: Tensor, meta: Tensor) -> Tensor:
    """Return `unpack(values, meta)` without checking the tensors."""
    nibbles = torch.stack((meta & 15, meta >> 4), dim=-1).flatten(1)
    slots = torch.stack((nibbles & 3, nibbles >> 2), dim=-1).long()
    rows, groups = nibbles.shape
    weight = values.new_zeros(rows, groups, GROUP)
    # The two columns of a valid nibble differ, so that no value overwrites another.
    return weight.scatter_(2, slots, values.view(rows, groups, 2)).flatten(1)


def _damage(meta: Tensor) -> str | None:
    if meta.dtype != torch.uint8:
        return f"expected uint8, got {meta.dtype}"
    # `pack` writes two columns, first < second, into each nibble.
    nibbles = torch.stack((meta & 15, meta >> 4))
    count = int(((nibbles & 3) >= (nibbles >> 2)).sum())
    return f"{count} of {2 * meta.numel()} nibbles are of no 2:4 weight" if count else None


def _empty(shape: tuple[int, int], count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    del count
    rows, columns = shape
    meta = torch.empty(rows, columns // _COLUMNS_MULTIPLE, dtype=torch.uint8)
    return torch.empty(rows, columns // 2, dtype=dtype), meta


# The shape of the values determines everything: `unpack` needs no columns, and layers no count.
SPARSE24 = PackedFormat(
    option="packed",
    name="sparse24",
    version=1,
    companions=("weight_meta",),
    pack=pack,
    unpack=lambda values, meta, _: spread(values, meta),
    empty=_empty,
    damage=lambda _, meta, __: _damage(meta),
    why_not=why_not_packable,
    operator="linear24",
)
