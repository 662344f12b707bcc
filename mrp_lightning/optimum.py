"""Solution 𝔐 of the compensation: the exact optimum of all kept weights, for all rows at once.

For a row w with removed set P and kept set U the optimum solves H_UU x_U = (H w)_U, H damped
(equivalent to paper Eq. optimal_w). Conjugate gradients on this masked system, preconditioned with
(H⁻¹)_UU, cost two (rows × columns)·(columns × columns) products an iteration.

The same preconditioner gives a certificate. Since (H_UU)⁻¹ ≼ (H⁻¹)_UU, the loss of x exceeds the
optimal one by at most ½ r (H⁻¹)_UU rᵀ with the residual r = (w − x)H on U.
"""

import warnings
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mrp_lightning.compensation import Compensated, column_ranges
from mrp_lightning.damping import DampedHessian
from mrp_lightning.errors import NumericalWarning
from mrp_lightning.masks import Mask
from mrp_lightning.patterns import Pattern

_LIMIT = 500
_BETWEEN_BLOCKS = 1e-3


@dataclass(frozen=True)
class Optimum:
    """Set all kept weights to the optimum for everything that is removed (paper Algorithm 1).

    Block by block the mask sees the weights re-optimised for all blocks before it. Re-optimising
    after each block equals optimising once for the whole removed set, so only the last solve is
    done to `tolerance`; those between blocks are as accurate as the choice of weights needs.
    """

    name: ClassVar[str] = "M"

    def apply(
        self,
        weight: Tensor,
        prepared: DampedHessian,
        mask: Mask,
        pattern: Pattern,
        block_size: int,
        tolerance: float,
    ) -> Compensated:
        """Choose and compensate for weight (rows, columns)."""
        choose = mask.chooser(weight, prepared, prepared.inverse_blocks, pattern)
        columns = weight.shape[1]
        width = columns if mask.whole_layer else block_size
        x, pruned = torch.zeros_like(weight), torch.zeros_like(weight, dtype=torch.bool)
        gradient = torch.zeros_like(weight)
        iterations = 0
        reduced = torch.zeros_like(prepared.matrix) if width < columns else prepared.matrix
        for start, stop in column_ranges(0, columns, width):
            block, lead = slice(start, stop), slice(0, stop)
            current = weight[:, block]
            if start:
                current = current - gradient[:, :start] @ prepared.inverse[:start, block]
            pruned[:, block] = choose(current, start)
            removed = current * pruned[:, block]
            x[:, block] = current - removed
            if width < columns:
                root = _root_columns(prepared.factor[lead, lead], stop - start)
                reduced[lead, lead].addmm_(root, root.T)
            gradient[:, lead].addmm_(removed, reduced[block, lead])
            if stop < columns:
                iterations += _descend(
                    weight[:, lead],
                    x[:, lead],
                    gradient[:, lead],
                    ~pruned[:, lead],
                    reduced[lead, lead],
                    prepared.inverse[lead, lead],
                    _BETWEEN_BLOCKS,
                    20,
                )
        del reduced, gradient
        x, last, gap = optimum(weight, pruned, prepared, x, tolerance)
        return Compensated(x, pruned, iterations + last, gap)


def optimum(weight, pruned, prepared, start, tolerance):
    kept = ~pruned
    x = start.clone()
    best, iterations = None, 0
    for p in (prepared, prepared.double):
        w, x = weight.to(p.dtype), x.to(p.dtype)
        previous = None
        while True:
            out = x.to(weight.dtype)
            gradient = (w - out.to(p.dtype)) @ p.matrix
            loss = float(((w - x) * gradient).sum()) / 2
            r = gradient * kept
            bound = float(((r @ p.inverse) * r).sum()) / 2
            gap = bound / max(loss, torch.finfo(p.dtype).tiny) if bound > 0 else 0.0
            if best is None or gap < best[1]:
                best = (out, gap)
            if (
                gap <= tolerance
                or iterations >= _LIMIT
                or (previous is not None and gap > previous / 4)
            ):
                break
            previous = gap
            iterations += _descend(w, x, gradient, kept, p.matrix, p.inverse, tolerance / 2, _LIMIT)
        if best[1] <= tolerance:
            break
    out, gap = best
    if gap > tolerance:
        warnings.warn(
            f"{prepared.label}: the certified gap to the optimum is {gap:.1e}, above the "
            f"tolerance {tolerance:g}.",
            NumericalWarning,
            stacklevel=2,
        )
    return out, iterations, gap


def _root_columns(factor: Tensor, width: int) -> Tensor:
    """The last `width` columns of U⁻¹ for upper triangular U (n, n): (n, width)."""
    identity = torch.zeros(factor.shape[0], width, dtype=factor.dtype, device=factor.device)
    identity[-width:].fill_diagonal_(1)
    return torch.linalg.solve_triangular(factor, identity, upper=True)


def _descend(weight, x, gradient, kept, matrix, inverse, tolerance, limit) -> int:
    tiny = torch.finfo(x.dtype).tiny
    r = gradient * kept
    z = (r @ inverse).mul_(kept)
    rz = (r * z).sum(1, keepdim=True)
    direction = z.clone()
    loss = ((weight - x) * gradient).sum(1, keepdim=True) / 2
    for step in range(limit):
        if float(rz.sum()) / 2 <= tolerance * float(loss.sum()):
            return step
        q = direction @ matrix
        alpha = rz / (direction * q).sum(1, keepdim=True).clamp_min(tiny)
        x.addcmul_(direction, alpha)
        gradient.addcmul_(q, alpha, value=-1)
        loss -= alpha * rz / 2
        r = gradient * kept
        z = (r @ inverse).mul_(kept)
        new = (r * z).sum(1, keepdim=True)
        direction.mul_(new / rz.clamp_min(tiny)).add_(z)
        rz = new
    return limit
