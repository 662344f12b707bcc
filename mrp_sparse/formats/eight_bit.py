"""The format of an 8-bit head: each row is integers from −127 to 127 times a scale.

`mrp_sparse/FORMAT.md` describes it byte by byte. Nothing here knows files, layers or devices.
"""

import torch
from torch import Tensor

from mrp_sparse.formats.packed_format import PackedFormat

LARGEST = 127
COLUMNS = 16
"""The number of columns is a multiple of this: otherwise torch's product reads past a row's end."""
VERSION = 1
"""The version of the format."""


def why_not_rounded(columns: int) -> str | None:
    """Return why a weight of `columns` columns cannot be stored in 8 bits, `None` if it can."""
    if columns % COLUMNS:
        return f"a head of 8 bits needs columns in a multiple of {COLUMNS}, got {columns}"
    return None


def pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row to integers, with the scale that makes its largest weight 127.

    Args:
        weight: (rows, columns), floating point, finite.

    Returns:
        The numbers, int8 (rows, columns), and the scales (rows,) in the weight's dtype; 1 for a row
        of zeros.
    """
    peaks = weight.abs().amax(1, keepdim=True).float()
    scales = torch.where(peaks > 0, peaks / LARGEST, 1.0).to(weight.dtype)
    # A scale below half of the smallest denormal d rounds to 0. The weights of its row are n·d with
    # |n| ≤ 63: the scale d represents them exactly.
    smallest = torch.finfo(weight.dtype).smallest_normal * torch.finfo(weight.dtype).eps
    scales = torch.where(scales > 0, scales, smallest)
    # The scales are rounded before the division, since `unpack` multiplies by the rounded ones. One
    # that was rounded down gives quotients above 127, which the clamp bounds.
    codes = (weight.float() / scales.float()).round_().clamp_(-LARGEST, LARGEST)
    return codes.to(torch.int8), scales.flatten()


def unpack(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the weight (..., columns), code·scale, in the dtype of the scales (...)."""
    # Integers to 127 are exact in bfloat16, of 8 significant bits: only the product is rounded.
    return codes.to(scales.dtype) * scales[..., None]


def damage(codes: Tensor, scales: Tensor) -> str | None:
    """Return why these tensors cannot be the result of `pack`, `None` if they can."""
    if codes.dtype != torch.int8 or not scales.is_floating_point():
        return f"expected int8 and floating-point scales, got {codes.dtype} and {scales.dtype}"
    if len(scales) != len(codes):
        return f"there are {len(scales)} scales for {len(codes)} rows"
    # int8 has −128, too, which `pack` never writes.
    if count := int((codes < -LARGEST).sum()):
        return f"{count} numbers are below {-LARGEST}"
    if count := int((~((scales * LARGEST).isfinite() & (scales > 0))).sum()):
        return f"{count} scales are not positive and finite, or make weights that are not"
    return None


def _empty(shape: tuple[int, int], count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    del count
    return torch.empty(shape, dtype=torch.int8), torch.empty(shape[0], dtype=dtype)


EIGHT_BIT = PackedFormat(
    option="head",
    name="head",
    version=VERSION,
    companions=("weight_scales",),
    pack=pack,
    unpack=lambda codes, scales, _: unpack(codes, scales),
    empty=_empty,
    damage=lambda codes, scales, _: damage(codes, scales),
    why_not=lambda shape: why_not_rounded(shape[1]),
    operator="linear8",
)
"""The stored form of a head, with the functions of a packed format."""
