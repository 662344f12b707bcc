"""Conjugate gradients on masked systems H_UU x_U = (H w)_U, all rows at once, and preconditioners.

Each row of a weight has its own kept set U, so no factor of H_UU can be shared; products with H
can. Tensors are (rows, columns) and zero outside U; an iteration costs one product with H and
whatever the preconditioner costs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mrp_lightning.solver.arithmetic import split_range

Product = Callable[[Tensor, Tensor], None]
"""Called with (left, out), both (rows, columns): sets out to left times a symmetric matrix."""

_PAIRS = 1024
"""Products of two columns of F that are held at a time, out of rank² / 2."""

Preconditioner = Callable[[Tensor, Tensor, Tensor], None]
"""Called with (gradient, z, work), all (rows, columns): sets z on U from the gradient on U, and to
zero elsewhere. What `work` holds is lost."""


def full_product(matrix: Tensor) -> Product:
    """Return a function (left, out) that writes left · `matrix` into `out`, in its dtype."""

    def times(left: Tensor, out: Tensor) -> None:
        torch.mm(left, matrix, out=out)

    return times


def rounded_product(matrix: Tensor, delicate: Tensor | None = None) -> Product:
    """Return the product with a matrix, factors and result rounded to bfloat16 (error ≈ 0.2%).

    Rows and columns of the matrix whose indices are `delicate` are multiplied in its own precision.
    """
    # bfloat16 has the exponents of float32: no scale is needed, as it would be for float16.
    narrow = matrix.bfloat16()
    if delicate is None or len(delicate) == 0:

        def times(left: Tensor, out: Tensor) -> None:
            out.copy_(left.bfloat16() @ narrow)

        return times

    narrow[delicate] = 0
    narrow[:, delicate] = 0
    columns = matrix[:, delicate]
    rows = columns.T.contiguous()
    rows[:, delicate] = 0  # these are among `columns`

    def times_split(left: Tensor, out: Tensor) -> None:
        out.copy_(left.bfloat16() @ narrow).addmm_(left[:, delicate], rows)
        out[:, delicate] = left @ columns

    return times_split


@dataclass(frozen=True)
class InverseOnKept:
    """The preconditioner (H⁻¹)_UU, which costs one product with the inverse.

    It is the better the less is removed. As (H_UU)⁻¹ ≼ (H⁻¹)_UU, ½ r·z bounds the distance to the
    optimal loss.
    """

    times_inverse: Product  # the product with H⁻¹
    kept: Tensor  # U, (rows, columns), of zeros and ones

    def __call__(self, gradient: Tensor, z: Tensor, work: Tensor) -> None:
        """Set z (rows, columns) to (H⁻¹)_UU times the gradient."""
        # Outside U the gradient does not vanish at the optimum: it must not reach z through H⁻¹.
        torch.mul(gradient, self.kept, out=work)
        self.times_inverse(work, z)
        z.mul_(self.kept)


@dataclass(frozen=True)
class LowRankModel:
    """H ≈ D + FFᵀ, from the leading eigenvectors of H and a diagonal for the rest.

    The inputs of a trained network share a few strong directions, which are what makes H_UU
    ill-conditioned. The model carries over to every kept set: H_UU ≈ D_U + F_U F_Uᵀ.
    """

    diagonal: Tensor  # D, (columns,), positive
    factor: Tensor  # F, (columns, rank)

    @staticmethod
    def of(matrix: Tensor, rank: int, passes: int = 4) -> "LowRankModel":
        """Fit the model to H (columns, columns) by subspace iteration, with `passes` + 1 products.

        H is scaled to a unit diagonal first, so that channels of large inputs do not use up the
        rank.
        """
        columns = matrix.shape[0]
        scale = matrix.diagonal().sqrt()
        # A generator of its own: results neither depend on the global one nor change it.
        generator = torch.Generator(matrix.device).manual_seed(0)
        basis = torch.randn(
            columns, rank, generator=generator, dtype=matrix.dtype, device=matrix.device
        )
        # Each pass multiplies the share of an eigenvector by its eigenvalue; QR keeps the columns
        # from all turning towards the first one.
        for _ in range(passes):
            basis = torch.linalg.qr(_scaled_product(matrix, basis, scale)).Q
        values, rotation = torch.linalg.eigh(basis.T @ _scaled_product(matrix, basis, scale))
        # The mean eigenvalue of the rest: the trace of the scaled H is `columns`.
        rest = (columns - values.sum()) / max(columns - rank, 1)
        # D supplies about `rest` in every direction, so that F only holds the excess.
        factor = (basis @ rotation) * (values - rest).clamp_min(0).sqrt()
        # D takes what F leaves of the unit diagonal; the bound keeps D positive.
        diagonal = (1 - factor.square().sum(1)).clamp_min(0.01)
        return LowRankModel(diagonal * scale.square(), factor * scale[:, None])

    def on(self, kept: Tensor) -> "LowRankOnKept":
        """Restrict the model to kept (rows, columns), of zeros and ones."""
        rank = self.factor.shape[1]
        whitened = self.factor / self.diagonal.sqrt()[:, None]
        first, second = torch.triu_indices(rank, rank, device=kept.device)
        # F_UᵀD_U⁻¹F_U of all rows is a product of `kept` with all products of two columns of the
        # whitened F. It is symmetric: only the upper triangle is computed, then copied to both.
        packed = kept.new_empty(len(kept), len(first))
        for start, stop in split_range(0, len(first), _PAIRS):
            pairs = whitened[:, first[start:stop]].mul_(whitened[:, second[start:stop]])
            packed[:, start:stop] = kept @ pairs
        index = torch.empty(rank, rank, dtype=torch.int64, device=kept.device)
        index[first, second] = index[second, first] = torch.arange(len(first), device=kept.device)
        core = packed.index_select(1, index.flatten()).view(-1, rank, rank)
        # The eigenvalues of I + F_UᵀD_U⁻¹F_U are at least 1, so that its inverse is bounded.
        core.diagonal(dim1=1, dim2=2).add_(1)
        inverse_diagonal = self.diagonal.reciprocal()
        spread = (self.factor * inverse_diagonal[:, None]).T.contiguous()
        return LowRankOnKept(
            kept * inverse_diagonal, self.factor, spread, torch.linalg.inv(core), kept
        )


@dataclass(frozen=True)
class LowRankOnKept:
    """The preconditioner (D_U + F_U F_Uᵀ)⁻¹, by Woodbury's formula."""

    inverse_diagonal: Tensor  # that of D⁻¹ on U and zero elsewhere, (rows, columns)
    factor: Tensor  # F, (columns, rank)
    spread: Tensor  # FᵀD⁻¹, (rank, columns)
    core: Tensor  # (I + F_UᵀD_U⁻¹F_U)⁻¹ of each row, (rows, rank, rank)
    kept: Tensor  # U, (rows, columns), of zeros and ones

    def __call__(self, gradient: Tensor, z: Tensor, work: Tensor) -> None:
        """Set z (rows, columns) to (D_U + F_U F_Uᵀ)⁻¹ times the gradient."""
        del work
        torch.mul(gradient, self.inverse_diagonal, out=z)
        # z is zero outside U here, so that the product with all of F is the one with F_U.
        along = torch.bmm(self.core, (z @ self.factor).unsqueeze(2)).squeeze(2)
        z.addmm_(along, self.spread, alpha=-1).mul_(self.kept)


class ConjugateGradients:
    """An iteration that moves x towards the optimum on the kept set, in place.

    The caller owns the loop: it computes the `energies`, a measure of the distance to the optimum,
    and takes a `step` while they are too large. The `gradient` (w − x)H, which vanishes on U at the
    optimum, is updated in place along with x; the caller may overwrite it by its exact value
    between two steps. `precondition` sets z to approximately (H_UU)⁻¹ times the gradient on U.
    """

    def __init__(
        self, x: Tensor, gradient: Tensor, times_matrix: Product, precondition: Preconditioner
    ) -> None:
        self.iterations = 0
        self._x, self._gradient, self._times_matrix = x, gradient, times_matrix
        self._precondition = precondition
        # All large tensors are allocated once: on a CPU, fresh memory costs more than arithmetic.
        self._z, self._image = torch.empty_like(x), torch.empty_like(x)
        self._direction = torch.zeros_like(x)
        self._previous: Tensor | None = None

    def restart(self) -> None:
        """Discard the directions so far, after the caller has recomputed the gradient."""
        self._direction.zero_()
        self._previous = None

    def energies(self) -> Tensor:
        """Apply the preconditioner to the gradient, and return gradient·z of each row: (rows,)."""
        # The last step has used up pH, so that its memory serves as work space until the next one.
        self._precondition(self._gradient, self._z, self._image)
        return torch.mul(self._gradient, self._z, out=self._image).sum(1)

    def descend_rows(self, targets: Tensor, limit: int) -> None:
        """Step until the energy of each row is at most its target (rows,), or to iteration `limit`.

        Rows stay where they reach their targets, so that no row depends on the others.
        """
        while self.iterations < limit:
            energies = self.energies()
            # A length of zero, for an energy of zero, leaves a row and its gradient as they are.
            energies = torch.where(energies > targets, energies, 0)
            if not bool(energies.any()):
                return
            self.step(energies)

    def descend(self, target: float, limit: int) -> Tensor:
        """Step until the energies sum up to at most the target, or to iteration `limit`.

        Returns the energies of the last gradient, (rows,).
        """
        energies = self.energies()
        # `not … <=` also continues for NaN, up to the limit, which the caller's check reports.
        while self.iterations < limit and not float(energies.sum()) <= target:
            self.step(energies)
            energies = self.energies()
        return energies

    def step(self, energies: Tensor) -> None:
        """Move x along the next direction; `energies` are those of the present gradient."""
        # p ← z + βp with β = energy / previous energy; α = energy / (p H pᵀ); x ← x + αp;
        # gradient ← gradient − α·pH. α and β are numbers of each row, so that no row disturbs
        # another. z is free once p contains it: the curvatures are computed in its memory.
        # β of this form needs no earlier gradient, but one symmetric preconditioner for all steps.
        # p is zero outside U, as every z is, and so x never leaves its kept set.
        if self._previous is not None:
            self._direction.mul_(_quotient(energies, self._previous).unsqueeze(1))
        self._direction.add_(self._z)
        self._times_matrix(self._direction, self._image)
        curvature = torch.mul(self._direction, self._image, out=self._z).sum(1)
        length = _quotient(energies, curvature).unsqueeze(1)
        self._x.addcmul_(self._direction, length)
        self._gradient.addcmul_(self._image, length, value=-1)
        self._previous = energies
        self.iterations += 1


def _quotient(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Divide, with zero where the denominator vanishes: a row at its optimum up to rounding."""
    # Negative curvatures, which only rounding makes, and NaN fail the comparison too: the row then
    # stays where it is instead of moving away.
    tiny = torch.finfo(denominator.dtype).tiny
    return torch.where(denominator > tiny, numerator / denominator, 0)


def _scaled_product(matrix: Tensor, basis: Tensor, scale: Tensor) -> Tensor:
    """Return S⁻¹HS⁻¹ times a basis (columns, rank), with S = diag(scale)."""
    return (matrix @ (basis / scale[:, None])) / scale[:, None]
