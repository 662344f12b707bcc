"""Masks choose the weights to remove.

Binding a mask to a layer returns a function from the current weights of some columns to the weights
to remove there. The compensation decides when to call it, and with which inverse: that of the whole
Hessian (Algorithm 1) or that of its trailing part (a column sweep).

Dead inputs score −1: their weights contribute nothing to the output and are removed first.
"""

import itertools
import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from mrp_lightning.errors import MethodError
from mrp_lightning.solver.arithmetic import ELEMENTS, has_bfloat16_units, split_range
from mrp_lightning.solver.conjugate_gradients import Product, full_product, rounded_product
from mrp_lightning.solver.hessian import factor_of_inverse, inverse_from
from mrp_lightning.solver.patterns import Dense, Pattern, SemiStructured, Unstructured
from mrp_lightning.solver.problem import Problem

Chooser = Callable[[Tensor, int], Tensor]
"""Called with the current weights (rows, width) of some columns and the first of these columns:
bool (rows, width), True = removed."""

InverseBlocks = Callable[[int], Tensor]
"""Called with a width: the diagonal blocks of the inverse to score with, (columns / width, width,
width)."""

# The costs of a group are M²·combinations numbers: 4:8 has 70 combinations, 5:10 has 252.
_MOST_COMBINATIONS = 100


class Mask(Protocol):
    """The choice of the weights to remove."""

    name: ClassVar[str]  # in MASK+COMPENSATION
    by_block: ClassVar[bool] = False
    """Whether weights are chosen block by block of columns, from the weights as compensated so far;
    otherwise all at once from the dense weights, whatever the block size."""
    needs_inverse: ClassVar[bool] = False  # whether it uses (H + λI)⁻¹

    def check(self, pattern: Pattern) -> None:
        """Raise a MethodError where the mask does not exist for the pattern."""
        del pattern  # most masks exist for all patterns

    @abstractmethod
    def bind(self, problem: Problem, inverse_blocks: InverseBlocks) -> Chooser:
        """Prepare the choice for one layer."""


@dataclass(frozen=True)
class Magnitude(Mask):
    """The smallest |w|, over the whole layer or in each group."""

    name: ClassVar[str] = "magnitude"

    def bind(self, problem: Problem, inverse_blocks: InverseBlocks) -> Chooser:
        """Rank |w|."""
        del inverse_blocks
        return _known(problem.select(_sizes(problem, problem.weight), 0))


@dataclass(frozen=True)
class Wanda(Mask):
    """The smallest |w_ij|·‖x_j‖, in each output row or in each group (Sun et al., 2024)."""

    name: ClassVar[str] = "wanda"

    def bind(self, problem: Problem, inverse_blocks: InverseBlocks) -> Chooser:
        """Rank |w_ij|·√H_jj, which is Wanda's score up to a constant."""
        del inverse_blocks
        # √H_jj = ‖x_j‖·√(2/tokens): the second factor is common to all columns.
        norms = problem.inputs.diagonal.to(problem.weight.dtype).sqrt()
        scores = (problem.weight.abs() * norms).masked_fill_(problem.inputs.dead, -1)
        return _known(problem.pattern.select_in_rows(scores))


@dataclass(frozen=True)
class SingleRemoval(Mask):
    """Solution 𝔖: the smallest loss of removing one weight alone.

    The score is w_ij² / [H⁻¹]_jj (paper Eq. loss_single, without its factor ½).
    """

    name: ClassVar[str] = "S"
    by_block: ClassVar[bool] = True
    needs_inverse: ClassVar[bool] = True

    def bind(self, problem: Problem, inverse_blocks: InverseBlocks) -> Chooser:
        """Rank the single-removal losses of the current weights."""
        # One diagonal serves all rows and blocks. After earlier removals the exact loss would need
        # that of each row's own (H_UU)⁻¹.
        inverse_diagonal, dead = inverse_blocks(1).flatten(), problem.inputs.dead

        def choose(current: Tensor, start: int) -> Tensor:
            columns = slice(start, start + current.shape[1])
            scores = current.square() / inverse_diagonal[columns]
            return problem.select(scores.masked_fill_(dead[columns], -1), start)

        return choose


@dataclass(frozen=True)
class MultipleRemoval(Mask):
    """Solution 𝔐: in each group, the combination of weights whose joint removal costs least.

    The loss of removing p is w_p [(H⁻¹)_pp]⁻¹ w_pᵀ (paper Eq. optimal_loss, without its factor ½),
    tried for all combinations of the group. It exists for N:M patterns only.
    """

    name: ClassVar[str] = "M"
    by_block: ClassVar[bool] = True
    needs_inverse: ClassVar[bool] = True

    def check(self, pattern: Pattern) -> None:
        """Raise a MethodError unless the pattern is N:M with at most 100 combinations a group."""
        if isinstance(pattern, Unstructured):
            raise MethodError(
                "the mask M is not defined for unstructured sparsity: it would have to try all "
                "combinations of all weights (the paper does not either). Use the mask S (for "
                f'example method="SM") with sparsity={pattern.sparsity:g}, or an N:M pattern.'
            )
        if isinstance(pattern, Dense):
            return  # nothing is removed, so the mask is never used
        combinations = math.comb(pattern.group, pattern.removed)
        if combinations > _MOST_COMBINATIONS:
            raise MethodError(
                f"the mask M tries all combinations of a group, at most {_MOST_COMBINATIONS}; "
                f'pattern "{pattern}" has {combinations}. Use the mask S (for example '
                'method="SM") with this pattern.'
            )

    def bind(self, problem: Problem, inverse_blocks: InverseBlocks) -> Chooser:
        """Return a chooser by the joint losses of the combinations of each group's weights."""
        pattern, dead = problem.pattern, problem.inputs.dead
        assert isinstance(pattern, SemiStructured), "refused by `check`"
        group, removed = pattern.group, pattern.removed
        combinations = torch.tensor(
            list(itertools.combinations(range(group), removed)), device=dead.device
        )
        costs = _joint_costs(inverse_blocks(group), combinations)
        membership = torch.zeros(len(combinations), group, dtype=torch.bool, device=dead.device)
        membership.scatter_(1, combinations, True)
        # Dead inputs are removed first: a combination with fewer of them than possible costs ∞.
        dead = dead.view(-1, group)
        dead_removed = (dead[:, None] & membership).sum(2)
        penalty = torch.zeros_like(costs[:, 0]).masked_fill_(
            dead_removed < dead.sum(1, keepdim=True).clamp(max=removed), torch.inf
        )

        def choose(current: Tensor, start: int) -> Tensor:
            rows, width = current.shape
            pruned = torch.empty_like(current, dtype=torch.bool)
            # Groups at a time, which bounds the memory of the products below.
            # A row and group have M² products and one loss a combination: the larger number counts.
            few = max(1, ELEMENTS // max(1, rows * max(costs.shape[1:]))) * group
            for first, stop in split_range(0, width, few):
                groups = slice((start + first) // group, (start + stop) // group)
                w = current[:, first:stop].unflatten(1, (-1, group)).transpose(0, 1)
                # The diagonal of H + λI at a dead input is arbitrary, so its weight must not enter
                # the losses. A copy is needed: w is a view of the caller's weights.
                w = w.masked_fill(dead[groups, None], 0)
                # (groups, rows, M²) products of weights times (groups, M², combinations) costs.
                products = (w.unsqueeze(3) * w.unsqueeze(2)).flatten(2)
                # Some combination has the penalty 0, so that `argmin` never chooses among ∞ alone.
                losses = torch.baddbmm(penalty[groups, None], products, costs[groups])
                best = membership[losses.argmin(2)].transpose(0, 1)
                pruned[:, first:stop] = best.flatten(1)
            return pruned

        return choose


@dataclass(frozen=True, eq=False)
class FixedMask(Mask):
    """A mask that is known in advance."""

    name: ClassVar[str] = "fixed"

    pruned: Tensor  # bool (rows, columns), True = removed

    def bind(self, problem: Problem, inverse_blocks: InverseBlocks) -> Chooser:
        """Return the mask for any weights."""
        del problem, inverse_blocks
        return _known(self.pruned)


def smallest_of_blocks(problem: Problem) -> Tensor:
    """Mark the smallest |w| of each column block: bool (rows, columns), True = removed."""
    scores = _sizes(problem, problem.weight)
    blocks = split_range(0, scores.shape[1], problem.block_size)
    return torch.cat([problem.select(scores[:, a:b], a) for a, b in blocks], dim=1)


def _sizes(problem: Problem, weight: Tensor) -> Tensor:
    """Return |w| as scores (rows, columns), −1 for dead inputs."""
    sizes, inputs = weight.abs(), problem.inputs
    # Few layers have dead inputs, and the mask J asks at each of its steps.
    return sizes.masked_fill_(inputs.dead, -1) if inputs.dead_inputs else sizes


def _known(pruned: Tensor) -> Chooser:
    """Return the chooser of a mask (rows, columns) that does not depend on the current weights."""
    return lambda current, start: pruned[:, start : start + current.shape[1]]


def _joint_costs(blocks: Tensor, combinations: Tensor) -> Tensor:
    """Return [(H⁻¹)_pp]⁻¹ of each group and combination p: (groups, M², combinations)."""
    # Entries outside p are zero, so that w_p [(H⁻¹)_pp]⁻¹ w_pᵀ is one product with all M² products.
    groups, group = blocks.shape[:2]
    # The corner of strongly correlated inputs is nearly singular: it is inverted in float64.
    corners = blocks.double()[:, combinations[:, :, None], combinations[:, None, :]]
    spread = corners.new_zeros(groups, len(combinations), group * group)
    # Entry (i, j) of an inverse belongs to the product w_i·w_j, which is number i·M + j.
    indices = (combinations[:, :, None] * group + combinations[:, None, :]).flatten(1)
    spread.scatter_(2, indices.expand(groups, -1, -1), torch.linalg.inv(corners).flatten(2))
    return spread.to(blocks.dtype).transpose(1, 2).contiguous()


_CACHED = 2**17
"""The number of weights of the rows that take several steps together on a CPU, in its cache."""
_FEWEST_ROWS = 208
"""The number of rows that take several steps together, whatever their length: a product reads the
whole matrix, and with fewer rows it waits for memory (26 rows of 4,864 columns: half the speed)."""
_FIRST_PENALTY = 0.5
"""The first penalty ρ, relative to 1 / mean([H⁻¹]_jj) for H with a unit diagonal."""
_GROWTH = 1.13
"""The factor by which the penalty rises."""
_STEPS = 2
"""Number of steps from one rise of the penalty to the next."""
_RISES = 7
"""Number of successive penalties that share one inverse."""
_FEWEST, _MOST = 20, 300
"""Smallest and largest number of steps."""
_AT_REST = 1e-2
"""The share of the removed weights that may change between the last two rises of the penalty."""


@dataclass(frozen=True)
class Joint(Mask):
    """The mask of an approximate optimum over masks and weights together, of the whole layer.

    A step costs one product (rows, columns)·(columns, columns), and fourteen steps one inverse
    (columns, columns); some tens of steps are usual. In addition to the compensation's memory it
    needs six tensors of the weight's size and three of the Hessian's, in float32.
    """

    name: ClassVar[str] = "J"
    needs_inverse: ClassVar[bool] = True

    def bind(self, problem: Problem, inverse_blocks: InverseBlocks) -> Chooser:
        """Find the mask by ADMM.

        All is scaled to a unit diagonal of H: w·s and H / (s sᵀ) with s = √diag H, so that the
        square of a weight is what removing it alone costs without compensation. Each step sets
        b to the minimum of ½(b − w)H(b − w)ᵀ + ½ρ‖b − d + u‖² + ½(σ − ρ)‖b − b₀‖², where b₀ is the
        previous b, d to b + u with the smallest removed, and u to b + u − d.

        ADMM for a nonconvex constraint need not converge, so this differs from its textbook form in
        that
        1. ρ rises until the mask is at rest, from a value small enough to let it change at first;
        2. it stops by the changes of the mask, not by residuals: d is only needed for its zeros,
           and the compensation solves for the kept weights afterwards, exactly;
        3. σ is the middle of several successive ρ, which then share (H + σI)⁻¹: b moves a little
           less far than by ADMM while ρ < σ, and a little farther while ρ > σ;
        4. b is computed as the change w − b, which is (ρ(w − d + u) + (σ − ρ)(w − b₀))(H + σI)⁻¹.
           Since σ(H + σI)⁻¹ has no eigenvalue above 1, it may be rounded to bfloat16, unlike wH.
        """
        del inverse_blocks
        weight, damped = problem.weight, problem.damped
        # b moves along directions of small eigenvalues at little cost, and the first ρ must not
        # hold it back there. The mean of [H⁻¹]_jj (diagonal 1) measures how small they are.
        first = _FIRST_PENALTY / float(damped.inflation.mean())
        # Only (H + σI)⁻¹ may need float64: the first σ may be below float32's errors in H. The
        # steps take σ times it, whose eigenvalues are at most 1.
        suffices = damped.float32_suffices_with(first)
        matrix = damped.matrix_in(weight.dtype if suffices else torch.float64)
        scale = matrix.diagonal().sqrt()
        matrix.div_(scale[:, None]).div_(scale)
        return _known(_JointSearch(problem, weight * scale.to(weight.dtype), matrix).run(first))


class _JointSearch:
    """The iteration of the mask J for a weight w (rows, columns) and H with a unit diagonal."""

    def __init__(self, problem: Problem, weight: Tensor, matrix: Tensor) -> None:
        self.problem, self.weight, self.matrix = problem, weight, matrix
        self.pruned = problem.select(_sizes(problem, weight), 0)
        self.d = weight * ~self.pruned
        self.u, self.change = torch.zeros_like(weight), torch.zeros_like(weight)  # change: w − b
        rows, columns = weight.shape
        self.chunks = [slice(0, rows)]
        if isinstance(problem.pattern, SemiStructured) and weight.device.type == "cpu":
            # Groups lie within a row, so that a few rows, which stay in the cache, take several
            # steps together. Other patterns rank all rows, of all processes, at each step. A GPU
            # needs all rows at once to be busy.
            parts = split_range(0, rows, max(_FEWEST_ROWS, _CACHED // columns))
            self.chunks = [slice(first, stop) for first, stop in parts]
        rounds = weight.dtype == torch.float32 and has_bfloat16_units(weight.device)
        self.product = rounded_product if rounds else full_product

    def run(self, penalty: float) -> Tensor:
        """Raise the penalty until the mask is at rest, or for 300 steps: bool, True = removed."""
        budget = self.problem.total(float(self.pruned.sum()))
        times_inverse: Product | None = None
        for step in range(0, _MOST, _STEPS):
            if step % (_RISES * _STEPS) == 0:
                # The geometric mean of the penalties that share it: ρ/σ runs from 1/1.44 to 1.44.
                center = penalty * _GROWTH ** ((_RISES - 1) / 2)  # σ
                times_inverse = None  # its memory is free before the next one needs it
                times_inverse = self._times_inverse(center)
            ratio = penalty / center
            assert times_inverse is not None, "the first step has set it"
            changes = [self._descend(rows, times_inverse, ratio) for rows in self.chunks]
            # The total is the same number in all processes, so that all of them stop at the same
            # step: patterns without groups rank the rows of all of them together.
            changed = self.problem.total(sum(changes))
            if step + _STEPS >= _FEWEST and changed <= _AT_REST * budget:
                break
            penalty *= _GROWTH
            self.u /= _GROWTH  # u is the multiplier divided by ρ
            self.problem.progress(f"step {step + _STEPS} of the mask")
        return self.pruned

    def _times_inverse(self, center: float) -> Product:
        """Return the product with σ(H + σI)⁻¹, σ = `center`."""
        shifted = self.matrix.clone()
        shifted.diagonal().add_(center)
        factor = factor_of_inverse(shifted)
        if factor is None and self.matrix.dtype == torch.float32:
            # The factorisation's own rounding, which grows with the columns, exceeds σ.
            self.matrix = self.matrix.double()
            return self._times_inverse(center)
        assert factor is not None, "H + λI is positive definite to its precision, and σ is positive"
        return self.product(inverse_from(factor).mul_(center).to(self.weight.dtype))

    def _descend(self, rows: slice, times_inverse: Product, ratio: float) -> float:
        """Take the steps of one penalty, ρ/σ = `ratio`; return how many removals have changed."""
        w, d, u, change = self.weight[rows], self.d[rows], self.u[rows], self.change[rows]
        b = torch.empty_like(w)
        for _ in range(_STEPS):
            # w − b = (ρ/σ·(w − d + u) + (1 − ρ/σ)(w − b₀))·σ(H + σI)⁻¹, the formula 4 of `bind`
            # with σ moved to the inverse: only the scalar ρ/σ changes while a matrix is shared.
            torch.sub(w, d, out=b).add_(u).mul_(ratio).add_(change, alpha=1 - ratio)
            times_inverse(b, change)
            torch.sub(w, change, out=b).add_(u)  # b + u: the weights that the mask is taken from
            pruned = self.problem.select(_sizes(self.problem, b), 0)
            torch.mul(b, (~pruned).to(b.dtype), out=d)
            torch.sub(b, d, out=u)
        # Only the last step's mask is compared: a removal undone within one penalty is no change.
        changed = float((pruned ^ self.pruned[rows]).sum())
        self.pruned[rows] = pruned
        return changed
