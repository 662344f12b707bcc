"""The masked systems of some rows of a weight."""

import math
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from mrp_lightning.solver.conjugate_gradients import (
    ConjugateGradients,
    InverseOnKept,
    Preconditioner,
    full_product,
    rounded_product,
)
from mrp_lightning.solver.damping import DampedHessian
from mrp_lightning.solver.precision import has_bfloat16_units
from mrp_lightning.solver.ranges import ELEMENTS, split_range

_STALLS = 3
"""Certificates in turn that may fail to halve the bound. Slow modes of the iteration hold it up for
a while, rounding for ever."""
_LIMIT = 500
"""Most iterations with one preconditioner."""
_WINDOW = 20
"""Iterations from which the number of those to come is forecast."""
_DIGITS = 1e-2
"""The energy relative to that of the last exact gradient at which rounded products have done."""
_LONG = 100
"""Iterations to come beyond which another preconditioner is tried."""


class MaskedRows:
    """The masked system of some rows; x (rows, columns) is improved in place."""

    def __init__(
        self, weight: Tensor, x: Tensor, gradient: Tensor, pruned: Tensor, damped: DampedHessian
    ) -> None:
        self.weight, self.x, self.gradient = weight, x, gradient
        self.kept = (~pruned).to(x.dtype)
        self.damped = damped
        # ½ Σ r (H⁻¹)_UU rᵀ, by which the damped loss of x exceeds the optimal one at most, and the
        # part of it that allows for the rounding of r.
        self.bound, self.hidden = math.inf, 0.0
        self.loss = float(((weight - x) * gradient).sum()) / 2  # ½ Σ (w − x) H (w − x)ᵀ

    @property
    def gap(self) -> float:
        """The bound relative to the loss."""
        return relative(self.bound, self.loss)

    def certify(self) -> None:
        """Compute the gradient, the bound and the loss afresh, from x alone."""
        change = self._renew()
        # r H⁻¹ rᵀ = ‖r Uᵀ‖², which cannot come out negative.
        energy = ((self.gradient * self.kept) @ self.damped.factor.T).square_().sum()
        # The residual is itself rounded; a bound must allow for what that may hide.
        self.hidden = float(change.square_().sum()) * self.damped.residual_rounding / 2
        self.bound = float(energy) / 2 + self.hidden

    def _renew(self) -> Tensor:
        """Compute the gradient and the loss afresh from x: the change of the weight, w − x."""
        change = self.weight - self.x
        torch.mm(change, self.damped.matrix, out=self.gradient)
        self.loss = float((change * self.gradient).sum()) / 2
        return change

    def refined(self) -> "MaskedRows":
        """The same system in float64, from where this one is (or from the start, had it failed)."""
        weight, x = self.weight.double(), self.x.double()
        if not math.isfinite(self.loss):
            x = weight * self.kept
        system = MaskedRows(weight, x, torch.zeros_like(x), self.kept == 0, self.damped.double)
        system.certify()
        return system

    def solve(self, tolerance: float, tell: Callable[[str], None]) -> int:
        """Go on until the certified gap is within the tolerance or can get no better.

        Where conjugate gradients are slow they get another preconditioner, and where they are slow
        with that too the rows are solved directly. Returns the number of iterations.
        """
        iterations = 0
        narrow = self.x.dtype == torch.float32 and has_bfloat16_units(self.x.device)
        rounds = narrow and self.damped.bfloat16_helps
        patience = max(_WINDOW, float(self.kept.sum(1).max()) ** 3 / self.x.shape[1] ** 2)
        for precondition, limit in (
            (lambda: self.damped.low_rank_model.on(self.kept), min(_LONG, patience)),
            (lambda: InverseOnKept(full_product(self.damped.inverse), self.kept), patience / 2),
        ):
            preconditioner = precondition()
            if rounds:
                iterations += self._descend_rounded(preconditioner, tolerance, tell)
                rounds = False
            iterations += self._descend(preconditioner, tolerance, limit, tell)
            if self.gap <= tolerance or self._rounding_hides(tolerance):
                return iterations
        self._factorise_rows()
        return iterations

    def _descend_rounded(
        self, precondition: Preconditioner, tolerance: float, tell: Callable[[str], None]
    ) -> int:
        """Iterate with rounded products, again and again from exact gradients, while it helps.

        Each round seeks what the exact gradient at its start asks for. Rounded products are good
        for about two digits of that. Returns the number of iterations.
        """
        times_matrix = rounded_product(self.damped.matrix)
        descent = ConjugateGradients(self.x, self.gradient, times_matrix, precondition)
        energies = descent.energies()
        while (before := float(energies.sum())) > tolerance * self.loss / 2:
            start, most = self.x.clone(), descent.iterations + _WINDOW
            target = max(tolerance * self.loss / 2, _DIGITS * before)
            while descent.iterations < most and float(energies.sum()) > target:
                descent.step(energies)
                energies = descent.energies()
                tell(f"iteration {descent.iterations}")
            self._renew()
            descent.restart()
            energies = descent.energies()
            if not float(energies.sum()) < before / 4:
                if not float(energies.sum()) < before:
                    self.x.copy_(start)
                    self._renew()
                break
        return descent.iterations

    def _descend(
        self,
        precondition: Preconditioner,
        tolerance: float,
        patience: float,
        tell: Callable[[str], None],
    ) -> int:
        """Iterate until the certificate holds or stalls, or too many steps are still to come.

        The energies of the iteration tell when a certificate is worth its price. They are no bound
        themselves, but proportional to one: about a third of it with the low-rank model. It gives
        up where more than `patience` steps are to come, as forecast from those taken. Returns the
        number of iterations.
        """
        times_matrix = full_product(self.damped.matrix)
        descent = ConjugateGradients(self.x, self.gradient, times_matrix, precondition)
        target = tolerance * self.loss / 2
        stalls, mark = 0, math.inf
        while descent.iterations < _LIMIT:
            energies = descent.energies()
            energy = float(energies.sum())
            if not energy > target:  # also where it is NaN
                before = self.bound
                self.certify()
                stalls = 0 if self.bound <= before / 2 else stalls + 1
                if self.gap <= tolerance or self._rounding_hides(tolerance):
                    return descent.iterations
                if stalls == _STALLS or not energy > 0:
                    return descent.iterations
                # The bound must fall to tolerance · loss, so the energy by the same factor from
                # where it is now; half of that leaves a margin.
                target = energy * tolerance * self.loss / self.bound / 2
                # Go on from the exact gradient, which the certificate has put in place.
                energies = descent.energies()
            if descent.iterations % _WINDOW == 0:
                if descent.iterations and _steps_to_come(mark, energy, target) > patience:
                    break
                mark = energy
            descent.step(energies)
            tell(f"iteration {descent.iterations}")
        self.certify()
        return descent.iterations

    def _rounding_hides(self, tolerance: float) -> bool:
        """Whether no gap within the tolerance can be told in this precision."""
        return self.hidden > tolerance * self.loss

    def _factorise_rows(self) -> None:
        """Solve H_UU x_U = (H w)_U by Cholesky's factorisation, a matrix for each row."""
        counts = self.kept.sum(1, dtype=torch.int64)
        most = int(counts.max())
        matrix = self.damped.matrix
        sought = self.weight @ matrix
        for start, stop in split_range(0, len(counts), max(1, ELEMENTS // max(1, most) ** 2)):
            rows = slice(start, stop)
            # The kept columns of each row, filled up with removed ones where they are fewer.
            places = self.kept[rows].argsort(dim=1, descending=True, stable=True)[:, :most]
            kept = self.kept[rows].gather(1, places)
            systems = matrix[places[:, :, None], places[:, None, :]]
            systems *= kept[:, :, None] * kept[:, None, :]
            systems.diagonal(dim1=1, dim2=2).add_(1 - kept)
            factors, info = torch.linalg.cholesky_ex(systems)
            if bool(info.any()):
                continue  # indefinite in this precision: what the iteration reached stays
            right = (sought[rows].gather(1, places) * kept).unsqueeze(2)
            solved = torch.cholesky_solve(right, factors).squeeze(2)
            self.x[rows].scatter_(1, places, solved * kept)
        self.certify()


def _steps_to_come(before: float, energy: float, target: float) -> float:
    """Forecast the steps until the energy is at the target, from its fall in the last window."""
    if not 0 < energy < before:
        return math.inf
    return _WINDOW * math.log(max(energy / target, 1)) / math.log(before / energy)


def relative(bound: float, loss: float) -> float:
    """The bound relative to the loss; zero where the bound is zero, whatever the loss."""
    # Not `bound > 0`: what is not a number must not pass for a gap of zero.
    return 0.0 if bound == 0 else bound / max(loss, sys.float_info.min)
