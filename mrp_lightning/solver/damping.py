"""The damped Hessian H + λI: its factor, and what follows from it."""

import math
from functools import cached_property

import torch
from torch import Tensor

from mrp_lightning.errors import HessianError
from mrp_lightning.solver.conjugate_gradients import LowRankModel
from mrp_lightning.solver.ranges import split_range

_FLOAT32_SUFFICES = 1e4
_BFLOAT16_HELPS = 128
_MANY_COLUMNS = 1024
_PANEL = 256
"""Columns that are factorised at a time on a CPU."""


class NotPositiveDefiniteError(HessianError):
    """H + λI is not positive definite to its own precision."""


class DampedHessian:
    """H + λI, positive definite, with the triangular factor of its inverse.

    λ is `ratio` times the mean diagonal of H over the inputs that are not dead. H is kept, not
    copied or changed. The sum is factorised at once; whatever else follows from it is computed when
    it is first needed. Dead inputs, whose diagonal is zero, are cut off from all others, so no
    weight of theirs ever moves.

    Attributes:
        factor: Upper triangular U with UᵀU = (H + λI)⁻¹, (columns, columns).
        float32_suffices: Whether iterations in float32 can be trusted with this matrix.
        bfloat16_helps: Whether iterations whose products are rounded to bfloat16 lead nearer to a
            solution, and columns are so many that products take most of the time.

    Raises:
        NotPositiveDefiniteError: The matrix is not positive definite to the precision of its dtype.
    """

    def __init__(self, hessian: Tensor, dead: Tensor, mean_diagonal: float, ratio: float) -> None:
        self._hessian, self._dead, self._mean_diagonal = hessian, dead, mean_diagonal
        self.dtype = torch.float64 if hessian.dtype == torch.float64 else torch.float32
        self.columns = hessian.shape[0]
        self.ratio = ratio
        self.damping_used = ratio * mean_diagonal
        self.factor, inflation = self._factorise()
        self.float32_suffices = inflation <= _FLOAT32_SUFFICES
        self.bfloat16_helps = inflation <= _BFLOAT16_HELPS and self.columns >= _MANY_COLUMNS

    @cached_property
    def matrix(self) -> Tensor:
        """H + λI, exactly symmetric, (columns, columns)."""
        return self._matrix(self.dtype)

    @cached_property
    def inverse(self) -> Tensor:
        """(H + λI)⁻¹, (columns, columns)."""
        return self.factor.T @ self.factor

    @cached_property
    def residual_rounding(self) -> float:
        """The most that rounding can add to r H⁻¹ rᵀ for r = vH, relative to ‖v‖².

        Each r_j is off by about ε·‖v‖·‖H_:j‖, independently, with ε the precision of the products.
        """
        inverse_diagonal = self.factor.square().sum(0)
        norms = torch.linalg.vector_norm(self.matrix, dim=0)
        return torch.finfo(self.dtype).eps ** 2 * float((norms.square() * inverse_diagonal).sum())

    @cached_property
    def low_rank_model(self) -> LowRankModel:
        """The leading directions of H + λI, of rank √columns, for preconditioning."""
        model = LowRankModel.of(self.matrix, math.isqrt(self.columns - 1) + 1)
        # Rounding lets the leading directions reach into dead inputs; their weights must not move.
        model.factor[self._dead] = 0
        return model

    @cached_property
    def double(self) -> "DampedHessian":
        """The same matrix in float64, for refinement and for float64 weights."""
        if self.dtype == torch.float64:
            return self
        hessian = self._hessian.double()
        return DampedHessian(hessian, self._dead, self._mean_diagonal, self.ratio)

    def inverse_blocks(self, width: int) -> Tensor:
        """Diagonal blocks of (H + λI)⁻¹: (columns / width, width, width)."""
        columns = self.columns // width * width
        panels = self.factor[:, :columns].unflatten(1, (-1, width)).transpose(0, 1)
        return panels.mT @ panels

    def trailing_inverse_blocks(self, width: int) -> Tensor:
        """Leading blocks of the inverses of trailing parts: (columns / width, width, width).

        Block g is the leading block of ((H + λI)[j:, j:])⁻¹ with j = g·width: the inverse that
        holds when all columns before j are frozen, as they are in a column sweep.
        """
        corners = _diagonal_blocks(self.factor, width)
        return corners.mT @ corners

    def _matrix(self, dtype: torch.dtype) -> Tensor:
        matrix = self._hessian.to(dtype)
        matrix = (matrix + matrix.T).mul_(0.5)
        matrix.diagonal().add_(self.damping_used)
        if bool(self._dead.any()):
            matrix[self._dead] = 0
            matrix[:, self._dead] = 0
            # Any positive number would do: dead inputs meet no other.
            matrix.diagonal()[self._dead] = self.damping_used or self._mean_diagonal
        return matrix

    def _factorise(self) -> tuple[Tensor, float]:
        """Compute U, and how far rounding is inflated in iterations with the matrix.

        That is max_j H_jj [H⁻¹]_jj = 1 / (1 − R²_j), R²_j being the share of input j that the
        others explain. No scaling of inputs changes it, unlike the condition number, which one
        large channel makes huge and harmless. Where float32 fails, float64 may still find the
        factor.
        """
        precision = torch.finfo(self.dtype).eps
        for dtype in dict.fromkeys((self.dtype, torch.float64)):
            matrix = self._matrix(dtype)
            diagonal = matrix.diagonal().clone()
            # H = RRᵀ with R upper triangular comes from the Cholesky factor of H turned around;
            # U = R⁻¹ then needs no inverse of H and no second factorisation.
            lower = cholesky(matrix.flip(0, 1))
            del matrix
            if lower is not None:
                identity = torch.eye(self.columns, dtype=dtype, device=lower.device)
                factor = torch.linalg.solve_triangular(lower.flip(0, 1), identity, upper=True)
                inflation = float((diagonal * factor.square().sum(0)).max())
                if inflation <= (_FLOAT32_SUFFICES if dtype == torch.float32 else 0.1 / precision):
                    return factor.to(self.dtype), inflation
        raise NotPositiveDefiniteError(
            f"H + {self.damping_used:g}·I is not positive definite in {self.dtype}."
        )


def _diagonal_blocks(matrix: Tensor, width: int) -> Tensor:
    """The (n // width, width, width) blocks on the diagonal of a matrix (n, n)."""
    count = matrix.shape[0] // width
    blocks = matrix[: count * width, : count * width].view(count, width, count, width)
    return blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1).contiguous()


def cholesky(matrix: Tensor) -> Tensor | None:
    """The lower triangular L with LLᵀ = A (columns, columns); `None` if A is not positive definite.

    On a CPU panel by panel: torch clears the upper half of its factor element by element against
    the order in memory, which takes longer than the factorisation itself where columns are many.
    """
    columns = len(matrix)
    if matrix.device.type != "cpu" or columns <= 3 * _PANEL:
        factor, info = torch.linalg.cholesky_ex(matrix)
        return factor if int(info) == 0 else None
    # Column after column, as torch's own factor lies and LAPACK takes it. The part right of and
    # below the panels so far holds what is left of A once they are taken off.
    factor = matrix.clone().T
    for start, stop in split_range(0, columns, _PANEL):
        panel, rest = slice(start, stop), slice(stop, columns)
        corner, info = torch.linalg.cholesky_ex(factor[panel, panel])
        if int(info) != 0:
            return None
        below = torch.linalg.solve_triangular(corner, factor[rest, panel].T, upper=False)
        factor[panel, panel], factor[panel, rest] = corner, 0
        factor[rest, panel] = below.T
        factor[rest, rest].addmm_(below.T, below, alpha=-1)
    return factor
