"""Solution 𝔐 of the compensation: the exact optimum of all kept weights (paper Algorithm 1).

For a row w with removed set P and kept set U the optimum solves H_UU x_U = (H w)_U, H damped
(equivalent to paper Eq. optimal_w).

The result is certified. Since (H_UU)⁻¹ ≼ (H⁻¹)_UU, the loss of x exceeds the optimal one by at most
½ r (H⁻¹)_UU rᵀ with the residual r = (w − x)H on U, both computed afresh from the result.
"""

import math
import warnings
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from mrp_lightning.errors import HessianError, NumericalWarning, OptionError
from mrp_lightning.solver.compensations import Compensated
from mrp_lightning.solver.conjugate_gradients import (
    ConjugateGradients,
    InverseOnKept,
    Product,
    full_product,
    rounded_product,
)
from mrp_lightning.solver.masked_rows import MaskedRows, relative
from mrp_lightning.solver.masks import Chooser, Mask
from mrp_lightning.solver.options import is_number
from mrp_lightning.solver.precision import has_bfloat16_units
from mrp_lightning.solver.problem import Problem
from mrp_lightning.solver.ranges import by_rows, split_range

_GAP_BETWEEN_BLOCKS = 3e-3
"""Relative distance to the optimum that the choice of the next block's weights needs."""
_LIMIT_BETWEEN_BLOCKS = 20
"""Most iterations after one block, before the next one is chosen."""


@dataclass(frozen=True)
class ExactCompensation:
    """Set all kept weights to the optimum for everything that is removed.

    Block by block the mask sees the weights re-optimised for all blocks before it. Re-optimising
    after each block equals optimising once for the whole removed set, so only the last solve is
    done to `tolerance`, the certified relative distance to the optimal loss at which the iteration
    stops; those between blocks are as accurate as the choice of weights needs.
    """

    name: ClassVar[str] = "M"
    needs_inverse: ClassVar[bool] = True

    tolerance: float = 1e-6

    def __post_init__(self) -> None:
        value = self.tolerance
        if not is_number(value) or value <= 0:
            raise OptionError(f"`tolerance` must be a finite number > 0; got {value!r}.")
        object.__setattr__(self, "tolerance", float(value))

    def apply(self, problem: Problem, mask: Mask) -> Compensated:
        """Choose and compensate."""
        given = problem.weight.dtype
        if not problem.damped.float32_suffices:
            problem = replace(problem, weight=problem.weight.double())
        weight = problem.weight
        choose = mask.bind(problem, problem.inverse_blocks)
        if problem.block_size == weight.shape[1]:
            pruned = choose(weight, 0)
            x = weight.masked_fill(pruned, 0)
            gradient = (weight - x) @ problem.damped.matrix
            before = 0
        else:
            pruned, x, gradient, before = _block_by_block(problem, choose)
        iterations, gap = _solve(problem, x, gradient, pruned, self.tolerance, given, before)
        return Compensated(x.to(given), pruned, iterations, gap)


def _block_by_block(problem: Problem, choose: Chooser) -> tuple[Tensor, Tensor, Tensor, int]:
    """Run Algorithm 1 up to its last compensation: removed weights, x, gradient, iterations.

    After the blocks up to column b everything beyond is kept and can be eliminated: with
    G = [(H⁻¹)_bb]⁻¹ (a Schur complement) the problem is one in the first b columns alone, and the
    optimum of the others follows from the gradient g = (w − x)G there as w − g (H⁻¹)_b:. Only the
    next block of them is ever needed.
    """
    weight, damped = problem.weight, problem.damped
    columns = weight.shape[1]
    pruned = torch.zeros_like(weight, dtype=torch.bool)
    x, gradient = torch.zeros_like(weight), torch.zeros_like(weight)
    reduced = torch.zeros_like(damped.matrix)
    inverse = damped.inverse
    iterations = 0
    for start, stop in split_range(0, columns, problem.block_size):
        block, lead = slice(start, stop), slice(0, stop)
        current = weight[:, block] - gradient[:, :start] @ inverse[:start, block]
        pruned[:, block] = choose(current, start)
        removed = current * pruned[:, block]
        x[:, block] = current - removed
        # With UᵀU = H⁻¹ and R = U⁻¹, G = R_bb R_bbᵀ: one more block adds its columns of R_bb.
        root = _last_columns_of_inverse(damped.factor[lead, lead], stop - start)
        reduced[lead, lead].addmm_(root, root.T)
        gradient[:, lead].addmm_(removed, reduced[block, lead])
        if stop == columns:
            break
        iterations += _approach(
            weight[:, lead],
            x[:, lead],
            gradient[:, lead],
            pruned[:, lead],
            reduced[lead, lead],
            inverse[lead, lead],
        )
        problem.tell(f"columns {stop}/{columns}")
    return pruned, x, gradient, iterations


def _approach(
    weight: Tensor, x: Tensor, gradient: Tensor, pruned: Tensor, matrix: Tensor, inverse: Tensor
) -> int:
    """Bring x near the optimum in place, near enough to choose the next block's weights.

    Rounded products are good enough for that where they are fast, unless the matrix is so
    ill-conditioned that they lead away from the optimum.
    """
    rounds = matrix.dtype == torch.float32 and has_bfloat16_units(matrix.device)
    product = rounded_product if rounds else full_product
    times = product(matrix), product(inverse)

    def approach(rows: slice) -> int:
        dense, near, slope = weight[rows], x[rows], gradient[rows]
        kept = (~pruned[rows]).to(weight.dtype)
        start = near.clone(), slope.clone()
        loss = float(((dense - near) * slope).sum())
        target = _GAP_BETWEEN_BLOCKS * loss
        try:
            steps = _descend(near, slope, kept, times, target)
            if rounds and steps:
                torch.mm(dense - near, matrix, out=slope)
                if not float(((dense - near) * slope).sum()) < loss:
                    near.copy_(start[0])
                    slope.copy_(start[1])
                    full = full_product(matrix), full_product(inverse)
                    steps += _descend(near, slope, kept, full, target)
        except (MemoryError, RuntimeError):  # fewer rows will begin where these did
            near.copy_(start[0])
            slope.copy_(start[1])
            raise
        return steps

    return max(by_rows(approach, *weight.shape), default=0)


def _descend(
    x: Tensor, gradient: Tensor, kept: Tensor, products: tuple[Product, Product], target: float
) -> int:
    """Iterate with the products with H and H⁻¹ until the energy is at the target: how often."""
    times_matrix, times_inverse = products
    precondition = InverseOnKept(times_inverse, kept)
    descent = ConjugateGradients(x, gradient, times_matrix, precondition)
    while descent.iterations < _LIMIT_BETWEEN_BLOCKS:
        energies = descent.energies()
        if float(energies.sum()) <= target:
            break
        descent.step(energies)
    return descent.iterations


def _solve(
    problem: Problem,
    x: Tensor,
    gradient: Tensor,
    pruned: Tensor,
    tolerance: float,
    given: torch.dtype,
    before: int,
) -> tuple[int, float]:
    """Bring x to the optimum in place: iterations and the certified relative gap.

    The gap is that of x rounded to the `given` dtype, over the rows of all processes; the
    iterations include those `before`, and are the most that any process took.
    """
    damped, label = problem.damped, problem.inputs.label

    def solve(rows: slice) -> tuple[int, float, float]:
        system = MaskedRows(problem.weight[rows], x[rows], gradient[rows], pruned[rows], damped)
        steps = system.solve(tolerance, problem.tell)
        if damped.dtype != torch.float64 and not system.gap <= tolerance:
            # float32 has stalled; what it reached is a good start for float64.
            system = system.refined()
            steps += system.solve(tolerance / 2, problem.tell)
        if system.x.dtype != given:
            system.x.copy_(system.x.to(given))
            system.certify()
        x[rows] = system.x.to(x.dtype)
        return steps, system.bound, system.loss

    mine = by_rows(solve, *x.shape)
    most = before + max((steps for steps, _, _ in mine), default=0)
    bound, loss = sum(bound for _, bound, _ in mine), sum(loss for _, _, loss in mine)
    found = problem.processes.numbers(most, bound, loss)
    gap = relative(sum(bound for _, bound, _ in found), sum(loss for _, _, loss in found))
    if not math.isfinite(gap):
        raise HessianError(
            f"{label}: the optimum came out as NaN or Inf. The weight and its Hessian are of sizes "
            "that do not go together in floating point; scale them, or use more damping."
        )
    if gap > tolerance:
        warnings.warn(
            f"{label}: stopped at a certified gap to the optimum of {gap:.1e}, above `tolerance` "
            f"{tolerance:g}: {given} weights allow no better. More damping helps where the Hessian "
            "is ill-conditioned.",
            NumericalWarning,
            stacklevel=2,
        )
    return int(max(steps for steps, _, _ in found)), gap


def _last_columns_of_inverse(factor: Tensor, width: int) -> Tensor:
    """The last `width` columns of U⁻¹ for upper triangular U (n, n): (n, width)."""
    identity = torch.zeros(factor.shape[0], width, dtype=factor.dtype, device=factor.device)
    identity[-width:].fill_diagonal_(1)
    return torch.linalg.solve_triangular(factor, identity, upper=True)
