"""Rows and columns of a packed weight, cut out without unpacking it.

A worker of a tensor-parallel group holds some rows or some columns of a weight. Rows may be cut
anywhere. Columns may be cut where a byte of their places begins, and in four bits where a group
begins, since its scale and its first nibble do.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mrp_sparse.formats.bitmask import BITMASK, BYTE, bytes_of, count_bits
from mrp_sparse.formats.bitmask4 import BITMASK4, GROUP, bytes_of_groups, groups_of_bits, num_groups
from mrp_sparse.formats.packed_format import PackedFormat


def rows(form: PackedFormat, tensors: Sequence[Tensor], begin: int, end: int) -> list[Tensor]:
    """Return the packed tensors, in the order of the format, of rows `begin` to `end` as views."""
    values, *others = tensors
    first, last = begin, end
    if form.row_offsets is not None:
        offsets = form.row_offsets(others[0])
        # `row_offsets` has no entry for the end of the last row.
        first, last = (int(offsets[r]) if r < len(offsets) else len(values) for r in (begin, end))
    return [values[first:last], *(other[begin:end] for other in others)]


def unit(form: PackedFormat) -> int:
    """Return the number of columns of which both ends of a slice are multiples."""
    return GROUP if form is BITMASK4 else BYTE


def columns(form: PackedFormat, tensors: Sequence[Tensor], begin: int, end: int) -> list[Tensor]:
    """Return the packed tensors, in the order of the format, of columns `begin` to `end`.

    Both are multiples of `unit(form)`, or `end` is the number of columns.
    """
    values, places, *_ = tensors
    first, last = begin // BYTE, bytes_of(end)
    if form is BITMASK4:
        # The nibbles of a group are whole bytes, so that the mask has one element for each byte.
        groups = slice(begin // GROUP, num_groups(end))
        lengths = bytes_of_groups(count_bits(groups_of_bits(places)).view(len(places), -1))
        inside = torch.zeros_like(lengths, dtype=torch.bool)
        inside[:, groups] = True
        chosen = inside.flatten().repeat_interleave(lengths.flatten())
        return [values[chosen], places[:, first:last], tensors[2][:, groups]]
    if form is BITMASK:
        # Runs of values alternate: those before the slice in a row, in it, and after it.
        parts = (places[:, :first], places[:, first:last], places[:, last:])
        runs = torch.stack([count_bits(part) for part in parts], dim=1)
        inside = torch.tensor([False, True, False], device=runs.device).expand_as(runs)
        chosen = inside.flatten().repeat_interleave(runs.flatten())
        return [values[chosen], places[:, first:last]]
    # 2:4 keeps two values of every four columns in each row: a cut of both is a plain slice.
    return [values[:, begin // 2 : end // 2], places[:, first:last]]
