"""Remove whole columns of a weight, the same for all rows, and compensate for them exactly."""

from dataclasses import dataclass

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


@dataclass(frozen=True, eq=False, kw_only=True)
class ColumnSolution(Quality):
    """A weight matrix from which whole columns are removed, and its `Quality`.

    Attributes:
        weight: The new weight, (rows, columns), in the dtype of the input; removed columns are
            +0.0.
        removed: bool (groups,), True = removed, for each group of columns.
        optimal_loss: The damped loss of the optimum for `removed`, to which `gap` is the distance;
            `None` for methods without compensation.
    """

    weight: Tensor
    removed: Tensor
    damping_used: float
    damping_ratio: float
    dead_inputs: int
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
    least with all others at their optimum. The other methods rank the groups once, by Σ w²
    (magnitude) or Σ w²·H_jj (wanda), and compensate only if they end in +M.

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
    # Columns of dead inputs add nothing to an output. As zeros in C = WᵀW they cost nothing, so
    # they are removed first.
    live = aim.masked_fill(inputs.dead, 0)
    removed = torch.zeros(columns // group, dtype=torch.bool, device=weight.device)
    if method.mask.needs_inverse:
        inverse = inputs.damped(damping).double.inverse
        removed[greedy_set(inverse, live.T @ live, count, group)] = True
    else:  # magnitude and wanda rank the groups by the weights as they are, whatever follows
        removed[_lowest(aim, inputs, method.mask.name, count, group)] = True
    gone = removed.repeat_interleave(group)
    optimum, optimal_loss, gap, ratio = aim.masked_fill(gone, 0), None, None, damping
    if method.needs_inverse:
        damped = inputs.damped(damping).double
        ratio, kept = damped.ratio, ~gone
        compensation, loss, inverse_on_kept = _compensation(live, damped.inverse, gone)
        optimum[:, kept] += compensation
        # The gap measures the solver, so it is taken after rounding to the dtype of the
        # computation, not to a narrower dtype of the weight: (L − L*) = ½·tr(r (H_KK)⁻¹ rᵀ) for
        # the residual r = (W − Ŵ)H on the kept columns K.
        wide = torch.float64 if torch.float64 in (weight.dtype, inputs.dtype) else torch.float32
        rounded = optimum.to(wide).double().masked_fill(inputs.dead, 0)
        residual = (live - rounded) @ damped.matrix[:, kept]
        distance = float(((residual @ inverse_on_kept) * residual).sum()) / 2
        optimal_loss, gap = loss, max(distance, 0.0) / loss if loss > 0 else 0.0
    result = optimum.to(weight.dtype)
    require_in_range(result, inputs.label)
    exact = torch.float64 if weight.dtype == torch.float64 else torch.float32
    lost, missed = (
        output_energy(result.to(exact) - start.to(exact), inputs.hessian) for start in (weight, aim)
    )
    return ColumnSolution(
        weight=result,
        removed=removed,
        loss=lost,
        optimal_loss=optimal_loss,
        gap=gap,
        damping_ratio=ratio,
        damping_used=ratio * inputs.mean_diagonal,
        dead_inputs=inputs.dead_inputs,
        target_loss=None if target is None else missed,
    )


def _compensation(live: Tensor, inverse: Tensor, gone: Tensor) -> tuple[Tensor, float, Tensor]:
    """Return the change of kept columns K that makes up for the removed ones P, bool (columns,).

    With A = H⁻¹ and the Schur complement B = H_PP − H_PK (H_KK)⁻¹ H_KP = (A_PP)⁻¹, the change is
    −W_P B A_PK, the loss of the optimum ½·tr(W_P B W_Pᵀ), and (H_KK)⁻¹ = A_KK − A_KP B A_PK.

    Returns the change (rows, kept), the loss, and (H_KK)⁻¹ (kept, kept).
    """
    kept, lost = ~gone, live[:, gone]
    schur = torch.linalg.inv(inverse[gone][:, gone])
    reach = schur @ inverse[gone][:, kept]
    loss = float(((lost @ schur) * lost).sum()) / 2
    return -lost @ reach, loss, inverse[kept][:, kept] - inverse[kept][:, gone] @ reach


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


def costs(inverse: Tensor, energy: Tensor) -> Tensor:
    """Return ½·tr(A⁻¹C) of blocks (groups, width, width), the loss of removing each: (groups,)."""
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
