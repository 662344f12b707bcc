"""The damped Hessian of one input, and what follows from it for all layers that read it."""

import math
import warnings
from functools import cached_property
from typing import NoReturn

import torch
from torch import Tensor

from mrp_lightning.errors import HessianError, NumericalWarning, OptionError
from mrp_lightning.solver.conjugate_gradients import LowRankModel
from mrp_lightning.solver.ranges import split_range

_FIRST_RAISE, _LARGEST = 1e-6, 10.0
_FLOAT32_SUFFICES = 1e4
_CAUSES = (
    "Likely causes: too few calibration tokens, NaN or Inf in the activations, or a matrix that is "
    "not 2·XᵀX / tokens."
)


class DampedHessian:
    """H + λI with λ = damping · mean(diag H), its inverse and its triangular factor.

    Prepare it once for each *input*: layers that read the same activations (q, k and v; gate and
    up) share it. Everything is computed when it is first needed. Dead inputs (zero on the diagonal)
    are left out of the mean and are cut off from all others, so no weight of theirs ever moves.

    Args:
        hessian: 2·XᵀX / tokens, (columns, columns), undamped. It is kept, not copied or changed.
        damping: fraction of the mean diagonal to add, ≥ 0. If the matrix is not positive definite
            to its own precision, damping rises tenfold from max(damping, 1e-6) up to 10, with a
            `NumericalWarning` for each step.
        name: the layer's name, for messages.

    Raises:
        HessianError: not a square floating-point matrix, not symmetric, NaN or Inf, all zero, a
            negative diagonal; or, when the factor is first needed, indefinite past damping 10.
    """

    def __init__(self, hessian: Tensor, damping: float, *, name: str | None = None) -> None:
        if not (isinstance(damping, int | float) and math.isfinite(damping) and damping >= 0):
            raise OptionError(f"`damping` must be a finite number ≥ 0; got {damping!r}.")
        self.name = name
        self.label = f"layer `{name}`" if name else "layer"
        if hessian.ndim != 2 or hessian.shape[0] != hessian.shape[1] or hessian.shape[0] == 0:
            self._fail(
                f"the Hessian must be square, (columns, columns); got {tuple(hessian.shape)}"
            )
        if not hessian.is_floating_point():
            self._fail(f"the Hessian must be floating point; got {hessian.dtype}")
        self.hessian = hessian.detach()
        self.dtype = torch.float64 if hessian.dtype == torch.float64 else torch.float32
        self.columns = hessian.shape[0]
        diagonal = self.hessian.diagonal().to(self.dtype)
        if not bool(self.hessian.isfinite().all()):
            self._fail("the Hessian holds NaN or Inf")
        if self._asymmetry() > 1e-3 * float(diagonal.abs().max()):
            self._fail("the Hessian is not symmetric")
        if bool((diagonal < 0).any()):
            self._fail("the Hessian has a negative diagonal, which no 2·XᵀX / tokens has")
        self.diagonal = diagonal.clone()
        self.dead = self.diagonal == 0
        self.dead_inputs = int(self.dead.sum())
        if self.dead_inputs == self.columns:
            self._fail("the Hessian is zero: the layer saw only zeros")
        live = self.diagonal[~self.dead].double()
        self._mean = float(live.mean())
        self._damping = float(damping)
        self._float32_suffices = True

    @property
    def damping_used(self) -> float:
        """λ, what is added to the diagonal (raised where that proved necessary)."""
        return self._damping * self._mean

    @property
    def ratio_used(self) -> float:
        """The fraction of the mean diagonal that is added (raised where that proved necessary)."""
        return self._damping

    @cached_property
    def factor(self) -> Tensor:
        """Upper triangular U with UᵀU = (H + λI)⁻¹, (columns, columns)."""
        damping = self._damping
        while True:
            self._damping = damping
            factor = self._factorise()
            if factor is not None:
                return factor
            damping = 10 * damping if damping >= _FIRST_RAISE else _FIRST_RAISE
            if damping > _LARGEST * (1 + 1e-9):
                self._fail(
                    f"the Hessian is not positive definite even with damping {self._damping:g}"
                )
            warnings.warn(
                f"{self.label}: the Hessian is not positive definite with damping "
                f"{self._damping:g}; trying {damping:g}. More calibration tokens would help.",
                NumericalWarning,
                stacklevel=2,
            )

    @property
    def float32_suffices(self) -> bool:
        """Whether iterations in float32 can be trusted with this matrix."""
        self.factor  # noqa: B018  (settles it)
        return self._float32_suffices

    @cached_property
    def matrix(self) -> Tensor:
        """H + λI, exactly symmetric, (columns, columns)."""
        self.factor  # noqa: B018  (settles λ)
        return self._damped(self.dtype)

    @cached_property
    def inverse(self) -> Tensor:
        """(H + λI)⁻¹, (columns, columns)."""
        return self.factor.T @ self.factor

    @cached_property
    def residual_rounding(self) -> float:
        """What rounding can add to r H⁻¹ rᵀ for r = vH, relative to ‖v‖².

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
        model.factor[self.dead] = 0
        return model

    @cached_property
    def double(self) -> "DampedHessian":
        """The same damped Hessian in float64, for refinement and for float64 weights."""
        if self.dtype == torch.float64:
            return self
        self.factor  # noqa: B018  (settles λ)
        return DampedHessian(self.hessian.double(), self._damping, name=self.name)

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

    def _damped(self, dtype: torch.dtype) -> Tensor:
        matrix = self.hessian.to(dtype)
        matrix = (matrix + matrix.T).mul_(0.5)
        matrix.diagonal().add_(self.damping_used)
        if self.dead_inputs:
            matrix[self.dead] = 0
            matrix[:, self.dead] = 0
            # Any positive number would do: dead inputs meet no other.
            matrix.diagonal()[self.dead] = self.damping_used or self._mean
        return matrix

    def _factorise(self) -> Tensor | None:
        """U for the present damping, or None where H + λI is singular to its own precision.

        The test is on max_j H_jj [H⁻¹]_jj = 1 / (1 − R²_j), R²_j being the share of input j that
        the others explain. No scaling of inputs changes it, unlike the condition number, which
        one large channel makes huge and harmless.
        """
        precision = torch.finfo(self.dtype).eps
        for dtype in (self.dtype, torch.float64):
            matrix = self._damped(dtype)
            diagonal = matrix.diagonal().clone()
            # H = RRᵀ with R upper triangular comes from the Cholesky factor of H turned around;
            # U = R⁻¹ then needs no inverse of H and no second factorisation.
            lower, info = torch.linalg.cholesky_ex(matrix.flip(0, 1))
            del matrix
            if int(info) == 0:
                identity = torch.eye(self.columns, dtype=dtype, device=lower.device)
                factor = torch.linalg.solve_triangular(lower.flip(0, 1), identity, upper=True)
                inflation = float((diagonal * factor.square().sum(0)).max())
                self._float32_suffices = inflation <= _FLOAT32_SUFFICES
                if inflation <= (_FLOAT32_SUFFICES if dtype == torch.float32 else 0.1 / precision):
                    return factor.to(self.dtype)
            if dtype == torch.float64:
                break
        return None

    def _asymmetry(self) -> float:
        """The largest |H_ij − H_ji|, without a copy of H."""
        largest = 0.0
        for start, stop in split_range(0, self.columns, 1024):
            difference = self.hessian[start:stop] - self.hessian[:, start:stop].T
            largest = max(largest, float(difference.abs_().max()))
        return largest

    def _fail(self, problem: str) -> NoReturn:
        raise HessianError(f"{self.label}: {problem}. {_CAUSES}")


def _diagonal_blocks(matrix: Tensor, width: int) -> Tensor:
    count = matrix.shape[0] // width
    blocks = matrix[: count * width, : count * width].view(count, width, count, width)
    return blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1).contiguous()
