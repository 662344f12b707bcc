"""Masks: which weights to remove.

`chooser` binds a mask to a layer and returns a function from the current weights of some columns to
the weights to remove there. The compensation decides when it is asked, and with which inverse: that
of the whole Hessian (Algorithm 1) or that of its trailing part (a sweep).

Dead inputs score −1: their weights carry nothing and go first.
"""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mrp_lightning.errors import MethodError
from mrp_lightning.solver.damping import DampedHessian
from mrp_lightning.solver.patterns import Pattern, SemiStructured, Unstructured
from mrp_lightning.solver.ranges import split_range

Chooser = Callable[[Tensor, int], Tensor]
"""(current weights (rows, width) of the columns from `start`, start) → bool (rows, width)."""

InverseBlocks = Callable[[int], Tensor]
"""width → diagonal blocks (columns / width, width, width) of the inverse to score with."""

MOST_COMBINATIONS = 100
_ELEMENTS = 2**26
"""Elements of the temporaries in which combinations are compared."""


class LayerMask(ABC):
    """A mask chosen at once from the dense weights, so that blocks mean nothing to it."""

    name: ClassVar[str]

    def check(self, pattern: Pattern) -> None:  # noqa: B027  (most have nothing to refuse)
        """Raise a MethodError where the mask does not exist for the pattern."""

    @abstractmethod
    def choose(self, weight: Tensor, prepared: DampedHessian, pattern: Pattern) -> Tensor:
        """Return the removed weights of weight (rows, columns): bool, True = removed."""


class BlockMask(ABC):
    """A mask chosen a block of columns at a time, from the weights as they are by then."""

    name: ClassVar[str]

    def check(self, pattern: Pattern) -> None:  # noqa: B027
        """Raise a MethodError where the mask does not exist for the pattern."""

    @abstractmethod
    def bind(
        self, prepared: DampedHessian, inverse_blocks: InverseBlocks, pattern: Pattern
    ) -> Chooser:
        """Prepare the choice for all layers that read one input."""


Mask = LayerMask | BlockMask


def chooser(
    mask: Mask,
    weight: Tensor,
    prepared: DampedHessian,
    inverse_blocks: InverseBlocks,
    pattern: Pattern,
) -> Chooser:
    """Bind either kind of mask to a layer with dense weight (rows, columns)."""
    if isinstance(mask, BlockMask):
        return mask.bind(prepared, inverse_blocks, pattern)
    pruned = mask.choose(weight, prepared, pattern)
    return lambda current, start: pruned[:, start : start + current.shape[1]]


@dataclass(frozen=True)
class Magnitude(LayerMask):
    """The smallest |w|, over the whole layer or in each group."""

    name: ClassVar[str] = "magnitude"

    def choose(self, weight: Tensor, prepared: DampedHessian, pattern: Pattern) -> Tensor:
        """Rank |w|."""
        return pattern.select(weight.abs().masked_fill_(prepared.dead, -1), 0)


@dataclass(frozen=True)
class Wanda(LayerMask):
    """The smallest |w_ij|·‖x_j‖, in each output row or in each group (Sun et al., 2024)."""

    name: ClassVar[str] = "wanda"

    def choose(self, weight: Tensor, prepared: DampedHessian, pattern: Pattern) -> Tensor:
        """Rank |w_ij|·√H_jj, which is Wanda's score up to a constant."""
        scores = weight.abs() * prepared.diagonal.to(weight.dtype).sqrt()
        return pattern.select_in_rows(scores.masked_fill_(prepared.dead, -1))


@dataclass(frozen=True)
class SingleRemoval(BlockMask):
    """Solution 𝔖: the smallest loss of removing one weight alone.

    The score is w_ij² / [H⁻¹]_jj (paper Eq. loss_single, without its factor ½).
    """

    name: ClassVar[str] = "S"

    def bind(
        self, prepared: DampedHessian, inverse_blocks: InverseBlocks, pattern: Pattern
    ) -> Chooser:
        """Rank the single-removal losses of the current weights."""
        inverse_diagonal = inverse_blocks(1).flatten()

        def choose(current: Tensor, start: int) -> Tensor:
            columns = slice(start, start + current.shape[1])
            scores = current.square() / inverse_diagonal[columns]
            return pattern.select(scores.masked_fill_(prepared.dead[columns], -1), start)

        return choose


@dataclass(frozen=True)
class MultipleRemoval(BlockMask):
    """Solution 𝔐: in each group, the combination of weights whose joint removal costs least.

    The loss of removing p is w_p [(H⁻¹)_pp]⁻¹ w_pᵀ (paper Eq. optimal_loss, without its factor ½),
    tried for all combinations of the group. It exists for N:M patterns only.
    """

    name: ClassVar[str] = "M"

    def check(self, pattern: Pattern) -> None:
        """Only N:M with at most 100 combinations in a group."""
        if isinstance(pattern, Unstructured):
            raise MethodError(
                "the mask M is not defined for unstructured sparsity: it would have to try all "
                "combinations of all weights (the paper does not either). Use the mask S (for "
                f'example method="SM") with sparsity={pattern.sparsity:g}, or an N:M pattern.'
            )
        combinations = math.comb(pattern.group, pattern.removed)
        if combinations > MOST_COMBINATIONS:
            raise MethodError(
                f"the mask M tries all combinations of a group, at most {MOST_COMBINATIONS}; "
                f'pattern "{pattern}" has {combinations}. Use the mask S (for example '
                'method="SM") with this pattern.'
            )

    def bind(
        self, prepared: DampedHessian, inverse_blocks: InverseBlocks, pattern: Pattern
    ) -> Chooser:
        """Compare the joint losses of the current weights."""
        self.check(pattern)
        assert isinstance(pattern, SemiStructured)
        group, removed = pattern.group, pattern.removed
        combinations = torch.tensor(
            list(itertools.combinations(range(group), removed)), device=prepared.dead.device
        )
        costs = _joint_costs(inverse_blocks(group), combinations)
        membership = torch.zeros(
            len(combinations), group, dtype=torch.bool, device=prepared.dead.device
        )
        membership.scatter_(1, combinations, True)
        # Dead inputs first: only combinations with as many of them as can be may win.
        dead = prepared.dead.view(-1, group)
        dead_removed = (dead[:, None] & membership).sum(2)
        penalty = torch.zeros_like(costs[:, 0]).masked_fill_(
            dead_removed < dead.sum(1, keepdim=True).clamp(max=removed), torch.inf
        )

        def choose(current: Tensor, start: int) -> Tensor:
            rows, width = current.shape
            pruned = torch.empty_like(current, dtype=torch.bool)
            few = max(1, _ELEMENTS // max(1, rows * max(costs.shape[1:]))) * group
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


def _joint_costs(blocks: Tensor, combinations: Tensor) -> Tensor:
    """[(H⁻¹)_pp]⁻¹ of each group and combination p, spread out: (groups, M², combinations)."""
    groups, group = blocks.shape[:2]
    corners = blocks.double()[:, combinations[:, :, None], combinations[:, None, :]]
    spread = corners.new_zeros(groups, len(combinations), group * group)
    places = (combinations[:, :, None] * group + combinations[:, None, :]).flatten(1)
    spread.scatter_(2, places.expand(groups, -1, -1), torch.linalg.inv(corners).flatten(2))
    return spread.to(blocks.dtype).transpose(1, 2).contiguous()
