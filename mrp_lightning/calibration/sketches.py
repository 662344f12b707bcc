"""Sketches of large tensors: random projections, which tell them apart without keeping them."""

from dataclasses import dataclass

import torch
from torch import Tensor

DIRECTIONS = 32
"""The number of directions that rows are projected onto. A distance is then known to 12% of it
(1/√(2·DIRECTIONS)) where two tensors differ alike in all columns, and better elsewhere."""

_ROWS = 2048  # projected at a time


@dataclass(frozen=True, eq=False)
class Sketch:
    """The random projection of a tensor."""

    shape: torch.Size  # that of the tensor
    projection: Tensor
    """P·X of the rows X (rows, columns) of the tensor, float64 (DIRECTIONS, columns) on the CPU,
    with entries ±1/√DIRECTIONS of P that are drawn at random, but alike for all tensors."""


def sketch(tensor: Tensor) -> Sketch:
    """Project the rows of a tensor onto a few random directions.

    The mean of ‖P·A − P·B‖² over P is ‖A − B‖², wherever the two differ. NaN counts as 0 and an
    infinity as ±1e30, so that tensors that have them in the same places can be compared.
    """
    rows = torch.atleast_2d(tensor.detach()).flatten(0, -2)
    # A forward may run in half precision, by autocast or by default.
    exact = {"device": rows.device, "dtype": torch.float32}
    generator = torch.Generator().manual_seed(0)
    projection = torch.zeros(DIRECTIONS, rows.shape[1], **exact)
    with torch.autocast(rows.device.type, enabled=False):
        for chunk in rows.split(_ROWS):
            signs = torch.randint(2, (DIRECTIONS, len(chunk)), generator=generator, device="cpu")
            finite = chunk.float().nan_to_num(0.0, 1e30, -1e30)
            projection += signs.mul_(2).sub_(1).to(**exact) @ finite
    return Sketch(tensor.shape, projection.cpu().double() / DIRECTIONS**0.5)


def relative_error(output: Sketch, expected: Sketch, given: Sketch) -> float:
    """‖output − expected‖ relative to ‖expected − given‖, the block's own update.

    Relative to the output itself, a walk that leaves a block's work out would look right: most of
    the output is the residual stream.
    """
    if output.shape != expected.shape:
        return float("inf")
    same = given.shape == expected.shape
    update = expected.projection - given.projection if same else expected.projection
    scale = float(update.norm()) or float(expected.projection.norm()) or 1.0
    return float((output.projection - expected.projection).norm()) / scale
