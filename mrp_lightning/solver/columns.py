"""Remove whole columns of a weight, the same for all rows, and compensate for them exactly.

A column is an input feature: without it, whatever makes that feature can be removed from the model.
With the removed columns P and the kept ones K, H damped, the optimum of the kept weights is

    Ŵ_K = W_K + W_P·(H_PK H_KK⁻¹),   loss = ½·tr(W_P [(H⁻¹)_PP]⁻¹ W_Pᵀ).

It is one small system for all rows. Which columns go is OSSCAR's problem (Meng et al., 2024).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mrp_lightning.errors import ERROR_OF_ARGUMENT, MethodError, OptionError
from mrp_lightning.solver.column_sets import ColumnSet, greedy_set
from mrp_lightning.solver.input_hessian import InputHessian
from mrp_lightning.solver.methods import parse_method
from mrp_lightning.solver.options import is_count, is_number
from mrp_lightning.solver.problem import check_weight, output_energy
from mrp_sparse.arguments import checked

METHODS = ("magnitude", "wanda", "SM", "magnitude+M", "wanda+M")
"""The methods that remove whole columns."""


@dataclass(frozen=True, eq=False)
class ColumnSolution:
    """A weight without some of its columns, and how good it is.

    Attributes:
        weight: The new weight, (rows, columns), in the dtype of the input; removed columns are
            +0.0.
        removed: bool (groups,), True = removed: one for each group of columns, or each column.
        loss: ½·tr(δ H δᵀ), H undamped, δ = returned weight − weight: the mean over the calibration
            tokens of ‖δ x‖².
        damping_used: λ, what was added to the diagonal of H. Methods without an inverse add
            nothing; then it is what the given damping would have added.
        damping_ratio: Fraction of the mean diagonal of H that λ is: the given damping, or what it
            had to be raised to.
        swaps: Number of times that a removed group was put back and another removed in its place.
        greedy_loss: The damped loss of the optimum before the swaps; `None` for other methods.
        optimal_loss: The damped loss of the optimum for `removed`; `None` for methods that do not
            seek it.
        gap: Certified relative distance of the damped loss to `optimal_loss`, before a cast to a
            dtype narrower than float32; `None` for methods that do not seek the optimum.
        dead_inputs: Number of columns whose input was always zero.
        target_loss: The same as `loss`, but against the target weight; `None` where the target is
            the weight itself.
    """

    weight: Tensor
    removed: Tensor
    loss: float
    damping_used: float
    damping_ratio: float
    swaps: int
    greedy_loss: float | None
    optimal_loss: float | None
    gap: float | None
    dead_inputs: int
    target_loss: float | None = None


@checked(errors=ERROR_OF_ARGUMENT)
def prune_columns(
    weight: Tensor,
    hessian: Tensor,
    count: int,
    *,
    group: int = 1,
    method: str = "SM",
    damping: float = 0.01,
    swaps: bool = True,
) -> ColumnSolution:
    """Remove whole columns and compensate for them, so that the layer's outputs change least.

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
        damping: Fraction of the mean diagonal of H that is added to the diagonal, ≥ 0. It rises
            tenfold, with a `NumericalWarning`, while H is not positive definite.
        swaps: Whether SM improves its greedy set by exchanges.

    Returns:
        The weight, what was removed, and its measures. The inputs are not modified.

    Raises:
        MethodError: The method removes no columns.
        OptionError: `count`, `group` or `damping` is out of range.
        HessianError: H is unusable.
        TargetError: The weight is not a finite floating-point matrix.
    """
    check_column_method(method)
    if not is_number(damping) or damping < 0:
        raise OptionError(f"`damping` must be a finite number ≥ 0; got {damping!r}.")
    with torch.inference_mode(False), torch.no_grad():
        inputs = InputHessian(hessian.detach().to(weight.device))
        return remove_columns(
            weight, inputs, count, group=group, method=method, damping=damping, swaps=swaps
        )


def check_column_method(method: str) -> None:
    """Refuse a method that does not remove whole columns.

    Raises:
        MethodError: It does not, or does not exist.
    """
    name = parse_method(method).name
    if name not in METHODS:
        raise MethodError(
            f"The method {name} does not remove whole columns. Take one of {', '.join(METHODS)}."
        )


def remove_columns(
    weight: Tensor,
    inputs: InputHessian,
    count: int,
    *,
    group: int = 1,
    method: str = "SM",
    damping: float = 0.01,
    swaps: bool = True,
    target: Tensor | None = None,
) -> ColumnSolution:
    """Do what `prune_columns` says, where the Hessian is checked already.

    Set and compensation work on the `target` (see `dense_target`), where one is given, in place of
    the dense weight.
    """
    check_weight(weight, inputs)
    groups = _checked_groups(inputs, count, group)
    aim = (weight if target is None else target).double()
    chosen = parse_method(method)
    swapped, greedy_loss = 0, None
    if chosen.needs_inverse:
        # What dead inputs carry is nothing: their columns go first, and never come back.
        live = aim.masked_fill(inputs.dead, 0)
        damped = inputs.damped(damping).double
        covariance = live.T @ live
        removed = torch.zeros(groups, dtype=torch.bool, device=aim.device)
        if chosen.mask.needs_inverse:
            removed[greedy_set(damped.inverse, covariance, count, group)] = True
        else:
            removed[_lowest(aim, inputs, chosen.mask.name, count, group)] = True
        found = ColumnSet(damped.inverse, covariance, removed, group)
        if chosen.mask.needs_inverse:
            greedy_loss = found.loss
            swapped = found.swap() if swaps else 0
        best, ratio = found.optimum(aim, live), damped.ratio
    else:
        removed = torch.zeros(groups, dtype=torch.bool, device=aim.device)
        removed[_lowest(aim, inputs, chosen.mask.name, count, group)] = True
        best = aim.masked_fill(removed.repeat_interleave(group), 0)
        ratio = damping
    result = best.to(weight.dtype)
    gap = optimal_loss = None
    if chosen.needs_inverse:
        wide = torch.float64 if torch.float64 in (weight.dtype, inputs.dtype) else torch.float32
        rounded = best.to(wide).double().masked_fill(inputs.dead, 0)
        optimal_loss, gap = found.loss, found.gap(live, rounded, damped.matrix)
    exact = torch.float64 if weight.dtype == torch.float64 else torch.float32
    lost = output_energy(result.to(exact) - weight.to(exact), inputs.hessian)
    missed = output_energy(result.to(exact) - aim.to(exact), inputs.hessian)
    return ColumnSolution(
        weight=result,
        removed=removed,
        loss=lost,
        damping_used=ratio * inputs.mean_diagonal,
        damping_ratio=ratio,
        swaps=swapped,
        greedy_loss=greedy_loss,
        optimal_loss=optimal_loss,
        gap=gap,
        dead_inputs=inputs.dead_inputs,
        target_loss=None if target is None else missed,
    )


def _lowest(weight: Tensor, inputs: InputHessian, mask: str, count: int, group: int) -> Tensor:
    """The groups of the lowest score, ties by position: those of dead inputs come first."""
    energies = weight.square().sum(0)
    if mask == "wanda":
        energies = energies * inputs.diagonal.double()
    scores = energies.masked_fill(inputs.dead, 0).view(-1, group).sum(1)
    scores[inputs.dead.view(-1, group).all(1)] = -1
    return scores.sort(stable=True).indices[:count]


def _checked_groups(inputs: InputHessian, count: int, group: int) -> int:
    """The number of groups of columns."""
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
    return columns // group
