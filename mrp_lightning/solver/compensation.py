"""Compensations: how the kept weights make up for the removed ones."""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from mrp_lightning.solver.masks import Mask
from mrp_lightning.solver.problem import Problem
from mrp_lightning.solver.ranges import split_range


@dataclass(frozen=True)
class Compensated:
    """What a compensation returns.

    Attributes:
        weight: The new weight, (rows, columns); what it holds at removed places does not matter.
        pruned: bool (rows, columns), True = removed.
        iterations: Number of steps of an iterative solution; None where there are none.
        gap: Certified relative distance to the optimum; None where the optimum is not sought.
    """

    weight: Tensor
    pruned: Tensor
    iterations: int | None = None
    gap: float | None = None


class Compensation(Protocol):
    """What all compensations offer.

    Attributes:
        name: The name in MASK+COMPENSATION.
        needs_inverse: Whether the compensation uses (H + λI)⁻¹.
    """

    name: ClassVar[str]
    needs_inverse: ClassVar[bool]

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
