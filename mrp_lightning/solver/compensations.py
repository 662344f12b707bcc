"""Compensations: how the kept weights make up for the removed ones. `exact` has the best one."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from mrp_lightning.solver.arithmetic import split_range
from mrp_lightning.solver.masks import Mask
from mrp_lightning.solver.patterns import SemiStructured
from mrp_lightning.solver.problem import Problem

_PANEL = 128


@dataclass(frozen=True)
class Compensated:
    """The result of a compensation."""

    weight: Tensor  # (rows, columns); what it holds at removed places does not matter
    pruned: Tensor  # bool (rows, columns), True = removed
    iterations: int | None = None  # of an iterative solution
    gap: float | None = None  # certified relative distance to the optimum, where that is sought


class Compensation(Protocol):
    """The way in which kept weights make up for the removed ones."""

    name: ClassVar[str]  # in MASK+COMPENSATION
    needs_inverse: ClassVar[bool]  # whether it uses (H + λI)⁻¹

    def apply(self, problem: Problem, mask: Mask) -> Compensated:
        """Remove weights as the mask says and compensate."""


@dataclass(frozen=True)
class NoCompensation:
    """The kept weights stay as they are; the mask sees the dense weights, block by block."""

    name: ClassVar[str] = "none"
    needs_inverse: ClassVar[bool] = False

    def apply(self, problem: Problem, mask: Mask) -> Compensated:
        """Choose from the dense weight."""
        weight = problem.weight
        choose = mask.bind(problem, problem.inverse_blocks)
        blocks = split_range(0, weight.shape[1], problem.block_size)
        return Compensated(weight, torch.cat([choose(weight[:, a:b], a) for a, b in blocks], dim=1))


@dataclass(frozen=True)
class ColumnSweep:
    """Solution 𝔖: remove column after column, each time moving only the columns still to come.

    This is SparseGPT (Frantar and Alistarh, 2023): removing w_j from a row moves its later weights
    by −w_j·U_j,: / U_jj with UᵀU = (H + λI)⁻¹. What is left of a column is frozen when the column
    sweep has passed it, which is why the result is not the optimum. N:M groups are chosen from the
    swept weights when the column sweep reaches them, unstructured masks once a block.
    """

    name: ClassVar[str] = "S"
    needs_inverse: ClassVar[bool] = True

    def apply(self, problem: Problem, mask: Mask) -> Compensated:
        """Choose and compensate in one pass over the columns."""
        weight, pattern, damped = problem.weight, problem.pattern, problem.damped
        choose = mask.bind(problem, damped.trailing_inverse_blocks)
        columns = weight.shape[1]
        if mask.by_block and isinstance(pattern, SemiStructured):
            width = pattern.group
        else:
            width = problem.block_size

        # Input-major, so that a column of the weight is contiguous; a copy in any case.
        swept = weight.T.clone(memory_format=torch.contiguous_format)
        pruned = torch.zeros_like(swept, dtype=torch.bool)
        moves = damped.factor / damped.factor.diagonal()[:, None]
        removed = torch.empty_like(swept[:_PANEL])
        for start, stop in _panels(columns, width):
            for j in range(start, stop):
                if j % width == 0:
                    pruned[j : j + width] = choose(swept[j : j + width].T, j).T
                torch.mul(swept[j], pruned[j], out=removed[j - start])
                swept[j + 1 : stop].addr_(moves[j, j + 1 : stop], removed[j - start], alpha=-1)
            # The columns beyond the panel wait for all of its removals at once.
            swept[stop:].addmm_(moves[start:stop, stop:].T, removed[: stop - start], alpha=-1)
            problem.tell(f"columns {stop}/{columns}")
        return Compensated(swept.masked_fill_(pruned, 0).T, pruned.T)


def _panels(columns: int, width: int) -> Iterator[tuple[int, int]]:
    """Ranges of at most 128 columns (or one choice) that split no choice of `width` columns."""
    if width <= _PANEL:
        yield from split_range(0, columns, width * (_PANEL // width))
    else:
        for start, stop in split_range(0, columns, width):
            yield from split_range(start, stop, _PANEL)
