"""Masks: which weights to remove.

A mask is bound to a layer, which gives a function from the current weights of some columns to the
weights to remove there. The compensation decides when it is asked, and with which inverse: that of
the whole Hessian (Algorithm 1) or that of its trailing part (a column sweep).

Dead inputs score −1: their weights carry nothing and go first.
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
from mrp_lightning.solver.patterns import Dense, Pattern, SemiStructured, Unstructured
from mrp_lightning.solver.problem import Problem
from mrp_lightning.solver.ranges import ELEMENTS, split_range

Chooser = Callable[[Tensor, int], Tensor]
"""Called with the current weights (rows, width) of some columns and the first of these columns:
bool (rows, width), True = removed."""

InverseBlocks = Callable[[int], Tensor]
"""Called with a width: the diagonal blocks of the inverse to score with, (columns / width, width,
width)."""

MOST_COMBINATIONS = 100


class Mask(Protocol):
    """The choice of the weights to remove."""

    name: ClassVar[str]  # in MASK+COMPENSATION
    by_block: ClassVar[bool] = False
    """Whether weights are chosen one column block after another, each time from the weights as they
    are by then; else all at once from the dense weights, so that column blocks mean nothing."""
    needs_inverse: ClassVar[bool] = False  # whether it uses (H + λI)⁻¹

    def check(self, pattern: Pattern) -> None:
        """Raise a MethodError where the mask does not exist for the pattern."""
        del pattern  # most masks have nothing to refuse

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
        return chosen(problem.select(_sizes(problem), 0))


@dataclass(frozen=True)
class Wanda(Mask):
    """The smallest |w_ij|·‖x_j‖, in each output row or in each group (Sun et al., 2024)."""

    name: ClassVar[str] = "wanda"

    def bind(self, problem: Problem, inverse_blocks: InverseBlocks) -> Chooser:
        """Rank |w_ij|·√H_jj, which is Wanda's score up to a constant."""
        del inverse_blocks
        norms = problem.inputs.diagonal.to(problem.weight.dtype).sqrt()
        scores = (problem.weight.abs() * norms).masked_fill_(problem.inputs.dead, -1)
        return chosen(problem.pattern.select_in_rows(scores))


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
        """Only N:M with at most 100 combinations in a group."""
        if isinstance(pattern, Unstructured):
            raise MethodError(
                "the mask M is not defined for unstructured sparsity: it would have to try all "
                "combinations of all weights (the paper does not either). Use the mask S (for "
                f'example method="SM") with sparsity={pattern.sparsity:g}, or an N:M pattern.'
            )
        if isinstance(pattern, Dense):
            return  # nothing is removed, and no mask asked
        combinations = math.comb(pattern.group, pattern.removed)
        if combinations > MOST_COMBINATIONS:
            raise MethodError(
                f"the mask M tries all combinations of a group, at most {MOST_COMBINATIONS}; "
                f'pattern "{pattern}" has {combinations}. Use the mask S (for example '
                'method="SM") with this pattern.'
            )

    def bind(self, problem: Problem, inverse_blocks: InverseBlocks) -> Chooser:
        """Compare the joint losses of the current weights."""
        pattern, dead = problem.pattern, problem.inputs.dead
        assert isinstance(pattern, SemiStructured), "refused by `check`"
        group, removed = pattern.group, pattern.removed
        combinations = torch.tensor(
            list(itertools.combinations(range(group), removed)), device=dead.device
        )
        costs = _joint_costs(inverse_blocks(group), combinations)
        membership = torch.zeros(len(combinations), group, dtype=torch.bool, device=dead.device)
        membership.scatter_(1, combinations, True)
        # Dead inputs first: only combinations with as many of them as can be may win.
        dead = dead.view(-1, group)
        dead_removed = (dead[:, None] & membership).sum(2)
        penalty = torch.zeros_like(costs[:, 0]).masked_fill_(
            dead_removed < dead.sum(1, keepdim=True).clamp(max=removed), torch.inf
        )

        def choose(current: Tensor, start: int) -> Tensor:
            rows, width = current.shape
            pruned = torch.empty_like(current, dtype=torch.bool)
            few = max(1, ELEMENTS // max(1, rows * max(costs.shape[1:]))) * group
            for first, stop in split_range(0, width, few):
                groups = slice((start + first) // group, (start + stop) // group)
                w = current[:, first:stop].unflatten(1, (-1, group)).transpose(0, 1)
                w = w.masked_fill(dead[groups, None], 0)
                # (groups, rows, M²) products of weights times (groups, M², combinations) costs.
                products = (w.unsqueeze(3) * w.unsqueeze(2)).flatten(2)
                losses = torch.baddbmm(penalty[groups, None], products, costs[groups])
                best = membership[losses.argmin(2)].transpose(0, 1)
                pruned[:, first:stop] = best.flatten(1)
            return pruned

        return choose


@dataclass(frozen=True, eq=False)
class Given(Mask):
    """A mask that was chosen before."""

    name: ClassVar[str] = "given"

    pruned: Tensor  # bool (rows, columns), True = removed

    def bind(self, problem: Problem, inverse_blocks: InverseBlocks) -> Chooser:
        """Return what was chosen."""
        del problem, inverse_blocks
        return chosen(self.pruned)


def smallest_of_blocks(problem: Problem) -> Tensor:
    """The smallest |w| of each column block, bool (rows, columns), True = removed."""
    scores = _sizes(problem)
    blocks = split_range(0, scores.shape[1], problem.block_size)
    return torch.cat([problem.select(scores[:, a:b], a) for a, b in blocks], dim=1)


def _sizes(problem: Problem) -> Tensor:
    return problem.weight.abs().masked_fill_(problem.inputs.dead, -1)


def chosen(pruned: Tensor) -> Chooser:
    """Answer for any columns from what was chosen at once, bool (rows, columns)."""
    return lambda current, start: pruned[:, start : start + current.shape[1]]


def _joint_costs(blocks: Tensor, combinations: Tensor) -> Tensor:
    """[(H⁻¹)_pp]⁻¹ of each group and combination p, spread out: (groups, M², combinations)."""
    groups, group = blocks.shape[:2]
    corners = blocks.double()[:, combinations[:, :, None], combinations[:, None, :]]
    spread = corners.new_zeros(groups, len(combinations), group * group)
    places = (combinations[:, :, None] * group + combinations[:, None, :]).flatten(1)
    spread.scatter_(2, places.expand(groups, -1, -1), torch.linalg.inv(corners).flatten(2))
    return spread.to(blocks.dtype).transpose(1, 2).contiguous()
