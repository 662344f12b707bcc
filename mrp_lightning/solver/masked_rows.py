"""The last solve of the exact compensation: all rows at once, to a certified gap."""

import math
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from mrp_lightning.solver.arithmetic import ELEMENTS, has_bfloat16_units, split_range
from mrp_lightning.solver.conjugate_gradients import (
    ConjugateGradients,
    InverseOnKept,
    Preconditioner,
    full_product,
    rounded_product,
)
from mrp_lightning.solver.hessian import DampedHessian

_STALLS = 3
"""The successive certificates that may fail to halve the bound. Slow modes of the iteration delay
it for a while, rounding for ever."""
_LIMIT = 500
"""The most iterations with one preconditioner."""
_WINDOW = 20
"""The number of iterations from which those still to come are forecast."""
_DIGITS = 1e-3
"""The energy, relative to that of the last exact gradient, at which rounded products stop."""
_MARGIN = 1 / 3
"""The energy, relative to the one that suffices, at which the last round of these stops."""
_LONG = 100
"""The forecast of iterations above which another preconditioner is tried."""


class MaskedRows:
    """The systems H_UU x_U = (H w)_U of some rows; x (rows, columns) is improved in place."""

    def __init__(self, weight: Tensor, x: Tensor, pruned: Tensor, damped: DampedHessian) -> None:
        self.weight, self.x, self.gradient = weight, x, torch.empty_like(x)
        self.kept = (~pruned).to(x.dtype)
        self.damped = damped
        # bound: ½ Σ r (H⁻¹)_UU rᵀ for the residual r, at least the excess ½ Σ r (H_UU)⁻¹ rᵀ of the
        # damped loss of x over the optimum, since (H_UU)⁻¹ ≼ (H⁻¹)_UU. hidden: the part of the
        # bound that accounts for the rounding of r. loss: ½ Σ (w − x) H (w − x)ᵀ.
        self.bound, self.hidden, self.loss = math.inf, 0.0, math.inf
        self._renew()

    @property
    def gap(self) -> float:
        """The bound on the distance to the optimal loss, relative to the loss."""
        return relative(self.bound, self.loss)

    def certify(self) -> None:
        """Recompute the gradient, the bound and the loss from x alone."""
        self._renew()
        self._bound_gradient()

    def _bound_gradient(self) -> None:
        """Compute the bound from the gradient, which must be that of `_renew`."""
        # r H⁻¹ rᵀ = ‖r Uᵀ‖², which cannot come out negative.
        energy = ((self.gradient * self.kept) @ self.damped.factor.T).square_().sum()
        self.bound = float(energy) / 2 + self.hidden

    def _renew(self) -> None:
        """Recompute the gradient and the loss from x, and what rounding may hide in the former."""
        change = self.weight - self.x
        torch.mm(change, self.damped.matrix, out=self.gradient)
        self.loss = float((change * self.gradient).sum()) / 2
        # The residual is itself rounded: a bound must include the most that this may hide.
        self.hidden = float(change.square_().sum()) * self.damped.residual_rounding / 2

    def refined(self) -> "MaskedRows":
        """Return the system in float64, started from this x, or from w if this x is not finite."""
        weight, x = self.weight.double(), self.x.double()
        if not math.isfinite(self.loss):
            x = weight * self.kept
        system = MaskedRows(weight, x, self.kept == 0, self.damped.double)
        system._bound_gradient()
        return system

    def solve(self, tolerance: float, progress: Callable[[str], None]) -> int:
        """Iterate until the certified gap is within the tolerance or cannot improve.

        Returns the number of iterations. This differs from textbook preconditioned CG in that
        1. all rows share the products with H, but not the scalars: each has steps of its own, and a
           row that is at its optimum stays there (`_quotient`);
        2. a certificate stops it, ½ r (H⁻¹)_UU rᵀ with r recomputed from x, in place of the norm of
           the recursive residual, which is no bound and which rounding makes too small;
        3. it goes on from the recomputed gradient of each certificate and keeps its directions;
           after rounds of rounded products it restarts, since these are not conjugate;
        4. the forecast of the iterations to come chooses the preconditioner: a low-rank model of
           H_UU, then (H⁻¹)_UU; if both are slow, each row is factorised, whose cost is known;
        5. bfloat16 products take the first digits on devices with units for it, each round from an
           exact gradient, as in iterative refinement.
        """
        iterations = 0
        rounds = has_bfloat16_units(self.x.device) and self.damped.bfloat16_helps
        # Factorising a row of n kept columns costs n³ multiply-adds up to a constant, an iteration
        # columns² a row: so many iterations are worth as much.
        patience = max(_WINDOW, float(self.kept.sum(1).max()) ** 3 / self.x.shape[1] ** 2)
        for precondition, limit in (
            (lambda: self.damped.low_rank_model.on(self.kept), min(_LONG, patience)),
            (lambda: InverseOnKept(full_product(self.damped.inverse), self.kept), patience / 2),
        ):
            preconditioner = precondition()
            if rounds:
                iterations += self._descend_rounded(preconditioner, tolerance, progress)
                rounds = False
            iterations += self._descend(preconditioner, tolerance, limit, progress)
            # Where rounding hides the gap, more iterations cannot certify it: float64 must.
            if self.gap <= tolerance or self._rounding_hides(tolerance):
                return iterations
        self._factorise_rows()
        return iterations

    def _descend_rounded(
        self, precondition: Preconditioner, tolerance: float, progress: Callable[[str], None]
    ) -> int:
        """Iterate in rounds of rounded products, each from an exact gradient; return the number."""
        # Rounded products are good for about three digits of the energy at the start of a round.
        times_matrix = rounded_product(self.damped.matrix, self.damped.delicate)
        descent = ConjugateGradients(self.x, self.gradient, times_matrix, precondition)
        energy = float(descent.energies().sum())
        while energy > (goal := tolerance * self.loss / 2):
            # A round ends at its target, at three digits or after a window: rounding dominates.
            start, previous = self.x.clone(), energy
            # Below the goal, since the energy of the exact gradient comes out a little higher: one
            # more rounded step is cheaper than a round, or steps in full, for the rest.
            aim = max(_MARGIN * goal, _DIGITS * previous)
            descent.descend(aim, descent.iterations + _WINDOW)
            progress(f"iteration {descent.iterations}")
            self._renew()
            descent.restart()
            energy = float(descent.energies().sum())
            # A round that gains less than a factor of 4 is near the limit of bfloat16.
            if not energy < previous / 4:
                if not energy < previous:  # this round led away from the optimum: undo it
                    self.x.copy_(start)
                    self._renew()
                break
        return descent.iterations

    def _descend(
        self,
        precondition: Preconditioner,
        tolerance: float,
        patience: float,
        progress: Callable[[str], None],
    ) -> int:
        """Iterate until the certificate holds or stalls, or too many steps are still to come.

        The energies of the iteration decide when a certificate is worth its cost: they are about a
        third of the bound with the low-rank model. The iteration ends early if the forecast exceeds
        `patience` steps. Returns the number of iterations.
        """
        times_matrix = full_product(self.damped.matrix)
        descent = ConjugateGradients(self.x, self.gradient, times_matrix, precondition)
        target = tolerance * self.loss / 2
        stalls, mark = 0, math.inf
        while descent.iterations < _LIMIT:
            energies = descent.energies()
            energy = float(energies.sum())
            if not energy > target:  # also where it is NaN
                previous = self.bound
                # Every stage of `solve` ends with a renewed gradient: before the first step of the
                # next one it is exact.
                if descent.iterations:
                    self._renew()
                self._bound_gradient()
                stalls = 0 if self.bound <= previous / 2 else stalls + 1
                if self.gap <= tolerance or self._rounding_hides(tolerance):
                    return descent.iterations
                if stalls == _STALLS or not energy > 0:
                    return descent.iterations
                # The bound must fall to tolerance · loss, so the energy by the same factor from its
                # present value; half of that leaves a margin.
                target = energy * tolerance * self.loss / self.bound / 2
                energies = descent.energies()  # of the exact gradient that `_renew` has set
            # The forecast is that of the mean rate over the last window.
            if descent.iterations % _WINDOW == 0:
                if descent.iterations and _steps_to_come(mark, energy, target) > patience:
                    break
                mark = energy
            descent.step(energies)
            progress(f"iteration {descent.iterations}")
        self.certify()
        return descent.iterations

    def _rounding_hides(self, tolerance: float) -> bool:
        """Return whether this precision cannot certify any gap within the tolerance."""
        return self.hidden > tolerance * self.loss

    def _factorise_rows(self) -> None:
        """Solve H_UU x_U = (H w)_U by Cholesky's factorisation, a matrix for each row."""
        counts = self.kept.sum(1, dtype=torch.int64)
        most_kept = int(counts.max())
        matrix = self.damped.matrix
        right = self.weight @ matrix
        for start, stop in split_range(0, len(counts), max(1, ELEMENTS // max(1, most_kept) ** 2)):
            rows = slice(start, stop)
            # Batched factorisation needs systems of one size: the kept columns of each row are
            # padded with removed ones, whose equations become x = 0.
            columns = self.kept[rows].argsort(dim=1, descending=True, stable=True)[:, :most_kept]
            kept = self.kept[rows].gather(1, columns)
            systems = matrix[columns[:, :, None], columns[:, None, :]]
            systems *= kept[:, :, None] * kept[:, None, :]
            systems.diagonal(dim1=1, dim2=2).add_(1 - kept)
            factors, info = torch.linalg.cholesky_ex(systems)
            if bool(info.any()):
                continue  # indefinite in this precision: the iteration's result stays
            sides = (right[rows].gather(1, columns) * kept).unsqueeze(2)
            solved = torch.cholesky_solve(sides, factors).squeeze(2)
            self.x[rows].scatter_(1, columns, solved * kept)
        self.certify()


def _steps_to_come(previous: float, energy: float, target: float) -> float:
    """Forecast the steps until the energy is at the target, from its fall in the last window."""
    if not 0 < energy < previous:
        return math.inf
    return _WINDOW * math.log(max(energy / target, 1)) / math.log(previous / energy)


def relative(bound: float, loss: float) -> float:
    """Return the bound relative to the loss, or zero if the bound is zero, whatever the loss."""
    # Not `bound > 0`: NaN must not pass for a gap of zero.
    return 0.0 if bound == 0 else bound / max(loss, sys.float_info.min)
