"""The Hessian of one input: checked once, shared by all layers that read the input."""

import warnings
from typing import NoReturn

import torch
from torch import Tensor

from mrp_lightning.errors import HessianError, NumericalWarning
from mrp_lightning.solver.damping import DampedHessian, NotPositiveDefiniteError
from mrp_lightning.solver.ranges import split_range

_FIRST_RAISE, _LARGEST = 1e-6, 10.0
_CAUSES = (
    "Likely causes: too few calibration tokens, NaN or Inf in the activations, or a matrix that is "
    "not 2·XᵀX / tokens."
)


class InputHessian:
    """H = 2·XᵀX / tokens of the inputs X, checked, and H + λI for the methods that need it.

    Make it once for each *input*: layers that read the same activations (q, k and v; gate and up)
    share it. What only needs H itself, such as the masks of magnitude and Wanda, factorises
    nothing: for them H may be singular, and λ is added to nothing. H is kept, not copied or
    changed.

    Raises:
        HessianError: H is not a square floating-point matrix, not symmetric, has NaN or Inf or a
            negative diagonal, or is zero.
    """

    def __init__(self, hessian: Tensor, *, name: str | None = None) -> None:
        self.label = f"layer `{name}`" if name else "layer"  # in messages
        if hessian.ndim != 2 or hessian.shape[0] != hessian.shape[1] or hessian.shape[0] == 0:
            self._fail(
                f"the Hessian must be square, (columns, columns); got {tuple(hessian.shape)}"
            )
        if not hessian.is_floating_point():
            self._fail(f"the Hessian must be floating point; got {hessian.dtype}")
        self.hessian = hessian.detach()
        # The dtype to compute in.
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
        self.dead = self.diagonal == 0  # bool (columns,): the inputs that were always zero
        self.dead_inputs = int(self.dead.sum())
        if self.dead_inputs == self.columns:
            self._fail("the Hessian is zero: the layer saw only zeros")
        self.mean_diagonal = float(self.diagonal[~self.dead].double().mean())
        self._damped: dict[float, DampedHessian] = {}

    def damped(self, damping: float) -> DampedHessian:
        """Return H + λI with λ = damping · mean(diag H), factorised when it is first asked for.

        If the matrix is not positive definite to its own precision, damping rises tenfold from
        max(damping, 1e-6) up to 10, with a `NumericalWarning` for each step.

        Raises:
            HessianError: H is indefinite past damping 10.
        """
        if damping not in self._damped:
            self._damped[damping] = self._settle(damping)
        return self._damped[damping]

    def _settle(self, damping: float) -> DampedHessian:
        ratio = damping
        while True:
            try:
                return DampedHessian(self.hessian, self.dead, self.mean_diagonal, ratio)
            except NotPositiveDefiniteError:
                before = ratio
            ratio = 10 * ratio if ratio >= _FIRST_RAISE else _FIRST_RAISE
            if ratio > _LARGEST * (1 + 1e-9):
                self._fail(f"the Hessian is not positive definite even with damping {before:g}")
            warnings.warn(
                f"{self.label}: the Hessian is not positive definite with damping {before:g}; "
                f"trying {ratio:g}. More calibration tokens would help.",
                NumericalWarning,
                stacklevel=3,
            )

    def _asymmetry(self) -> float:
        """The largest |H_ij − H_ji|, without a copy of H."""
        largest = 0.0
        for start, stop in split_range(0, self.columns, 1024):
            difference = self.hessian[start:stop] - self.hessian[:, start:stop].T
            largest = max(largest, float(difference.abs_().max()))
        return largest

    def _fail(self, problem: str) -> NoReturn:
        raise HessianError(f"{self.label}: {problem}. {_CAUSES}")
