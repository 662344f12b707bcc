"""Remove whole columns of a weight, the same for all rows, and compensate for them exactly."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mrp_ground.arguments import checked, is_count
from mrp_lightning.errors import ERROR_OF_ARGUMENT, MethodError, OptionError
from mrp_lightning.solver.hessian import InputHessian
from mrp_lightning.solver.problem import (
    Quality,
    check_weight,
    output_energy,
    require_dense,
    require_in_range,
)
from mrp_lightning.solver.recipe import Method, check_damping, parse_method

METHODS = ("magnitude", "wanda", "SM", "magnitude+M", "wanda+M")
"""The methods that remove whole columns."""
_PANEL = 64
"""Number of columns whose removal updates all other columns at once."""
_PAIRS = 2**22
"""Number of elements of the table of pairs that is computed at a time."""
_LEAST_GAIN = 1e-9
"""Exchanges that lower the loss by a smaller fraction are rounding."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ColumnSolution(Quality):
    """A weight matrix from which whole columns are removed, and its `Quality`.

    Attributes:
        weight: The new weight, (rows, columns), in the dtype of the input; removed columns are
            +0.0.
        removed: bool (groups,), True = removed, for each group of columns.
        greedy_loss: The damped loss of the optimum before the swaps; `None` for methods other than
            SM.
        optimal_loss: The damped loss of the optimum for `removed`, to which `gap` is the distance;
            `None` for methods without compensation.
    """

    weight: Tensor
    removed: Tensor
    damping_used: float
    damping_ratio: float
    dead_inputs: int
    swaps: int
    greedy_loss: float | None = None
    optimal_loss: float | None = None


@checked(errors=ERROR_OF_ARGUMENT)
def prune_columns(
    weight: Tensor,
    hessian: Tensor,
    count: int,
    *,
    group: int = 1,
    method: str = "SM",
    damping: float = 0.01,
) -> ColumnSolution:
    """Remove whole columns of a weight, and compensate so that the layer's outputs change least.

    Minimises ½·tr(δ H δᵀ), the mean over tokens of ‖(w + δ)x − wx‖², with the removed columns zero
    in all rows. To remove the same columns from several layers with the same inputs, give their
    weights as one, stacked by rows.

    The method SM removes one group of columns after another, each time the one whose removal costs
    least with all others at their optimum. Then it exchanges a removed group for a kept one, each
    time the pair that lowers the loss most, until no exchange lowers it. The other methods rank the
    groups once, by Σ w² (magnitude) or Σ w²·H_jj (wanda), and compensate only if they end in +M.

    Args:
        weight: The dense weight, (rows, columns), floating point.
        hessian: H = 2·XᵀX / tokens, (columns, columns), undamped; see `HessianAccumulator`.
        count: Number of groups to remove, from 1 to all but one.
        group: Number of neighbouring columns that are removed together, a divisor of the columns.
        method: magnitude, wanda, SM, magnitude+M or wanda+M.
        damping: λ as a fraction ≥ 0 of the mean of H's diagonal, to which λ is added; raised
            tenfold, with a `NumericalWarning`, while H + λI is not positive definite.

    Returns:
        The new weight, the removed groups, and the losses. The inputs are not modified.

    Raises:
        MethodError: The method removes no columns.
        OptionError: `count`, `group` or `damping` is out of range.
        HessianError: H is unusable, has another number of columns, or gives a weight out of the
            range of its dtype.
        TargetError: The weight is not a finite floating-point matrix, or a tensor is on the meta
            device or not dense.
    """
    parsed = column_method(method)
    check_damping(damping)
    require_dense(weight=weight, hessian=hessian)
    with torch.inference_mode(False), torch.no_grad():
        inputs = InputHessian(hessian.detach().to(weight.device))
        return remove_columns(weight, inputs, parsed, damping, count, group)


def column_method(name: str) -> Method:
    """Return a method that removes whole columns; raise a MethodError for a name of no such one."""
    method = parse_method(name)
    if name not in METHODS:
        raise MethodError(
            f"The method {name} does not remove whole columns. Take one of {', '.join(METHODS)}."
        )
    return method


def remove_columns(
    weight: Tensor,
    inputs: InputHessian,
    method: Method,
    damping: float,
    count: int,
    group: int,
    target: Tensor | None = None,
) -> ColumnSolution:
    """Remove whole columns as `prune_columns` does, with arguments that are checked already.

    Set and compensation are computed for the `target` (see `dense_target`), if there is one,
    instead of the dense weight.
    """
    check_weight(weight, inputs)
    columns = inputs.columns
    if not is_count(group) or columns % group:
        raise OptionError(
            f"`group` must be a number of columns that divides the {columns} of {inputs.label}; "
            f"got {group!r}."
        )
    if not is_count(count) or count >= columns // group:
        raise OptionError(
            f"`count` must be a number of groups from 1 to {columns // group - 1}, all but one of "
            f"{inputs.label}; got {count!r}."
        )
    # In float64: the set is a sequence of choices between nearly equal losses, each of which
    # depends on all updates before it.
    aim = (weight if target is None else target).double()
    removed, column_set, measures = _choose_columns(aim, inputs, method, damping, count, group)
    if column_set is None:
        optimum = aim.masked_fill(removed.repeat_interleave(group), 0)
    else:
        live, damped = aim.masked_fill(inputs.dead, 0), inputs.damped(damping).double
        optimum = column_set.optimum(aim, live)
        # The gap measures the solver, so it is taken after rounding to the dtype of the
        # computation, not to a narrower dtype of the weight.
        wide = torch.float64 if torch.float64 in (weight.dtype, inputs.dtype) else torch.float32
        rounded = optimum.to(wide).double().masked_fill(inputs.dead, 0)
        measures |= {
            "optimal_loss": column_set.loss,
            "gap": column_set.gap(live, rounded, damped.matrix),
            "damping_ratio": damped.ratio,
        }
    result = optimum.to(weight.dtype)
    require_in_range(result, inputs.label)
    exact = torch.float64 if weight.dtype == torch.float64 else torch.float32
    lost, missed = (
        output_energy(result.to(exact) - start.to(exact), inputs.hessian) for start in (weight, aim)
    )
    measures = {"damping_ratio": damping, "swaps": 0} | measures
    return ColumnSolution(
        weight=result,
        removed=removed,
        loss=lost,
        damping_used=measures["damping_ratio"] * inputs.mean_diagonal,
        dead_inputs=inputs.dead_inputs,
        target_loss=None if target is None else missed,
        **measures,
    )


def _choose_columns(
    weight: Tensor, inputs: InputHessian, method: Method, damping: float, count: int, group: int
) -> tuple[Tensor, "ColumnSet | None", dict[str, Any]]:
    """Choose the groups of columns to remove from a weight (rows, columns), float64.

    Returns bool (groups,), True = removed, the set with what its compensation needs, if the method
    compensates, and the measures of a greedy choice.
    """
    is_greedy = method.mask.needs_inverse
    removed = torch.zeros(inputs.columns // group, dtype=torch.bool, device=weight.device)
    # 1. Magnitude and wanda rank the groups by the weights as they are, whatever follows.
    if not is_greedy:
        removed[_lowest(weight, inputs, method.mask.name, count, group)] = True
    if not method.needs_inverse:
        return removed, None, {}
    # 2. Columns of dead inputs add nothing to an output. As zeros in C = WᵀW they cost nothing, so
    # they are removed first, and no exchange for them gains anything.
    live = weight.masked_fill(inputs.dead, 0)
    inverse, covariance = inputs.damped(damping).double.inverse, live.T @ live
    if not is_greedy:
        return removed, ColumnSet(inverse, covariance, removed, group), {}
    # 3. The greedy set is a start only: the first groups were chosen when all later ones were still
    # there to compensate for them. Exchanges take such choices back.
    removed[greedy_set(inverse, covariance, count, group)] = True
    column_set = ColumnSet(inverse, covariance, removed, group)
    greedy_loss = column_set.loss
    return removed, column_set, {"swaps": column_set.swap(), "greedy_loss": greedy_loss}


def _lowest(weight: Tensor, inputs: InputHessian, mask: str, count: int, group: int) -> Tensor:
    """Return the groups with the lowest scores, ties by position, groups of dead inputs first."""
    energies = weight.square().sum(0)
    if mask == "wanda":
        energies = energies * inputs.diagonal.double()
    scores = energies.masked_fill(inputs.dead, 0).view(-1, group).sum(1)
    scores[inputs.dead.view(-1, group).all(1)] = -1
    return scores.sort(stable=True).indices[:count]


def greedy_set(inverse: Tensor, covariance: Tensor, count: int, width: int) -> list[int]:
    """Remove groups of columns greedily, each with the least loss after compensation.

    For a weight W with Hessian H, A = H⁻¹ and C = WᵀW. When the columns P are removed, A becomes
    A_KK − A_KP A_PP⁻¹ A_PK = (H_KK)⁻¹ on the kept columns K, and C becomes WᵀW of their optimum.
    Removing the group J next costs ½·tr(A_JJ⁻¹ C_JJ), with the present A and C.
    Returns `count` groups of `width` columns, in the order of their removal.
    """
    inverse, covariance = inverse.clone(), covariance.clone()
    inverse_blocks = _diagonal_blocks(inverse, width)
    covariance_blocks = _diagonal_blocks(covariance, width)
    lost = torch.zeros(len(inverse_blocks), dtype=inverse.dtype, device=inverse.device)
    order: list[int] = []
    # The loop rests on four facts:
    # 1. The cost of a group, ½·tr(A_JJ⁻¹ C_JJ), needs the diagonal blocks of A and C alone. So only
    #    these are kept up to date: O(columns·width²) a step, where all of A would be O(columns²).
    # 2. Removing J downdates A by aᵀl with a = A_J: and l = A_JJ⁻¹a, and C by hᵀl + lᵀh with
    #    h = C_J: − C_JJ·l/2. The stored matrices lag behind by the `pending` triples (a, l, h), of
    #    (width, columns) each: at every step A = inverse − Σ aᵀl, C = covariance − Σ (hᵀl + lᵀh).
    # 3. The next downdate needs the present rows J of both, which the sums of 2 give.
    # 4. `_PANEL` columns of downdates are applied together, since a product of matrices is bound by
    #    compute and an update of low rank by memory.
    pending: list[tuple[Tensor, Tensor, Tensor]] = []
    for _ in range(count):
        j = int((costs(inverse_blocks, covariance_blocks) + lost).argmin())
        order.append(j)
        lost[j] = torch.inf
        columns = slice(j * width, (j + 1) * width)
        a, c = inverse[columns].clone(), covariance[columns].clone()
        if pending:
            pending_a, pending_l, pending_h = (torch.cat(x) for x in zip(*pending, strict=True))
            a -= pending_a[:, columns].T @ pending_l
            c -= pending_h[:, columns].T @ pending_l + pending_l[:, columns].T @ pending_h
        step = torch.linalg.solve(a[:, columns], a)
        half = c - c[:, columns] @ step / 2
        pending.append((a, step, half))
        steps, halves = blocks_of(step, width), blocks_of(half, width)
        inverse_blocks = inverse_blocks - blocks_of(a, width).mT @ steps
        change = halves.mT @ steps
        covariance_blocks = covariance_blocks - change - change.mT
        # A removed group must not be chosen again, nor its zero block be inverted.
        inverse_blocks[j] = torch.eye(width, dtype=inverse.dtype, device=inverse.device)
        covariance_blocks[j] = 0
        if len(pending) * width >= _PANEL:
            a, step, half = (torch.cat(x) for x in zip(*pending, strict=True))
            inverse.addmm_(a.T, step, alpha=-1)
            covariance.addmm_(half.T, step, alpha=-1).addmm_(step.T, half, alpha=-1)
            pending.clear()
    return order


class ColumnSet:
    """A set P of removed groups, its exact loss, and what exchanging two groups would change.

    It holds two matrices (columns, columns). In S are (H_KK)⁻¹, T = (H_KK)⁻¹H_KP and the Schur
    complement B = H_PP − H_PK T, which is the inverse of A_PP. With Y_K, the weights at their
    optimum, and Y_P, the gradients of the removed ones, Q = YᵀY. Putting a group back or removing
    one is a sweep of S (Beaton, 1964) and a change of rank 2·`width` in Q.

    Args:
        inverse: A, (columns, columns).
        covariance: C, (columns, columns).
        removed: bool (groups,), True = removed. `swap` updates this tensor in place.
        width: Columns of a group.

    Attributes:
        loss: ½·tr(W_P B W_Pᵀ), the damped loss of the optimum.
    """

    def __init__(self, inverse: Tensor, covariance: Tensor, removed: Tensor, width: int) -> None:
        self.removed, self._width = removed, width
        p, k = self._columns
        schur = torch.linalg.inv(inverse[p][:, p])
        schur = (schur + schur.T) / 2
        reach = -inverse[k][:, p] @ schur
        swept = torch.empty_like(inverse)
        swept[p[:, None], p] = schur
        swept[k[:, None], p], swept[p[:, None], k] = reach, reach.T
        swept[k[:, None], k] = inverse[k][:, k] + reach @ inverse[p][:, k]
        # Y = W M: Y_K = W_K + W_P Tᵀ (the compensation) and Y_P = W_P B, so that Q = Mᵀ C M.
        maps = torch.zeros_like(inverse)
        maps[k, k] = 1
        maps[p[:, None], k], maps[p[:, None], p] = reach.T, schur
        self._swept, self._energy = swept, maps.T @ covariance @ maps
        self.loss = float((covariance[p][:, p] * schur).sum()) / 2

    @property
    def _columns(self) -> tuple[Tensor, Tensor]:
        """The removed and the kept columns."""
        is_removed = self.removed.repeat_interleave(self._width)
        return is_removed.nonzero()[:, 0], (~is_removed).nonzero()[:, 0]

    def optimum(self, weight: Tensor, live: Tensor) -> Tensor:
        """Return the optimal weight (rows, columns) without the removed columns P.

        `live` is the weight with zeros in the columns of dead inputs.
        """
        p, k = self._columns
        optimum = torch.zeros_like(weight)
        optimum[:, k] = torch.addmm(weight[:, k], live[:, p], self._swept[p][:, k])
        return optimum

    def gap(self, weight: Tensor, solution: Tensor, matrix: Tensor) -> float:
        """Return the distance of a solution's loss from the optimal loss, relative to the latter.

        The distance is ½·tr(r (H_KK)⁻¹ rᵀ) for the residual r = (W − Ŵ)H on K, with `matrix` the
        damped H. If the optimal loss is zero, the result is zero.
        """
        k = self._columns[1]
        residual = (weight - solution) @ matrix[:, k]
        distance = float(((residual @ self._swept[k][:, k]) * residual).sum()) / 2
        return max(distance, 0.0) / self.loss if self.loss > 0 else 0.0

    def swap(self) -> int:
        """Exchange the best pair of groups while that lowers the loss; return the swaps' number."""
        done = 0
        # 1. The best of all pairs is taken, not the first that helps: one exchange costs two sweeps
        #    of the stored matrices, as much as looking at all pairs.
        # 2. Each exchange lowers the loss, so no set repeats and the loop ends. The limit guards
        #    against gains that are rounding.
        # 3. In the end no exchange of two groups lowers the loss: a local optimum, not the global.
        while done < len(self.removed):
            gain, returned, newly_removed = self._best_exchange()
            if not gain > _LEAST_GAIN * self.loss:
                break
            self._sweep(returned)
            self._sweep(newly_removed)
            self.loss -= gain
            done += 1
        return done

    def _best_exchange(self) -> tuple[float, int, int]:
        """Return the largest gain of an exchange, the group put back, and the one removed."""
        width = self._width
        removed_groups, kept_groups = self.removed.nonzero()[:, 0], (~self.removed).nonzero()[:, 0]
        swept_blocks = _diagonal_blocks(self._swept, width)
        energy_blocks = _diagonal_blocks(self._energy, width)
        # The gain of an exchange is exact, since both of its halves are: putting p back from the
        # stored matrices, and removing q from those in which p is back, of which only the blocks
        # (q, q) are needed. For blocks of one element, a batched matmul is slower than the
        # elementwise product.
        multiply: Callable[[Tensor, Tensor], Tensor] = torch.mul if width == 1 else torch.matmul
        best = (-torch.inf, -1, -1)
        for groups in removed_groups.split(max(1, _PAIRS // (len(kept_groups) * width**2))):
            schur = swept_blocks[groups][:, None]  # (p, 1, width, width)
            t = _tiles(self._swept, groups, kept_groups, width).mT  # T_qp, (p, q, width, width)
            # With p back, A_qq gains T B⁻¹ Tᵀ, and Y_q loses Y_p B⁻¹ Tᵀ.
            step = multiply(t, torch.linalg.inv(schur))
            a = swept_blocks[kept_groups] + multiply(step, t.mT)
            through = multiply(step, _tiles(self._energy, groups, kept_groups, width))
            c = energy_blocks[kept_groups] - through - through.mT
            c += multiply(multiply(step, energy_blocks[groups][:, None]), step.mT)
            # Gain of putting p back, less the loss of then removing q.
            change = costs(schur, energy_blocks[groups][:, None]) - costs(a, c)
            value, index = change.flatten().max(0)
            if float(value) > best[0]:
                i, j = divmod(int(index), len(kept_groups))
                best = float(value), int(groups[i]), int(kept_groups[j])
        return best

    def _sweep(self, j: int) -> None:
        """Put a removed group back, or remove a kept one, by the sweep operator of Beaton."""
        swept, energy, width = self._swept, self._energy, self._width
        columns = slice(j * width, (j + 1) * width)
        is_removed, removes = self.removed.repeat_interleave(width), not bool(self.removed[j])
        # The kept columns if the group is removed, else the removed ones.
        opposite = is_removed != is_removed[columns.start]
        side = swept[:, columns].clone()
        pivot = torch.linalg.inv(side[columns])
        pivot = (pivot + pivot.T) / 2
        step = side @ pivot
        # The sweep subtracts S_:J S_JJ⁻¹ S_J:, but adds it between two opposite columns.
        swept.addmm_(step, side.T, alpha=-1)
        swept.addmm_(torch.where(opposite[:, None], step, 0), side.T * opposite, alpha=2)
        new_side = torch.where(opposite[:, None] == removes, step, -step)
        swept[:, columns], swept[columns] = new_side, new_side.T
        swept[columns, columns] = pivot
        # Y becomes Y − Y_J lᵀ for the other columns, and Y_J times the pivot for the group itself:
        # a symmetric change of rank 2·width in Q = YᵀY.
        change = torch.where(opposite[:, None], -step, step) if removes else step.clone()
        change[columns] = torch.eye(width, dtype=step.dtype, device=step.device) - pivot
        column = energy[:, columns].clone()
        half = column - change @ column[columns] / 2
        energy.addmm_(half, change.T, alpha=-1).addmm_(change, half.T, alpha=-1)
        self.removed[j] = removes


def costs(inverse: Tensor, energy: Tensor) -> Tensor:
    """Return ½·tr(A⁻¹C) of blocks (..., width, width): (...).

    With A and C as in `greedy_set`, this is the loss of removing a group; with B and Y_pᵀY_p of
    `ColumnSet`, the gain of putting one back.
    """
    if inverse.shape[-1] == 1:
        return (energy / inverse)[..., 0, 0] / 2
    return torch.linalg.solve(inverse, energy).diagonal(dim1=-2, dim2=-1).sum(-1) / 2


def blocks_of(rows: Tensor, width: int) -> Tensor:
    """Return a matrix (width, columns) as (groups, width, width)."""
    return rows.unflatten(1, (-1, width)).transpose(0, 1)


def _diagonal_blocks(matrix: Tensor, width: int) -> Tensor:
    """Return the blocks (groups, width, width) on the diagonal of a matrix (columns, columns)."""
    groups = len(matrix) // width
    tiles = matrix.view(groups, width, groups, width)
    return tiles.diagonal(dim1=0, dim2=2).permute(2, 0, 1).contiguous()


def _tiles(matrix: Tensor, rows: Tensor, columns: Tensor, width: int) -> Tensor:
    """Return blocks of a matrix by groups of rows and columns, (rows, columns, width, width)."""
    groups = len(matrix) // width
    return matrix.view(groups, width, groups, width)[rows][:, :, columns].transpose(1, 2)
