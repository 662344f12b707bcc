"""The problem that masks and compensations solve: one layer to prune."""

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
    """

    weight: Tensor  # w, (rows, columns), float32 or float64: the dtype to compute in
    inputs: InputHessian  # the Hessian H of the layer's inputs
    pattern: Pattern
    block_size: int  # number of columns that are chosen together, from 1 to all
    damping: float  # fraction of the mean diagonal of H that is added to the diagonal, ≥ 0
    tell: Callable[[str], None]  # called with where the solution is, in words, while it takes long
    processes: Processes  # those that share the rows of the layer
    rows: int  # the number of rows of the whole layer

    @property
    def damped(self) -> DampedHessian:
        """H + λI in the dtype of the weight, factorised when a layer first needs it."""
        damped = self.inputs.damped(self.damping)
        return damped.double if self.weight.dtype == torch.float64 else damped

    def inverse_blocks(self, width: int) -> Tensor:
        """Diagonal blocks of (H + λI)⁻¹: (columns / width, width, width)."""
        return self.damped.inverse_blocks(width)

    def select(self, scores: Tensor, start: int) -> Tensor:
        """Mark the lowest scores (rows, width) of the columns from `start` on, True = removed.

        Unstructured patterns rank the rows of all processes together.
        """
        if isinstance(self.pattern, Unstructured):
            everywhere = self.processes.gather_rows(scores, self.rows)
            return self.pattern.select(everywhere, start)[self.processes.share(self.rows)]
        return self.pattern.select(scores, start)

    def total(self, mine: float) -> float:
        """The sum of what each process found for its rows."""
        return math.fsum(found for (found,) in self.processes.numbers(mine))
