"""Mask J: the whole layer's mask and weights sought together, by ADMM.

Sought is the mask of the x that minimises ½·tr((x − w)(H + λI)(x − w)ᵀ) among all x with the
pattern. The alternating direction method of multipliers splits x into b, which is free, and d,
which has the pattern (Boyd et al., 2011, section 9.1; for pruning Boža, 2024, and ALPS, Meng et
al., 2024). Every weight of the layer competes with all others at each step, where Algorithm 1
decides on a column block for good before it sees the next.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mrp_lightning.solver.damping import DampedHessian, cholesky
from mrp_lightning.solver.masks import Chooser, InverseBlocks, Mask, chosen
from mrp_lightning.solver.problem import Problem

_FIRST_PENALTY = 0.5
"""The first penalty ρ, relative to the harmonic mean of 1 / [H⁻¹]_jj for a unit diagonal."""
_GROWTH = 1.2
"""Factor by which the penalty rises."""
_STEPS = 3
"""Steps from one rise of the penalty to the next."""
_FEWEST, _MOST = 20, 300
"""Fewest and most steps."""
_AT_REST = 1e-4
"""Share of the removed weights that may still change from one rise to the next at the end."""


@dataclass(frozen=True)
class Joint(Mask):
    """The mask of an approximate optimum over masks and weights together, of the whole layer.

    A step costs one product (rows, columns)·(columns, columns), and three steps one inverse
    (columns, columns); some tens of steps are usual. Beside what the compensation needs there is
    memory for seven tensors of the weight's size and three of the Hessian's, in float32.
    """

    name: ClassVar[str] = "J"
    needs_inverse: ClassVar[bool] = True

    def bind(self, problem: Problem, inverse_blocks: InverseBlocks) -> Chooser:
        """Seek the mask."""
        del inverse_blocks
        weight, damped = problem.weight, problem.damped
        if not damped.float32_suffices:
            weight, damped = weight.double(), damped.double
        return chosen(_joint_mask(problem, weight, damped))


def _joint_mask(problem: Problem, weight: Tensor, damped: DampedHessian) -> Tensor:
    """Seek the mask of a weight (rows, columns): bool, True = removed.

    All is scaled to a unit diagonal of H: w·s and H / (s sᵀ) with s = √diag H, so that a weight's
    size is what removing it alone costs without compensation. Each step sets
    b = (wH + ρ(d − u))(H + ρI)⁻¹, d = b + u with the smallest removed, and u = b + u − d.
    """
    scale = damped.matrix.diagonal().sqrt()
    matrix = damped.matrix / scale[:, None] / scale
    weight = weight * scale
    pull = weight @ matrix
    # Small eigenvalues are what b moves along at little cost; ρ must not hold it back from there at
    # first. The mean of [H⁻¹]_jj tells how small they are.
    inflation = damped.factor.square().sum(0) * damped.matrix.diagonal()
    penalty = _FIRST_PENALTY / float(inflation.mean())

    pruned = _smallest(problem, weight)
    settled, budget = pruned, problem.total(float(pruned.sum()))
    d = weight * ~pruned
    u, b, right = torch.zeros_like(weight), torch.empty_like(weight), torch.empty_like(weight)
    inverse = _inverse(matrix, penalty)
    for step in range(1, _MOST + 1):
        torch.sub(d, u, out=right).mul_(penalty).add_(pull)
        torch.mm(right, inverse, out=b).add_(u)
        pruned = _smallest(problem, b)
        torch.mul(b, (~pruned).to(b.dtype), out=d)
        torch.sub(b, d, out=u)
        if step % _STEPS == 0:
            changed = problem.total(float((pruned ^ settled).sum()))
            if step >= _FEWEST and changed <= _AT_REST * budget:
                break
            settled = pruned
            penalty *= _GROWTH
            u /= _GROWTH  # u is the multiplier over ρ
            inverse = _inverse(matrix, penalty)
            problem.tell(f"step {step} of the mask")
    return pruned


def _smallest(problem: Problem, weight: Tensor) -> Tensor:
    """Mark the smallest weights, those of dead inputs first: bool, True = removed."""
    return problem.select(weight.abs().masked_fill_(problem.inputs.dead, -1), 0)


def _inverse(matrix: Tensor, penalty: float) -> Tensor:
    """(H + ρI)⁻¹."""
    shifted = matrix.clone()
    shifted.diagonal().add_(penalty)
    factor = cholesky(shifted)
    assert factor is not None, "H + λI is positive definite to its precision, and ρ is positive"
    return torch.cholesky_inverse(factor)
