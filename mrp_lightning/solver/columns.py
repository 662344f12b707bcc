"""Remove whole columns of a weight, the same for all rows, and compensate for them exactly."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mrp_ground.arguments import checked, is_count, is_number
from mrp_lightning.errors import ERROR_OF_ARGUMENT, MethodError, OptionError
from mrp_lightning.solver.column_set import ColumnSet, greedy_set
from mrp_lightning.solver.hessian import DampedHessian, InputHessian
from mrp_lightning.solver.problem import (
    Quality,
    check_weight,
    output_energy,
    require_dense,
    require_in_range,
)
from mrp_lightning.solver.recipe import Method, parse_method

METHODS = ("magnitude", "wanda", "SM", "magnitude+M", "wanda+M")
"""The methods that remove whole columns."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ColumnSolution(Quality):
    """A weight matrix from which whole columns are removed, and its `Quality`.

    Unlike a `Solution`, it marks groups of columns that are removed in all rows, and holds the
    optimal loss for these groups, since its solver is direct.

    Attributes:
        weight: The new weight, (rows, columns), in the dtype of the input; removed columns are
            +0.0.
        removed: bool (groups,), True = removed, for each group of columns.
        damping_used: The λ that was added to the diagonal of the Hessian.
        damping_ratio: λ relative to the mean of that diagonal.
        dead_inputs: The number of columns whose inputs are all zero.
        swaps: The number of exchanges of a removed and a kept group after the greedy choice.
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


@dataclass(frozen=True, kw_only=True)
class ColumnRecipe:
    """The arguments of `prune_columns`, which describes them.

    Raises:
        MethodError: The method removes no columns.
        OptionError: `damping` is out of range.
    """

    count: int
    group: int = 1
    method: str = "SM"
    damping: float = 0.01

    def __post_init__(self) -> None:
        check_column_method(self.method)
        if not is_number(self.damping) or self.damping < 0:
            raise OptionError(f"`damping` must be a finite number ≥ 0; got {self.damping!r}.")

    @property
    def parsed_method(self) -> Method:
        """The mask and the compensation."""
        return parse_method(self.method)

    def check_groups(self, inputs: InputHessian) -> None:
        """Raise an OptionError unless `count` of the groups of columns can be removed."""
        columns, count, group = inputs.columns, self.count, self.group
        if not is_count(group) or columns % group:
            raise OptionError(
                f"`group` must be a number of columns that divides the {columns} of "
                f"{inputs.label}; got {group!r}."
            )
        if not is_count(count) or count >= columns // group:
            raise OptionError(
                f"`count` must be a number of groups from 1 to {columns // group - 1}, all but one "
                f"of {inputs.label}; got {count!r}."
            )


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
        damping: Fraction of the mean diagonal of H that is added to the diagonal, ≥ 0. It rises
            tenfold, with a `NumericalWarning`, while H is not positive definite.

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
    recipe = ColumnRecipe(count=count, group=group, method=method, damping=damping)
    require_dense(weight=weight, hessian=hessian)
    with torch.inference_mode(False), torch.no_grad():
        return remove_columns(weight, InputHessian(hessian.detach().to(weight.device)), recipe)


def check_column_method(method: str) -> None:
    """Check that a method removes whole columns.

    Raises:
        MethodError: The method does not, or does not exist.
    """
    name = parse_method(method).name
    if name not in METHODS:
        raise MethodError(
            f"The method {name} does not remove whole columns. Take one of {', '.join(METHODS)}."
        )


def remove_columns(
    weight: Tensor, inputs: InputHessian, recipe: ColumnRecipe, target: Tensor | None = None
) -> ColumnSolution:
    """Remove whole columns as `prune_columns` does, with a Hessian that is checked already.

    Set and compensation are computed for the `target` (see `dense_target`), if there is one,
    instead of the dense weight.
    """
    check_weight(weight, inputs)
    recipe.check_groups(inputs)
    # In float64: the set is a sequence of choices between nearly equal losses, each of which
    # depends on all updates before it.
    aim = (weight if target is None else target).double()
    choice = _choose_columns(aim, inputs, recipe)
    # The gap measures the solver, so it is taken after rounding to the dtype of the computation,
    # not to a narrower dtype of the weight.
    wide = torch.float64 if torch.float64 in (weight.dtype, inputs.dtype) else torch.float32
    optimum, gap = choice.compensated(aim, inputs, wide)
    result = optimum.to(weight.dtype)
    require_in_range(result, inputs.label)
    exact = torch.float64 if weight.dtype == torch.float64 else torch.float32
    lost = output_energy(result.to(exact) - weight.to(exact), inputs.hessian)
    missed = output_energy(result.to(exact) - aim.to(exact), inputs.hessian)
    ratio = recipe.damping if choice.damped is None else choice.damped.ratio
    return ColumnSolution(
        weight=result,
        removed=choice.removed,
        loss=lost,
        damping_used=ratio * inputs.mean_diagonal,
        damping_ratio=ratio,
        swaps=choice.swaps,
        greedy_loss=choice.greedy_loss,
        optimal_loss=None if choice.column_set is None else choice.column_set.loss,
        gap=gap,
        dead_inputs=inputs.dead_inputs,
        target_loss=None if target is None else missed,
    )


@dataclass(frozen=True, eq=False)
class _ColumnChoice:
    """The groups of columns that a method removes from a weight.

    Attributes:
        removed: bool (groups,), True = removed.
        damped: The damped Hessian, float64; `None` if the method does not compensate.
        column_set: The set with the matrices that its compensation needs; `None` likewise.
        swaps: The number of exchanges that led to the set.
        damping_used: The λ that was added to the diagonal of the Hessian.
        damping_ratio: λ relative to the mean of that diagonal.
        dead_inputs: The number of columns whose inputs are all zero.
        swaps: The number of exchanges of a removed and a kept group after the greedy choice.
        greedy_loss: The damped loss before the exchanges; `None` for a ranked set.
    """

    removed: Tensor
    damped: DampedHessian | None = None
    column_set: ColumnSet | None = None
    swaps: int = 0
    greedy_loss: float | None = None

    def compensated(
        self, weight: Tensor, inputs: InputHessian, dtype: torch.dtype
    ) -> tuple[Tensor, float | None]:
        """Return the optimal weight without the columns, float64, and its certified gap.

        The weight (rows, columns), float64, is the one whose outputs are approximated. The gap is
        measured after a rounding to `dtype`. If the method does not compensate, the columns are set
        to zero, and the gap is `None`.
        """
        if self.column_set is None or self.damped is None:
            group = weight.shape[1] // len(self.removed)
            return weight.masked_fill(self.removed.repeat_interleave(group), 0), None
        live = weight.masked_fill(inputs.dead, 0)
        optimum = self.column_set.optimum(weight, live)
        rounded = optimum.to(dtype).double().masked_fill(inputs.dead, 0)
        return optimum, self.column_set.gap(live, rounded, self.damped.matrix)


def _choose_columns(weight: Tensor, inputs: InputHessian, recipe: ColumnRecipe) -> _ColumnChoice:
    """Choose the groups of columns to remove from a weight (rows, columns), float64."""
    method, count, group = recipe.parsed_method, recipe.count, recipe.group
    is_greedy = method.mask.needs_inverse
    removed = torch.zeros(inputs.columns // group, dtype=torch.bool, device=weight.device)
    # 1. Magnitude and wanda rank the groups by the weights as they are, whatever follows.
    if not is_greedy:
        removed[_lowest(weight, inputs, method.mask.name, count, group)] = True
    if not method.needs_inverse:
        return _ColumnChoice(removed)
    # 2. Columns of dead inputs add nothing to an output. As zeros in C = WᵀW they cost nothing, so
    # they are removed first, and no exchange for them gains anything.
    live = weight.masked_fill(inputs.dead, 0)
    damped, covariance = inputs.damped(recipe.damping).double, live.T @ live
    if not is_greedy:
        return _ColumnChoice(removed, damped, ColumnSet(damped.inverse, covariance, removed, group))
    # 3. The greedy set is a start only: the first groups were chosen when all later ones were still
    # there to compensate for them. Exchanges take such choices back.
    removed[greedy_set(damped.inverse, covariance, count, group)] = True
    column_set = ColumnSet(damped.inverse, covariance, removed, group)
    greedy_loss = column_set.loss
    return _ColumnChoice(removed, damped, column_set, column_set.swap(), greedy_loss)


def _lowest(weight: Tensor, inputs: InputHessian, mask: str, count: int, group: int) -> Tensor:
    """Return the groups with the lowest scores, ties by position, groups of dead inputs first."""
    energies = weight.square().sum(0)
    if mask == "wanda":
        energies = energies * inputs.diagonal.double()
    scores = energies.masked_fill(inputs.dead, 0).view(-1, group).sum(1)
    scores[inputs.dead.view(-1, group).all(1)] = -1
    return scores.sort(stable=True).indices[:count]
