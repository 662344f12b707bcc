"""Quantise kept weights to a grid of few bits, so that the layer's outputs change least.

For the weight ŵ of a compensation, the codes and scales of x on the grid minimise
½·tr((x − ŵ)(H + λI)(x − ŵ)ᵀ) with the removed weights zero. If ŵ is the optimum for the removed
weights, this is the increase of the loss: fixing weights at zero and fixing them at grid points are
one problem, solved one after the other.

The start is GPTQ's sweep over the columns (Frantar et al., 2023), which chooses scales when it
reaches their columns and feeds the errors forward. Then coordinate descent sets each scale to its
optimum for its codes, and each code to its optimum for all others: no step increases the loss.
"""

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from mrp_lightning.solver.arithmetic import by_rows, split_range
from mrp_lightning.solver.grid import Grid, GridParameters
from mrp_lightning.solver.hessian import DampedHessian
from mrp_lightning.solver.problem import Problem

_FACTORS = torch.logspace(-0.35, 0.2, 30).tolist()
"""The scales in the search, relative to the one that maps the largest weight to the largest
code."""
_CLIPPED = (-0.02, 0.0, 0.03, 0.07, 0.12, 0.18)
"""The fractions of a group's range below and above which a search with minima clips weights."""
_PASSES = 5
"""Rounds of descent after the sweep; the first few gain most."""
_PANEL = 128
"""Columns of a panel, whose changes reach the other columns at once, unless groups are larger."""
_SCALES_AT_A_TIME = 2**20
"""The number of elements of the temporaries of a search for scales."""

_Units = tuple[Tensor | None, Tensor | None]


def on_grid(
    problem: Problem, weight: Tensor, pruned: Tensor, grid: Grid
) -> tuple[Tensor, GridParameters]:
    """Quantise the kept weights to the grid, so that the loss relative to `weight` is small.

    The weight (rows, columns) is compensated for `pruned`, bool (rows, columns), True = removed.
    The H + λI of the problem measures changes. Returns the weight on the grid, in the same dtype,
    and its parameters, in float32. The loss of each row is at most that after the sweep alone.
    """
    # Errors of feedback and gradient grow with the inflation that `float32_suffices` bounds.
    damped = problem.damped if problem.damped.float32_suffices else problem.damped.double
    quantised = torch.empty_like(weight)
    empty = weight.new_empty(len(weight), grid.groups(weight.shape[1]), dtype=torch.float32)
    chosen = GridParameters(empty, torch.empty_like(empty) if grid.minimum else None)

    def quantise(rows: slice) -> None:
        # Transposed, so that a column of the weight is contiguous.
        target = weight[rows].T.to(damped.dtype).contiguous()
        kept = (~pruned[rows].T).to(damped.dtype).contiguous()
        descent = _Descent(target * kept, kept, damped, grid)
        descent.sweep()
        swept, loss = [numbers.clone() for numbers in descent.numbers()], descent.losses()
        for number in range(_PASSES):
            descent.improve()
            problem.progress(f"pass {number + 1}/{_PASSES} on the grid")
        # Descent increases the loss only by rounding errors, whose rows keep the sweep's result.
        better = descent.losses() < loss
        pairs = zip(descent.numbers(), swept, strict=True)
        codes, *numbers = [torch.where(better, last, first).T for last, first in pairs]
        parameters = GridParameters(*numbers).map(Tensor.float)
        # By the engines' formula from float32 parameters: the stored codes give these values again.
        quantised[rows] = grid.values(codes, parameters).to(weight.dtype)
        chosen.scales[rows] = parameters.scales
        if chosen.minima is not None and parameters.minima is not None:
            chosen.minima[rows] = parameters.minima

    by_rows(quantise, *weight.shape)
    return quantised, chosen


class _Descent:
    """The codes and scales of some rows of a weight.

    Tensors are (columns, rows), those of scales, minima and their units (groups, rows). `target` is
    ŵ, with zeros for removed weights; `kept` is one for kept weights and zero for removed ones.
    """

    def __init__(self, target: Tensor, kept: Tensor, damped: DampedHessian, grid: Grid) -> None:
        self.target, self.kept, self.damped, self.grid = target, kept, damped, grid
        columns, rows = target.shape
        self.codes = torch.zeros_like(target)
        self.scales = target.new_ones(grid.groups(columns), rows)
        self.minima = torch.zeros_like(self.scales) if grid.minimum else None
        ones = None if grid.steps is None else torch.ones_like(self.scales)
        self.units = ones, None if ones is None else ones.clone()  # of the scales and the minima

    def numbers(self) -> list[Tensor]:
        """Return codes, scales and, if the grid has them, minima, each (…, rows)."""
        return [self.codes, self.scales, *([] if self.minima is None else [self.minima])]

    @property
    def x(self) -> Tensor:
        """The weight on the grid, (columns, rows): codes times scales, less the minima."""
        return self._x(slice(0, len(self.codes)))

    def _x(self, columns: slice) -> Tensor:
        """Return columns of the weight on the grid; they must begin with a whole group."""
        size, codes = self.grid.group_size, self.codes[columns]
        groups = slice(columns.start // size, -(-columns.stop // size))
        x = codes * self.scales[groups].repeat_interleave(size, 0)[: len(codes)]
        if self.minima is not None:
            x -= self.minima[groups].repeat_interleave(size, 0)[: len(codes)]
        return x

    def losses(self) -> Tensor:
        """Return ½ (x − ŵ)(H + λI)(x − ŵ)ᵀ of each row: (rows,)."""
        change = self.x - self.target
        return (change * (self.damped.matrix @ change)).sum(0) / 2

    def sweep(self) -> None:
        """Round column after column to the grid, and let the later columns compensate."""
        swept, factor = self.target.clone(), self.damped.factor
        # An error e in column j moves each later column k by −e·U_jk / U_jj: the optimum of the
        # later columns if all up to j are fixed.
        moves = factor / factor.diagonal()[:, None]
        # 1. A group's scales are chosen when the sweep reaches it, from weights that hold the
        #    feedback of all columns before; earlier ones would fit weights that still change.
        # 2. Later panels get the feedback of a panel in one product: none of their columns is
        #    rounded before it.
        for panel in self._panels():
            errors = torch.empty_like(swept[panel])
            for group, piece in self._pieces(panel):
                if piece.start == group * self.grid.group_size:
                    self._choose_units(group, swept)
                    self._choose(group, swept)
                codes, scale = self.codes[piece], self.scales[group]
                # The step of a removed weight is 0, so that its whole value is an error to
                # compensate for. The code that it gets meanwhile is cleared after the loop.
                steps, within = self.kept[piece] * scale, moves[piece, piece]
                values, missed = swept[piece], errors[piece.start - panel.start :][: len(codes)]
                if self.minima is not None:
                    values += self.minima[group]  # to be a multiple of the scale
                # As in the column sweep of a pruning, with w_j − q_j in place of w_j.
                for j in range(len(codes)):
                    code = self.grid.nearest_(torch.div(values[j], scale, out=codes[j]))
                    torch.addcmul(values[j], code, steps[j], value=-1, out=missed[j])
                    values[j + 1 :].addr_(within[j, j + 1 :], missed[j], alpha=-1)
                codes.mul_(self.kept[piece])
                later = slice(piece.stop, panel.stop)
                swept[later].addmm_(moves[piece, later].T, missed, alpha=-1)
            swept[panel.stop :].addmm_(moves[panel, panel.stop :].T, errors, alpha=-1)

    def improve(self) -> None:
        """Set each scale to its optimum for its codes, and each code to its optimum, in turn."""
        matrix = self.damped.matrix
        # Computed anew in each pass, so that errors of its updates do not add up over the passes.
        gradient = matrix @ (self.x - self.target)
        for panel in self._panels():
            previous = self._x(panel)
            # A view: later groups of the panel need the gradient after the steps of earlier ones.
            inside = gradient[panel]
            for group, piece in self._pieces(panel):
                if piece.start == group * self.grid.group_size:
                    if self.minima is None:
                        self._improve_scales(group, inside, panel)
                    else:
                        self._improve_with_minima(group, inside, panel)
                self._improve_codes(group, piece, inside, panel)
            # The panel's changes reach the gradient of the other columns at once.
            moved = self._x(panel) - previous
            gradient[: panel.start].addmm_(matrix[: panel.start, panel], moved)
            gradient[panel.stop :].addmm_(matrix[panel.stop :, panel], moved)

    def _improve_codes(self, group: int, piece: slice, gradient: Tensor, panel: slice) -> None:
        """Set the codes of some columns to their optima in turn; the gradient is the panel's."""
        own = slice(piece.start - panel.start, piece.stop - panel.start)
        matrix, codes, scale = self.damped.matrix, self.codes[piece], self.scales[group]
        within, steps = matrix[piece, piece], self.kept[piece] * scale
        minus_previous, moved = codes * -steps, torch.empty_like(codes)
        # The minimum is at x_j − g_j / H_jj, in codes c_j − g_j / (H_jj·scale). The divisor is the
        # scale and not the step, which is zero for removed weights. The smallest scales may give a
        # number beyond the largest one, and infinity times a slope of zero is NaN.
        per_code = -1 / (within.diagonal()[:, None] * scale)
        per_code.clamp_(min=torch.finfo(per_code.dtype).min)
        slope = gradient[own].clone()
        # The loss as a function of x_j alone is a parabola: the code nearest to its minimum is the
        # best.
        for j in range(len(codes)):
            wanted = torch.addcmul(codes[j], slope[j], per_code[j], out=codes[j])
            code = self.grid.nearest_(wanted)
            torch.addcmul(minus_previous[j], code, steps[j], out=moved[j])
            slope[j + 1 :].addr_(within[j, j + 1 :], moved[j])
        codes.mul_(self.kept[piece])
        gradient.addmm_(matrix[panel, piece], moved)

    def _choose_units(self, group: int, swept: Tensor) -> None:
        """Choose the units that groups share, at the first group, from scales without units."""
        if self.grid.steps is None or group % self.grid.together:
            return
        # The later groups still lack feedback: their free scales serve for the unit alone, and the
        # sweep chooses their scales anew when it reaches them.
        groups = range(group, min(group + self.grid.together, len(self.scales)))
        free = zip(*(self._search(each, swept, (None, None)) for each in groups), strict=True)
        # Scales come first, then minima, which not every grid has.
        for units, scales in zip(self.units, free, strict=False):
            assert units is not None
            units[groups.start : groups.stop] = self.grid.choose_units(torch.stack(scales))

    def _units_of(self, group: int) -> _Units:
        """Return the units of a group's scales and minima, None if they need none."""
        units, minimum_units = self.units
        if units is None or minimum_units is None:
            return None, None
        return units[group], minimum_units[group]

    def _choose(self, group: int, swept: Tensor) -> None:
        """Set the scales and, if the grid has them, the minima of a group by a search."""
        chosen = self._search(group, swept, self._units_of(group))
        for numbers, of_group in zip(self.numbers()[1:], chosen, strict=True):
            numbers[group] = of_group

    def _search(self, group: int, swept: Tensor, units: _Units) -> list[Tensor]:
        if self.minima is None:
            return [self._search_scales(group, swept, units[0])]
        return self._search_with_minima(group, swept, *units)

    def _search_with_minima(
        self, group: int, swept: Tensor, units: Tensor | None, minimum_units: Tensor | None
    ) -> list[Tensor]:
        """Return the scales and minima that fit a group's weights best, by diag(H + λI).

        Each try maps a part of the group's range to the codes. Scale and minimum are then the
        weighted least squares of the weights on these codes, and codes are chosen anew.
        """
        grid, columns = self.grid, self._columns(group)
        values, weights = swept[columns], self.damped.matrix.diagonal()[columns]
        lowest, highest = values.aminmax(dim=0)
        if grid.steps is not None:
            lowest = lowest.clamp(max=0)  # minima in steps are not negative
        span, total, mean = highest - lowest, weights.sum(), weights @ values
        parts = values.new_tensor([*product(_CLIPPED, repeat=2)])
        best = [
            torch.full_like(span, torch.inf),
            grid.round_scales(span / grid.largest, units),
            grid.round_minima(-lowest, minimum_units),
        ]
        for cut in parts.split(max(1, _SCALES_AT_A_TIME // values.numel())):
            below, above = cut.unbind(1)
            minima = -(lowest + torch.outer(below, span))
            scales = grid.round_scales(torch.outer((1 - below - above) / grid.largest, span), units)
            codes = grid.nearest_((values + minima[:, None]) / scales[:, None])
            sums, squares = weights @ codes, weights @ codes.square()
            products = weights @ (codes * values)
            # The normal equations of Σ h·(scale·c − minimum − v)², solved for the scale first, so
            # that the minimum makes up for the rounding of the scale.
            fitted = (total * products - sums * mean) / (total * squares - sums.square())
            # Equal codes, a division by zero, and codes in the reverse order keep the try's scale.
            scales = torch.where(fitted > 0, grid.round_scales(fitted, units), scales)
            minima = grid.round_minima((scales * sums - mean) / total, minimum_units)
            shifted = values + minima[:, None]
            codes = grid.nearest_(shifted / scales[:, None])
            errors = weights @ codes.mul_(scales[:, None]).sub_(shifted).square_()
            error, number = errors.min(0, keepdim=True)
            pairs = [error[0], scales.gather(0, number)[0], minima.gather(0, number)[0]]
            better = error[0] < best[0]
            best = [torch.where(better, a, b) for a, b in zip(pairs, best, strict=True)]
        return best[1:]

    def _search_scales(self, group: int, swept: Tensor, units: Tensor | None) -> Tensor:
        """Return the scales that fit a group's present weights best, by diag(H + λI)."""
        columns = self._columns(group)
        # Feedback reaches removed weights, too, which will be zero and have no part in the search.
        values = swept[columns] * self.kept[columns]
        weights = self.damped.matrix.diagonal()[columns]
        peaks = values.gather(0, values.abs().max(0, keepdim=True).indices)[0]
        # The largest weight of a group may be at either end of the codebook, unless these mirror
        # each other.
        ends = [self.grid.codebook[-1], self.grid.codebook[0]]
        if not self.grid.signed:
            peaks, ends = peaks.abs(), ends[:1]
        factors = [factor / end for factor, end in product(_FACTORS, ends)]
        tried = self.grid.round_scales(torch.outer(peaks.new_tensor(factors), peaks), units)
        errors = []
        for some in tried.split(max(1, _SCALES_AT_A_TIME // values.numel())):
            codes = self.grid.nearest_(values / some[:, None])
            errors.append(weights @ codes.mul_(some[:, None]).sub_(values).square_())
        chosen = tried.gather(0, torch.cat(errors).argmin(0, keepdim=True))[0]
        # Zeros have no scale: with 1, as in `decompose`, all their codes stay zero.
        is_free = self.grid.steps is None and self.grid.holds_zero
        return chosen.masked_fill_(peaks == 0, 1) if is_free else chosen

    def _improve_scales(self, group: int, gradient: Tensor, panel: slice) -> None:
        """Move the scales of a group to the optimum for its codes, if that lowers the loss."""
        columns, matrix = self._columns(group), self.damped.matrix
        own = slice(columns.start - panel.start, columns.stop - panel.start)
        codes, scales = self.codes[columns], self.scales[group]
        curvature = (codes * (matrix[columns, columns] @ codes)).sum(0)
        slope = (codes * gradient[own]).sum(0)
        wanted = scales - slope / curvature
        rounded = self.grid.round_scales(wanted, self._units_of(group)[0])
        # Scales that would change their sign, or whose codes are all zero (NaN), do not move.
        step = torch.where(wanted * scales > 0, rounded, scales) - scales
        # Scales are rounded, too: the loss must fall at the rounded one.
        step = torch.where(slope * step + curvature * step.square() / 2 < 0, step, 0)
        self.scales[group] = scales + step
        gradient.addmm_(matrix[panel, columns], codes * step)

    def _improve_with_minima(self, group: int, gradient: Tensor, panel: slice) -> None:
        """Move scales and minima of a group to the optimum for its codes, if that lowers the loss.

        With x = scale·c − minimum·1, the loss of a move (σ, μ) of scale and minimum is
        σ·cᵀg − μ·1ᵀg + (σ²·cᵀHc − 2σμ·1ᵀHc + μ²·1ᵀH1)/2 for the gradient g.
        """
        assert self.minima is not None
        columns, matrix = self._columns(group), self.damped.matrix
        own = slice(columns.start - panel.start, columns.stop - panel.start)
        codes, scales, minima = self.codes[columns], self.scales[group], self.minima[group]
        inside, slopes = matrix[columns, columns], gradient[own]
        products = inside @ codes
        curvature, mixed, flat = (codes * products).sum(0), products.sum(0), inside.sum()
        slope, shift = (codes * slopes).sum(0), slopes.sum(0)
        units, minimum_units = self._units_of(group)
        wanted = scales - (flat * slope - mixed * shift) / (curvature * flat - mixed.square())
        # Equal codes leave the scale undetermined (NaN).
        rounded = torch.where(wanted > 0, self.grid.round_scales(wanted, units), scales)
        move = rounded - scales
        lowered = self.grid.round_minima(minima + (shift + mixed * move) / flat, minimum_units)
        lift = lowered - minima
        change = slope * move - shift * lift
        change += (curvature * move.square() + flat * lift.square()) / 2 - mixed * move * lift
        # Both are rounded, too: the loss must fall at the rounded ones.
        move, lift = (torch.where(change < 0, step, 0) for step in (move, lift))
        self.scales[group], self.minima[group] = scales + move, minima + lift
        gradient.addmm_(matrix[panel, columns], codes * move - lift)

    def _columns(self, group: int) -> slice:
        start = group * self.grid.group_size
        return slice(start, min(start + self.grid.group_size, len(self.codes)))

    def _panels(self) -> Iterator[slice]:
        """Yield ranges of whole groups of columns, of about 128 columns."""
        width = max(1, _PANEL // self.grid.group_size) * self.grid.group_size
        for start, stop in split_range(0, len(self.codes), width):
            yield slice(start, stop)

    def _pieces(self, panel: slice) -> Iterator[tuple[int, slice]]:
        """Yield a panel's groups, in pieces of at most 128 columns: (group, columns)."""
        size = self.grid.group_size
        for group in range(panel.start // size, -(-panel.stop // size)):
            columns = self._columns(group)
            for start, stop in split_range(columns.start, columns.stop, _PANEL):
                yield group, slice(start, stop)
