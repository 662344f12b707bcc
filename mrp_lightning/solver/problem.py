"""What masks and compensations are given: one layer to prune."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mrp_lightning.processes import Processes
from mrp_lightning.solver.damping import DampedHessian
from mrp_lightning.solver.input_hessian import InputHessian
from mrp_lightning.solver.patterns import Pattern, Unstructured


@dataclass(frozen=True, eq=False)
class Problem:
    """One layer to prune, or the rows of it that are this process's share.

    Sought is the x that minimises ½·tr((x − w)(H + λI)(x − w)ᵀ) with the removed weights zero.

    Attributes:
        weight: The dense weight w, (rows, columns), float32 or float64: the dtype to compute in.
        inputs: The Hessian H of the layer's inputs.
        pattern: How many weights go, and where.
        block_size: Number of columns that are chosen together, from 1 to all.
        damping: Fraction of the mean diagonal of H that is added to the diagonal, ≥ 0.
        tell: Called with where the solution is, in words, while it takes long.
        processes: The processes that share the rows of the layer.
        rows: The number of rows of the whole layer.
    """

    weight: Tensor
    inputs: InputHessian
    pattern: Pattern
    block_size: int
    damping: float
    tell: Callable[[str], None]
    processes: Processes
    rows: int

    @property
    def damped(self) -> DampedHessian:
        """H + λI in the dtype of the weight, factorised when a layer first needs it."""
        damped = self.inputs.damped(self.damping)
        return damped.double if self.weight.dtype == torch.float64 else damped

    def inverse_blocks(self, width: int) -> Tensor:
        """Diagonal blocks of (H + λI)⁻¹: (columns / width, width, width)."""
        return self.damped.inverse_blocks(width)

    def select(self, scores: Tensor, start: int) -> Tensor:
        """Mark the lowest scores of a block of columns, as the pattern says.

        Unstructured patterns rank the rows of all processes together.

        Args:
            scores: What each weight is worth, (rows, width), for columns `start` to
                `start + width`.
            start: The first column of the block.

        Returns:
            bool (rows, width), True = removed.
        """
        if isinstance(self.pattern, Unstructured):
            everywhere = self.processes.gather_rows(scores, self.rows)
            return self.pattern.select(everywhere, start)[self.processes.share(self.rows)]
        return self.pattern.select(scores, start)

    def total(self, mine: float) -> float:
        """The sum of what each process found for its rows."""
        return math.fsum(found for (found,) in self.processes.numbers(mine))
