"""Compensations: how the kept weights make up for the removed ones."""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from mrp_lightning.solver.damping import DampedHessian
from mrp_lightning.solver.masks import LayerMask, Mask, chooser
from mrp_lightning.solver.patterns import Pattern
from mrp_lightning.solver.ranges import split_range


@dataclass(frozen=True)
class Compensated:
    """What a compensation returns.

    Attributes:
        weight: (rows, columns); what it holds at removed places does not matter.
        pruned: bool (rows, columns), True = removed.
        iterations: steps of an iterative solution, else None.
        gap: certified relative distance to the optimum, where the optimum is what was sought.
    """

    weight: Tensor
    pruned: Tensor
    iterations: int | None = None
    gap: float | None = None


class Compensation(Protocol):
    """What all compensations offer."""

    name: ClassVar[str]

    def apply(
        self,
        weight: Tensor,
        prepared: DampedHessian,
        mask: Mask,
        pattern: Pattern,
        block_size: int,
        tolerance: float,
    ) -> Compensated:
        """Remove weights as the mask says and compensate."""


@dataclass(frozen=True)
class NoCompensation:
    """The kept weights stay as they are; the mask sees the dense weights, block by block."""

    name: ClassVar[str] = "none"

    def apply(
        self,
        weight: Tensor,
        prepared: DampedHessian,
        mask: Mask,
        pattern: Pattern,
        block_size: int,
        tolerance: float,
    ) -> Compensated:
        """Choose from weight (rows, columns)."""
        del tolerance
        choose = chooser(mask, weight, prepared, prepared.inverse_blocks, pattern)
        columns = weight.shape[1]
        width = columns if isinstance(mask, LayerMask) else block_size
        chosen = [choose(weight[:, a:b], a) for a, b in split_range(0, columns, width)]
        return Compensated(weight, torch.cat(chosen, dim=1))
