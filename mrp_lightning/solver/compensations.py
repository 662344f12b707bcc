"""Compensations: how the kept weights make up for the removed ones.

`ColumnSweep` is SparseGPT's; `ExactCompensation` finds the optimum of all kept weights (the paper's
Algorithm 1) by conjugate gradients on `MaskedRows`.
"""

import math
import warnings
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from mrp_ground.arguments import is_number
from mrp_lightning.errors import HessianError, NumericalWarning, OptionError
from mrp_lightning.solver.arithmetic import (
    by_rows,
    has_bfloat16_units,
    split_range,
    warn_of_slow_float64,
)
from mrp_lightning.solver.conjugate_gradients import (
    ConjugateGradients,
    InverseOnKept,
    Product,
    full_product,
    rounded_product,
)
from mrp_lightning.solver.masked_rows import MaskedRows, relative
from mrp_lightning.solver.masks import Chooser, Mask
from mrp_lightning.solver.patterns import SemiStructured
from mrp_lightning.solver.problem import Problem

_PANEL = 128
"""Columns of a panel, whose removals a column sweep applies to all later columns at once."""
_GAP_BETWEEN_BLOCKS = 1e-2
"""The distance to the optimum, relative to a row's loss, that suffices to choose the next weights.
SM then loses at most 1.005 times as much as with exact optima between the blocks."""
_LIMIT_BETWEEN_BLOCKS = 20
"""The most iterations between two blocks."""
_RENEWAL, _BRIEF = 4, 2
"""Number of column blocks from one thorough approach to the next, and the most iterations of those
in between, if the matrix allows rounded products."""
_ELEMENTS_ON_CPU = 2**22
"""The most elements of a float64 tensor in the last solve on a CPU."""
_ROOTS = 1024
"""Number of columns for which a triangular system is solved at once: a GPU takes as long for one
block of columns as for eight."""


@dataclass(frozen=True)
class Compensated:
    """The result of a compensation."""

    weight: Tensor  # (rows, columns); removed weights may have any value
    pruned: Tensor  # bool (rows, columns), True = removed
    iterations: int | None = None  # of an iterative solution
    gap: float | None = None  # certified relative distance to the optimum, where that is sought

    def cast(self, dtype: torch.dtype) -> Tensor:
        """Return the weight in a dtype, with zeros where weights are removed."""
        # Not a product with the mask, in which −1 · 0 is −0, and Inf · 0 is NaN.
        return self.weight.masked_fill(self.pruned, 0).to(dtype).contiguous()


class Compensation(Protocol):
    """A method by which the kept weights make up for the removed ones."""

    name: ClassVar[str]  # in MASK+COMPENSATION
    needs_inverse: ClassVar[bool]  # whether it uses (H + λI)⁻¹

    def apply(self, problem: Problem, mask: Mask) -> Compensated:
        """Remove the weights that the mask chooses, and compensate."""


@dataclass(frozen=True)
class NoCompensation:
    """Leave the kept weights unchanged; the mask sees the dense weights, block by block."""

    name: ClassVar[str] = "none"
    needs_inverse: ClassVar[bool] = False

    def apply(self, problem: Problem, mask: Mask) -> Compensated:
        """Choose the mask from the dense weight, and leave the kept weights as they are."""
        weight = problem.weight
        choose = mask.bind(problem, lambda width: problem.damped.inverse_blocks(width))
        blocks = split_range(0, weight.shape[1], problem.block_size)
        return Compensated(weight, torch.cat([choose(weight[:, a:b], a) for a, b in blocks], dim=1))


@dataclass(frozen=True)
class ColumnSweep:
    """Solution 𝔖: remove column after column, each time moving only the columns still to come.

    This is SparseGPT (Frantar and Alistarh, 2023): removing w_j from a row moves its later weights
    by −w_j·U_j,: / U_jj with UᵀU = (H + λI)⁻¹. The kept weights of a column are frozen once the
    sweep has passed it, which is why the result is not the optimum. N:M groups are chosen from the
    swept weights when the sweep reaches them, unstructured masks once a block.
    """

    name: ClassVar[str] = "S"
    needs_inverse: ClassVar[bool] = True

    def apply(self, problem: Problem, mask: Mask) -> Compensated:
        """Choose and compensate in one pass over the columns."""
        weight, pattern, damped = problem.weight, problem.pattern, problem.damped
        # Columns before j are frozen at j, so that a choice needs the inverse of H's trailing part.
        # It is VᵀV with V the trailing part of U, which is triangular: one U serves every j.
        choose = mask.bind(problem, damped.trailing_inverse_blocks)
        columns = weight.shape[1]
        if mask.by_block and isinstance(pattern, SemiStructured):
            width = pattern.group
        else:
            width = problem.block_size

        # Transposed, so that a column of the weight is contiguous; always a copy.
        swept = weight.T.clone(memory_format=torch.contiguous_format)
        pruned = torch.zeros_like(swept, dtype=torch.bool)
        moves = damped.factor / damped.factor.diagonal()[:, None]
        removed = torch.empty_like(swept[:_PANEL])
        for start, stop in _panels(columns, width):
            for j in range(start, stop):
                # A choice sees the effect of all removals before its columns, as in SparseGPT.
                if j % width == 0:
                    pruned[j : j + width] = choose(swept[j : j + width].T, j).T
                # `removed` is zero in rows that keep column j: one rank-one update serves all rows.
                # Column j becomes zero at the end only, since no later step of the sweep reads it.
                torch.mul(swept[j], pruned[j], out=removed[j - start])
                swept[j + 1 : stop].addr_(moves[j, j + 1 : stop], removed[j - start], alpha=-1)
            # The columns beyond the panel get all of its removals at once: one product of matrices
            # in place of a rank-one update a column.
            swept[stop:].addmm_(moves[start:stop, stop:].T, removed[: stop - start], alpha=-1)
            problem.progress(f"columns {stop}/{columns}")
        return Compensated(swept.masked_fill_(pruned, 0).T, pruned.T)


def _panels(columns: int, width: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of at most 128 columns that split no choice of `width` columns if it fits."""
    # A choice reads columns to which all earlier removals have been applied. Within a panel they
    # are, column by column; a wider choice starts together with a panel, when all columns are.
    if width <= _PANEL:
        yield from split_range(0, columns, width * (_PANEL // width))
    else:
        for start, stop in split_range(0, columns, width):
            yield from split_range(start, stop, _PANEL)


@dataclass(frozen=True)
class ExactCompensation:
    """Solution 𝔐: set all kept weights to the optimum for everything that is removed.

    Block by block the mask sees the weights re-optimised for all blocks before it. Re-optimising
    after each block equals optimising once for the whole removed set, so only the last solve is
    done to `tolerance`, the certified relative distance to the optimal loss at which the iteration
    stops; those between blocks are as accurate as the choice of weights needs.
    """

    name: ClassVar[str] = "M"
    needs_inverse: ClassVar[bool] = True

    tolerance: float | None = None

    def __post_init__(self) -> None:
        value = self.tolerance
        if value is not None and (not is_number(value) or value <= 0):
            raise OptionError(f"`tolerance` must be a finite number > 0; got {value!r}.")

    def apply(self, problem: Problem, mask: Mask) -> Compensated:
        """Run Algorithm 1, and then solve for its whole removed set."""
        weight, iterations = problem.weight, 0
        choose = mask.bind(problem, lambda width: problem.damped.inverse_blocks(width))
        if problem.block_size == weight.shape[1]:
            # One block: the mask sees the dense weight, and there is nothing to approach.
            pruned = choose(weight, 0)
            x = weight.masked_fill(pruned, 0)
        else:
            x, pruned, iterations = _block_by_block(problem, choose)
        dtype = weight.dtype
        tolerance = self.tolerance or (1e-4 if problem.result_dtype.itemsize == 2 else 1e-6)
        # Float32 iterations need not come near the optimum of an ill-conditioned matrix.
        if not problem.damped.float32_suffices:
            problem = replace(problem, weight=weight.double())
        x = x.to(problem.weight.dtype)
        steps, gap = _solve(problem, x, pruned, tolerance, dtype, iterations)
        return Compensated(x.to(dtype), pruned, steps, gap)


def _block_by_block(problem: Problem, choose: Chooser) -> tuple[Tensor, Tensor, int]:
    """Choose the removed weights block by block, as Algorithm 1 does.

    After the blocks up to column b all columns beyond are kept and can be eliminated: with
    G = [(H⁻¹)_bb]⁻¹ (a Schur complement) the problem is one in the first b columns alone, and
    the optimum of the others follows from the gradient g = (w − x)G there as w − g (H⁻¹)_b:.

    Returns a start for the last solve, the removed weights, bool, and the number of iterations.
    """
    weight, damped = problem.weight, problem.damped
    columns, iterations, solved = weight.shape[1], 0, 0
    inverse, places = damped.inverse, damped.delicate.tolist()
    pruned = torch.zeros_like(weight, dtype=torch.bool)
    x, gradient = torch.zeros_like(weight), torch.zeros_like(weight)
    schur = torch.zeros_like(inverse)  # G
    # Each approach starts from the one before it, so that a thorough one makes up for brief
    # ones. The first few are small, and show early whether rounded products lead to the
    # optimum.
    renewal = _RENEWAL if damped.bfloat16_helps else 1
    blocks = split_range(0, columns, problem.block_size)
    for number, (start, stop) in enumerate(blocks, 1):
        block, lead = slice(start, stop), slice(0, stop)
        # The optimum of this block's columns for everything removed so far, see above.
        current = weight[:, block] - gradient[:, :start] @ inverse[:start, block]
        pruned[:, block] = choose(current, start)
        removed = current * pruned[:, block]
        # Before its removals the block is at its optimum: its part of the gradient is zero,
        # and the larger G leaves that of earlier columns as it is. Only removals add to it.
        # The start of the next solve: this block's optimum with its removals set to zero,
        # and the gradient of that change, (removed)·G.
        x[:, block] = current - removed
        # With UᵀU = H⁻¹ and R = U⁻¹, G = R_bb R_bbᵀ: a block more adds its columns of R_bb.
        # U is triangular, so R_bb is the inverse of U_bb: no block needs the whole of R.
        if stop > solved:
            solved = min(max(stop, start + _ROOTS), columns)
            roots = _last_columns_of_inverse(damped.factor[:solved, :solved], solved - start)
        # The rows below `stop` are zero, as R is triangular.
        root, roots = roots[:stop, : stop - start], roots[:, stop - start :]
        schur[lead, lead].addmm_(root, root.T)
        gradient[:, lead].addmm_(removed, schur[block, lead])
        # After the last block no choice is left, and `_solve` goes on from this x alone: it
        # never sees the rounding that the gradient has gathered.
        if stop < columns:
            weights = weight[:, lead], x[:, lead], gradient[:, lead], pruned[:, lead]
            matrices = schur[lead, lead], inverse[lead, lead]
            delicate = damped.delicate[: bisect_left(places, stop)]
            thorough = number <= renewal or number % renewal == 0
            iterations += _approach(*weights, matrices, delicate, thorough=thorough)
            problem.progress(f"columns {stop}/{columns}")
    return x, pruned, iterations


def _approach(
    weight: Tensor,
    x: Tensor,
    gradient: Tensor,
    pruned: Tensor,
    matrices: tuple[Tensor, Tensor],
    delicate: Tensor,
    *,
    thorough: bool,
) -> int:
    """Bring x near the optimum, as near as the choice of the next block's weights needs.

    The problem is that in the columns up to b alone: `weight`, `pruned`, x and its gradient
    (w − x)G are (rows, b), of which the last two change in place; the matrices are G and G⁻¹,
    (b, b); products with the columns `delicate` are not rounded.

    Returns the number of iterations. As each block's solution is only a start for the next one,
    1. the energies of the preconditioned gradient stop the iteration, without a certificate;
    2. products are rounded to bfloat16 on devices with units for it;
    3. with rounded products, an approach that is not `thorough` takes at most two steps, and its
       gradient is the sum of these; a thorough one renews the gradient as (w − x)G, which costs as
       much as two rounded products on a CPU, and twelve on a GPU;
    4. rounded steps may lead away from the optimum if the matrix is ill-conditioned: if the loss is
       no lower, it starts again in full.
    """
    rounds = weight.dtype == torch.float32 and has_bfloat16_units(weight.device)
    matrix, inverse = matrices
    products = full = full_product(matrix), full_product(inverse)
    if rounds:
        products = rounded_product(matrix, delicate), rounded_product(inverse, delicate)
    limit = _LIMIT_BETWEEN_BLOCKS if thorough or not rounds else _BRIEF

    def approach(some: slice) -> int:
        system = _Rows(weight[some], x[some], gradient[some], pruned[some])
        try:
            steps = system.descend(*products, limit)
            if rounds:
                if thorough:
                    system.renew(matrix)
                # `not … <` also starts again from NaN.
                if steps and not float(system.losses().sum()) < float(system.first_losses.sum()):
                    system.reset()
                    system.renew(matrix)  # the start's may be a sum of rounded steps
                    steps += system.descend(*full, limit)
        except (MemoryError, RuntimeError):  # `by_rows` tries again with fewer rows
            system.reset()
            raise
        return steps

    return max(by_rows(approach, *weight.shape), default=0)


class _Rows:
    """Some rows of the problem of `_approach`, with the state that they started from."""

    def __init__(self, weight: Tensor, x: Tensor, gradient: Tensor, pruned: Tensor) -> None:
        self.weight, self.x, self.gradient = weight, x, gradient
        self.kept = (~pruned).to(weight.dtype)
        self.start = x.clone(), gradient.clone()
        # Neither the losses nor the energies contain the factor ½: their ratio is the gap.
        self.first_losses = self.losses()

    def losses(self) -> Tensor:
        """Return (w − x)G(w − x)ᵀ of each row, by the present gradient: (rows,)."""
        return ((self.weight - self.x) * self.gradient).sum(1)

    def descend(self, times_matrix: Product, times_inverse: Product, limit: int) -> int:
        """Take at most `limit` steps towards the optimum; return their number."""
        precondition = InverseOnKept(times_inverse, self.kept)
        descent = ConjugateGradients(self.x, self.gradient, times_matrix, precondition)
        descent.descend_rows(_GAP_BETWEEN_BLOCKS * self.first_losses, limit)
        return descent.iterations

    def renew(self, matrix: Tensor) -> None:
        """Compute the gradient anew: steps with rounded products only add to it."""
        torch.mm(self.weight - self.x, matrix, out=self.gradient)

    def reset(self) -> None:
        """Undo all steps."""
        self.x.copy_(self.start[0])
        self.gradient.copy_(self.start[1])


def _solve(
    problem: Problem, x: Tensor, pruned: Tensor, tolerance: float, dtype: torch.dtype, earlier: int
) -> tuple[int, float]:
    """Bring x to the optimum in place; return the iterations and the certified relative gap.

    The gap is that of x rounded to `dtype`, over the rows of all processes. The iterations are
    `earlier` ones and those of the chunk of rows that took the most, in any process. A gap above
    `tolerance` gives a `NumericalWarning`, one that is NaN or Inf a `HessianError`.
    """
    damped, label = problem.damped, problem.inputs.label

    def solve(rows: slice) -> tuple[int, float, float]:
        system = MaskedRows(problem.weight[rows], x[rows], pruned[rows], damped)
        steps = system.solve(tolerance, problem.progress)
        # `not … <=`: a gap of NaN is a failure of float32 as well.
        if damped.dtype != torch.float64 and not system.gap <= tolerance:
            # float32 has stalled; its result is a good start for float64.
            warn_of_slow_float64(x.device)
            system = system.refined()
            # Half of the tolerance is left for the rounding of x to `dtype`.
            steps += system.solve(tolerance / 2, problem.progress)
        if system.x.dtype != dtype:
            system.x.copy_(system.x.to(dtype))
            system.certify()
        x[rows] = system.x.to(x.dtype)
        return steps, system.bound, system.loss

    # A CPU is as fast with some hundreds of rows, and in float64 all rows would need much memory.
    few = x.dtype == torch.float64 and x.device.type == "cpu"
    chunks = by_rows(solve, len(x), x.shape[1], _ELEMENTS_ON_CPU if few else None)
    iterations = earlier + max((steps for steps, _, _ in chunks), default=0)
    # Bounds and losses of rows add up, relative gaps do not.
    bound, loss = sum(bound for _, bound, _ in chunks), sum(loss for _, _, loss in chunks)
    totals = problem.processes.numbers(iterations, bound, loss)
    gap = relative(sum(bound for _, bound, _ in totals), sum(loss for _, _, loss in totals))
    # All processes see this total, so that they raise together and none waits for the others.
    if not math.isfinite(gap):
        raise HessianError(
            f"{label}: the optimum came out as NaN or Inf. The weight and its Hessian are of sizes "
            "that do not go together in floating point; scale them, or use more damping."
        )
    if gap > tolerance:
        warnings.warn(
            f"{label}: stopped at a certified gap to the optimum of {gap:.1e}, above `tolerance` "
            f"{tolerance:g}: {dtype} weights allow no better. More damping helps where the Hessian "
            "is ill-conditioned.",
            NumericalWarning,
            stacklevel=2,
        )
    return int(max(steps for steps, _, _ in totals)), gap


def _last_columns_of_inverse(factor: Tensor, width: int) -> Tensor:
    """Return the last `width` columns of U⁻¹ for upper triangular U (n, n): (n, width)."""
    identity = torch.zeros(factor.shape[0], width, dtype=factor.dtype, device=factor.device)
    identity[-width:].fill_diagonal_(1)
    return torch.linalg.solve_triangular(factor, identity, upper=True)
