"""What masks and compensations are given: one layer to prune."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mrp_lightning.solver.damping import DampedHessian
from mrp_lightning.solver.input_hessian import InputHessian
from mrp_lightning.solver.patterns import Pattern


@dataclass(frozen=True, eq=False)
class Problem:
    """One layer to prune.

    Sought is the x that minimises ½·tr((x − w)(H + λI)(x − w)ᵀ) with the removed weights zero.

    Attributes:
        weight: The dense weight w, (rows, columns), float32 or float64: the dtype to compute in.
        inputs: The Hessian H of the layer's inputs.
        pattern: How many weights go, and where.
        block_size: Number of columns that are chosen together, from 1 to all.
        damping: Fraction of the mean diagonal of H that is added to the diagonal, ≥ 0.
        tell: Called with where the solution is, in words, while it takes long.
    """

    weight: Tensor
    inputs: InputHessian
    pattern: Pattern
    block_size: int
    damping: float
    tell: Callable[[str], None] = lambda _: None

    @property
    def damped(self) -> DampedHessian:
        """H + λI in the dtype of the weight, factorised when a layer first needs it."""
        damped = self.inputs.damped(self.damping)
        return damped.double if self.weight.dtype == torch.float64 else damped

    def inverse_blocks(self, width: int) -> Tensor:
        """Diagonal blocks of (H + λI)⁻¹: (columns / width, width, width)."""
        return self.damped.inverse_blocks(width)
