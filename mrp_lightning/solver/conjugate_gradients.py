"""Conjugate gradients on masked systems H_UU x_U = (H w)_U, all rows at once, and preconditioners.

Each row of a weight has its own kept set U, so no factor of H_UU can be shared; products with H
can. Tensors are (rows, columns) and zero outside U; an iteration costs one product with H and
whatever the preconditioner costs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Preconditioner = Callable[[Tensor, Tensor, Tensor], None]
"""(gradient, z, work): sets z on U from the gradient on U, and to zero elsewhere."""


@dataclass(frozen=True)
class InverseOnKept:
    """Precondition with (H⁻¹)_UU: one product with the inverse.

    Good where little is removed. As (H_UU)⁻¹ ≼ (H⁻¹)_UU, ½ r z bounds the distance to the optimum.
    """

    inverse: Tensor
    kept: Tensor

    def __call__(self, gradient: Tensor, z: Tensor, work: Tensor) -> None:
        """Set z (rows, columns)."""
        torch.mul(gradient, self.kept, out=work)
        torch.mm(work, self.inverse, out=z).mul_(self.kept)


@dataclass(frozen=True)
class LowRankModel:
    """H ≈ D + FFᵀ: its leading eigenvectors and a diagonal for the rest.

    The inputs of a trained network share a few strong directions, which are what makes H_UU
    ill-conditioned. The model carries over to every kept set: H_UU ≈ D_U + F_U F_Uᵀ.

    Attributes:
        diagonal: D, (columns,), positive.
        factor: F, (columns, rank).
    """

    diagonal: Tensor
    factor: Tensor

    @staticmethod
    def of(matrix: Tensor, rank: int, sweeps: int = 4) -> "LowRankModel":
        """Fit the model to H (columns, columns) by subspace iteration.

        H is scaled to a unit diagonal first, so that channels of large inputs do not use up the
        rank.
        """
        columns = matrix.shape[0]
        scale = matrix.diagonal().sqrt()
        # A generator of its own: results do not depend on, or change, the global one.
        generator = torch.Generator(matrix.device).manual_seed(0)
        basis = torch.randn(
            columns, rank, generator=generator, dtype=matrix.dtype, device=matrix.device
        )
        for _ in range(sweeps):
            basis = torch.linalg.qr(_scaled_product(matrix, basis, scale)).Q
        values, rotation = torch.linalg.eigh(basis.T @ _scaled_product(matrix, basis, scale))
        # The mean eigenvalue of the rest: the trace of the scaled H is `columns`.
        rest = (columns - values.sum()) / max(columns - rank, 1)
        factor = (basis @ rotation) * (values - rest).clamp_min(0).sqrt()
        diagonal = (1 - factor.square().sum(1)).clamp_min(0.01)
        return LowRankModel(diagonal * scale.square(), factor * scale[:, None])

    def on(self, kept: Tensor) -> "LowRankOnKept":
        """Restrict the model to kept (rows, columns), of zeros and ones."""
        rank = self.factor.shape[1]
        whitened = self.factor / self.diagonal.sqrt()[:, None]
        first, second = torch.triu_indices(rank, rank, device=kept.device)
        packed = kept @ (whitened[:, first] * whitened[:, second])
        # Entry (i, j) of a symmetric matrix is found at its place in the packed triangle.
        place = torch.empty(rank, rank, dtype=torch.int64, device=kept.device)
        place[first, second] = place[second, first] = torch.arange(len(first), device=kept.device)
        core = packed.index_select(1, place.flatten()).view(-1, rank, rank)
        core.diagonal(dim1=1, dim2=2).add_(1)
        inverse_diagonal = self.diagonal.reciprocal()
        spread = (self.factor * inverse_diagonal[:, None]).T.contiguous()
        return LowRankOnKept(
            kept * inverse_diagonal, self.factor, spread, torch.linalg.inv(core), kept
        )


@dataclass(frozen=True)
class LowRankOnKept:
    """Precondition with (D_U + F_U F_Uᵀ)⁻¹, by Woodbury's formula.

    Attributes:
        inverse_diagonal: D⁻¹ on U and zero elsewhere, (rows, columns).
        factor: F, (columns, rank).
        spread: FᵀD⁻¹, (rank, columns).
        core: (I + F_UᵀD_U⁻¹F_U)⁻¹ of each row, (rows, rank, rank).
        kept: (rows, columns), of zeros and ones.
    """

    inverse_diagonal: Tensor
    factor: Tensor
    spread: Tensor
    core: Tensor
    kept: Tensor

    def __call__(self, gradient: Tensor, z: Tensor, work: Tensor) -> None:
        """Set z (rows, columns)."""
        del work
        torch.mul(gradient, self.inverse_diagonal, out=z)
        along = torch.bmm(self.core, (z @ self.factor).unsqueeze(2)).squeeze(2)
        z.addmm_(along, self.spread, alpha=-1).mul_(self.kept)


def conjugate_gradients(
    x: Tensor,
    gradient: Tensor,
    matrix: Tensor,
    precondition: Preconditioner,
    converged: Callable[[Tensor], bool],
    confirm: Callable[[], bool] = lambda: True,
    limit: int = 500,
) -> int:
    """Move x towards the optimum on the kept set, in place.

    Args:
        x: (rows, columns), zero where weights are removed.
        gradient: (w − x)H, (rows, columns), changed along with x; it vanishes on U at the optimum.
        matrix: H, (columns, columns).
        precondition: sets z to approximately (H_UU)⁻¹ times the gradient on U.
        converged: energies gradient·z of the rows, (rows,) → whether they look small enough.
        confirm: asked when they do. To refuse, it must have put the exact gradient of x in place
            of the recursive one, from which the iteration then goes on.
        limit: largest number of iterations.

    Returns:
        The number of iterations.
    """
    # All large tensors are made once: fresh memory costs a CPU more than the arithmetic.
    z, image = torch.empty_like(x), torch.empty_like(x)
    direction, before = torch.zeros_like(x), None
    for iteration in range(limit + 1):
        energy = _energies(gradient, precondition, z, image)
        if converged(energy):
            if confirm():
                return iteration
            energy = _energies(gradient, precondition, z, image)
        if iteration == limit:
            break
        if before is not None:
            direction.mul_(_quotient(energy, before).unsqueeze(1))
        direction.add_(z)
        torch.mm(direction, matrix, out=image)
        curvature = torch.mul(direction, image, out=z).sum(1)
        step = _quotient(energy, curvature).unsqueeze(1)
        x.addcmul_(direction, step)
        gradient.addcmul_(image, step, value=-1)
        before = energy
    return limit


def _energies(gradient: Tensor, precondition: Preconditioner, z: Tensor, work: Tensor) -> Tensor:
    """Set z and return its inner product with the gradient in each row: (rows,)."""
    precondition(gradient, z, work)
    return torch.mul(gradient, z, out=work).sum(1)


def _quotient(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Zero where the denominator vanishes: a row with nothing left to do, or lost in rounding."""
    tiny = torch.finfo(denominator.dtype).tiny
    return torch.where(denominator > tiny, numerator / denominator, 0)


def _scaled_product(matrix: Tensor, basis: Tensor, scale: Tensor) -> Tensor:
    return (matrix @ (basis / scale[:, None])) / scale[:, None]
