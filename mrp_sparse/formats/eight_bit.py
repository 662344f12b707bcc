"""A head of 8 bits: each row is whole numbers from −127 to 127 times its scale.

`mrp_sparse/FORMAT.md` describes it byte by byte. Nothing here knows files, layers or devices.
"""

import torch
from torch import Tensor

LARGEST = 127
COLUMNS = 16
"""Divisor of the columns: for others torch's product reads behind the end of a row."""
VERSION = 1
"""Version of the format that is written and read."""


def why_not_rounded(columns: int) -> str | None:
    """Return the reason why a weight of `columns` has no form of 8 bits, or `None`."""
    if columns % COLUMNS:
        return f"a head of 8 bits needs columns in a multiple of {COLUMNS}, got {columns}"
    return None


def pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row to whole numbers, with the scale that makes its largest weight 127.

    Args:
        weight: (rows, columns), floating point, finite.

    Returns:
        The numbers, int8 (rows, columns), and the scales (rows,) in the weight's dtype; 1 for a row
        of zeros.
    """
    peaks = weight.abs().amax(1, keepdim=True).float()
    scales = torch.where(peaks > 0, peaks / LARGEST, 1.0).to(weight.dtype)
    codes = (weight.float() / scales.float()).round_().clamp_(-LARGEST, LARGEST)
    return codes.to(torch.int8), scales.flatten()


def unpack(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the weight (..., columns), code·scale, in the dtype of the scales (...)."""
    return codes.to(scales.dtype) * scales[..., None]


def damage(codes: Tensor, scales: Tensor) -> str | None:
    """Return the reason why these tensors were never packed together, or `None`."""
    if codes.dtype != torch.int8 or not scales.is_floating_point():
        return f"expected int8 and floating-point scales, got {codes.dtype} and {scales.dtype}"
    if len(scales) != len(codes):
        return f"there are {len(scales)} scales for {len(codes)} rows"
    if count := int((codes < -LARGEST).sum()):
        return f"{count} numbers are below {-LARGEST}"
    if count := int((~((scales * LARGEST).isfinite() & (scales > 0))).sum()):
        return f"{count} scales are not positive and finite, or make weights that are not"
    return None
