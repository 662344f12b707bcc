"""Prune one weight matrix: mask, compensation, grid, and the measures of the result."""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from mrp_ground.arguments import checked
from mrp_lightning.errors import ERROR_OF_ARGUMENT, NumericalWarning, PatternError
from mrp_lightning.processes import ALONE, Processes
from mrp_lightning.solver.arithmetic import full_float32
from mrp_lightning.solver.compensations import Compensated, ExactCompensation
from mrp_lightning.solver.grid import GridParameters
from mrp_lightning.solver.hessian import InputHessian
from mrp_lightning.solver.masks import FixedMask, Joint, Magnitude, smallest_of_blocks
from mrp_lightning.solver.patterns import Dense
from mrp_lightning.solver.problem import (
    Problem,
    Quality,
    check_weight,
    require_dense,
    require_in_range,
)
from mrp_lightning.solver.quantisation import on_grid
from mrp_lightning.solver.recipe import Method, Recipe


@dataclass(frozen=True, kw_only=True)
class Solution(Quality):
    """A weight matrix from which single weights are removed, and its `Quality`.

    Attributes:
        weight: The new weight, (rows, columns), in the dtype of the input; removed weights are
            +0.0.
        pruned: bool (rows, columns), True = removed.
        grid_parameters: The scales of the weight on its grid, and the minima of a grid that has
            them, float32 (rows, groups), on the CPU; `None` without a grid.
    """

    weight: Tensor
    pruned: Tensor
    damping_used: float
    damping_ratio: float
    dead_inputs: int
    grid_parameters: GridParameters | None = None


@checked(errors=ERROR_OF_ARGUMENT)
def prune_weight(
    weight: Tensor,
    hessian: Tensor,
    *,
    sparsity: float | None = None,
    pattern: str | int | None = None,  # int: to explain what YAML makes of an unquoted 2:4
    method: str = "SM",
    block_size: int | None = 128,
    damping: float = 0.01,
    tolerance: float | None = None,
    bits: int | None = None,
    group_size: int = 64,
    grid: str | None = None,
) -> Solution:
    """Remove weights and compensate for them, so that the layer's outputs change least.

    Minimises ½·tr(δ H δᵀ), the mean over tokens of ‖(w + δ)x − wx‖², with the removed weights zero.
    Give exactly one of `sparsity` and `pattern`, or neither of them and `bits` or `grid`.

    With `bits` the kept weights are then put on a grid: whole numbers times a scale, one for each
    row and `group_size` columns. Numbers and scales are chosen so that the same loss grows little.
    At 3 and 4 bits the numbers are −2^(bits − 1) to 2^(bits − 1), at 8 bits −127 to 127. Where
    nothing is removed, zero needs a code, too, and takes that of one of the two ends. Kept weights
    may become zero. All values are exact in bfloat16. With `grid` the codes and scales are those of
    an engine's type, and the values are those that the engine reads, rounded to the weight's dtype.
    Without `sparsity` and `pattern` it is quantisation alone, which also moves weights that are
    zero: give a pruned model its pattern again.

    The masks S and M assume that all other inputs can make up for a removed weight, even inputs
    whose own weights are removed. So they may remove all of several inputs that are nearly copies
    of each other. If the mask S, M or J with the compensation M loses more than removing the
    smallest weights of each column block does without compensation, these are removed instead and
    compensated by M, provided that this loses less, with a `NumericalWarning`.

    Args:
        weight: The dense weight, (rows, columns), floating point.
        hessian: H = 2·XᵀX / tokens, (columns, columns), undamped; see `HessianAccumulator`.
        sparsity: The fraction of the weights to remove, in (0, 1).
        pattern: "N:M", such as "2:4": N of every M consecutive columns of a row stay.
        method: magnitude, wanda, SS (or sparsegpt), SM, MS, MM, JM, or a pair
            MASK+COMPENSATION of magnitude, wanda, S, M or J and none, S or M.
        block_size: The number of columns whose weights are chosen together (the paper's S), for
            "N:M" a multiple of M; `None` for all.
        damping: λ as a fraction ≥ 0 of the mean of H's diagonal, to which λ is added. It rises
            tenfold, with a `NumericalWarning`, while H + λI is not positive definite.
        tolerance: The relative distance > 0 to the optimal loss at which the compensation M stops;
            `None` is 1e-6, and 1e-4 for weights in 16 bits.
        bits: 3, 4, 8, or `None` for no grid.
        group_size: The number of columns ≥ 1 of a row that share a scale, for `bits`.
        grid: The type of an engine, such as q4_0. Columns are in whole groups of it, for q3_k, q4_k
            and q5_k multiples of 256.

    Returns:
        The pruned weight and its measures. The inputs are not modified.

    Raises:
        PatternError: `sparsity` or `pattern` is missing or malformed, or does not fit the columns
            or the block size; or the columns are no whole groups of `grid`.
        MethodError: There is no such method, or not for this pattern.
        OptionError: Another argument is out of range, or contradicts the others.
        HessianError: H is unusable, or gives a weight out of the range of its dtype.
        TargetError: The weight is not a finite floating-point matrix, or a tensor is on the meta
            device or not dense.
    """
    recipe = Recipe.of(
        method=method,
        sparsity=sparsity,
        pattern=pattern,
        block_size=block_size,
        damping=damping,
        tolerance=tolerance,
        bits=bits,
        group_size=group_size,
        grid=grid,
    )
    require_dense(weight=weight, hessian=hessian)
    # The result must be an ordinary tensor, also if the caller is in inference mode.
    with torch.inference_mode(False), torch.no_grad():
        inputs = InputHessian(hessian.detach().to(weight.device))
        return prune(weight, inputs, recipe)


@dataclass(frozen=True, eq=False)
class LayerTask:
    """A weight to prune."""

    weight: Tensor  # the dense weight, (rows, columns)
    recipe: Recipe
    target: Tensor | None = None
    """The weight that mask and compensation work on in place of the dense one, the rows of this
    process alone; see `dense_target`. None for the dense weight itself."""
    progress: Callable[[str], None] = lambda _: None  # called with the state of a long solution
    is_pruned: bool = False
    """Whether the zeros of the weight are its removed weights: they stay, whatever the target, and
    the others are compensated and put on the grid."""

    @property
    def compensates(self) -> bool:
        """Whether kept weights make up for removed ones; zeros of the target lose nothing."""
        if self.is_pruned:
            return self.target is not None
        return not isinstance(self.recipe.pattern, Dense)


@dataclass(frozen=True, eq=False)
class _Solved:
    """A layer whose weights are removed and compensated for, in the dtype of the computation."""

    task: LayerTask
    problem: Problem  # its weight is the target
    dense: Tensor  # the rows of this process of the layer's weight
    result: Compensated
    target_loss: float  # the loss of `result` relative to the problem's weight
    fallback_mask: str | None
    zeros_loss: float | None = None
    grid_parameters: GridParameters | None = None  # of the rows of this process


def prune(
    weight: Tensor,
    inputs: InputHessian,
    recipe: Recipe,
    progress: Callable[[str], None] = lambda _: None,
    *,
    target: Tensor | None = None,
    processes: Processes = ALONE,
) -> Solution:
    """Prune a weight whose Hessian is checked already; see `prune_together`."""
    task = LayerTask(weight, recipe, target, progress)
    (solution,) = prune_together([task], inputs, processes=processes)
    return solution


def prune_together(
    tasks: Sequence[LayerTask], inputs: InputHessian, *, processes: Processes = ALONE
) -> list[Solution]:
    """Prune weights that share an input, whose Hessian is checked already.

    `prune_weight` documents the errors. The processes share the rows of each weight: all of them
    call this with the same weights and Hessian and with the targets of their own shares, and get
    the same solutions. The recipes have the same grid and damping. The rows of all weights are put
    on the grid at once: its search is column by column, and a GPU takes as long for one row as for
    thousands.
    """
    # All before the first solution: a misfit of the last weight must not cost the work on others.
    for task in tasks:
        _check_columns(task, inputs)
    # The bounds of rounding errors are those of full float32, whatever the caller allows elsewhere.
    with torch.inference_mode(False), torch.no_grad(), full_float32(inputs.hessian.device):
        solved = list(map(partial(_remove, inputs, processes), tasks))
        if solved[0].task.recipe.grid is not None:
            solved = _on_grid(solved)
        return [_solution(layer, processes) for layer in solved]


def _check_columns(task: LayerTask, inputs: InputHessian) -> None:
    check_weight(task.weight, inputs)
    recipe = task.recipe
    if not recipe.pattern.divides(inputs.columns):
        raise PatternError(
            f"{inputs.label}: {inputs.columns} columns do not split into the groups of pattern "
            f'"{recipe.pattern}". Choose a group that divides them, or leave the layer out.'
        )
    if recipe.grid is not None and not recipe.grid.divides(inputs.columns):
        raise PatternError(
            f"{inputs.label}: {inputs.columns} columns do not split into groups of "
            f"{recipe.grid.columns_together}, as `grid` {recipe.grid} needs. Take `bits`, or leave "
            "the layer out."
        )


def _remove(inputs: InputHessian, processes: Processes, task: LayerTask) -> _Solved:
    """Choose the weights to remove, and compensate for them."""
    recipe, method, dtype = task.recipe, task.recipe.method, task.weight.dtype
    rows, columns = task.weight.shape
    # Either dtype decides: float32 would round a float64 Hessian as it would a weight.
    wide = torch.float64 in (dtype, inputs.dtype)
    # The share comes before the conversion, which would copy the rows of all processes, too. The
    # loss of the result is measured from this dense weight, also if there is a target.
    share = task.weight.detach()[processes.share(rows)]
    dense = share.to(torch.float64 if wide else torch.float32)
    zeros = dense == 0
    mask = FixedMask(zeros) if task.is_pruned else method.mask
    problem = Problem(
        weight=dense if task.target is None else task.target.to(dense.dtype),
        result_dtype=dtype,
        inputs=inputs,
        pattern=recipe.pattern,
        # A mask that is not chosen by block is chosen for all columns at once.
        block_size=min((mask.by_block and recipe.block_size) or columns, columns),
        damping=recipe.damping,
        progress=task.progress,
        processes=processes,
        rows=rows,
    )
    if task.compensates:
        result = method.compensation.apply(problem, mask)
    else:  # without a pattern, zeros move as all other weights
        removed = zeros if task.is_pruned else torch.zeros_like(zeros)
        result = Compensated(problem.weight, removed)
    # Against the target, which is the dense weight itself if there is none.
    # After the cast, since its rounding is a part of the loss of the layer.
    target_loss = problem.loss(result.cast(dtype), problem.weight)
    chooses = task.compensates and not task.is_pruned
    smallest = _by_smallest(problem, method, target_loss, dtype) if chooses else None
    result, target_loss = smallest or (result, target_loss)
    fallback = None if smallest is None else Magnitude.name
    return _Solved(task, problem, dense, result, target_loss, fallback)


def _on_grid(solved: list[_Solved]) -> list[_Solved]:
    """Put the kept weights of layers that share an input on their grid.

    Zeros and grid are two constraints of one problem, solved one after the other: from the optimum
    for the zeros, the grid adds its own loss.
    """
    first, results = solved[0], [layer.result for layer in solved]
    assert first.task.recipe.grid is not None
    rounded, parameters = on_grid(
        first.problem,
        torch.cat([result.weight for result in results]),
        torch.cat([result.pruned for result in results]),
        first.task.recipe.grid,
    )
    finished, sizes = [], [len(result.weight) for result in results]
    of_layers = zip(solved, rounded.split(sizes), parameters.split(sizes), strict=True)
    for each, weight, of_layer in of_layers:
        problem, dtype, zeros_loss = each.problem, each.task.weight.dtype, each.target_loss
        if each.task.target is not None:
            zeros_loss = problem.loss(each.result.cast(dtype), each.dense)
        result = replace(each.result, weight=weight)
        target_loss = problem.loss(result.cast(dtype), problem.weight)
        layer = replace(each, result=result, grid_parameters=of_layer)
        finished.append(replace(layer, target_loss=target_loss, zeros_loss=zeros_loss))
    return finished


def _solution(layer: _Solved, processes: Processes) -> Solution:
    """Gather the rows of all processes, and measure the loss."""
    task, problem, result = layer.task, layer.problem, layer.result
    inputs, recipe, rows = problem.inputs, task.recipe, len(task.weight)
    weight = result.cast(task.weight.dtype)
    # Methods without an inverse did not use λ: to ask for H + λI would factorise it in vain, and
    # might fail for an H that they can do with.
    inverts = recipe.grid is not None or (task.compensates and recipe.method.needs_inverse)
    ratio = problem.damped.ratio if inverts else recipe.damping
    gathered = processes.gather_rows(weight, rows)
    # All processes check all rows: if one raised alone, the others would wait for it in the next
    # collective call.
    require_in_range(gathered, inputs.label)
    aims, parameters = task.target is not None, layer.grid_parameters
    if parameters is not None:
        parameters = parameters.map(lambda x: processes.gather_rows(x.contiguous(), rows).cpu())
    return Solution(
        weight=gathered,
        pruned=processes.gather_rows(result.pruned.contiguous(), rows),
        loss=problem.loss(weight, layer.dense) if aims else layer.target_loss,
        damping_used=ratio * inputs.mean_diagonal,
        damping_ratio=ratio,
        iterations=result.iterations,
        gap=result.gap,
        dead_inputs=inputs.dead_inputs,
        target_loss=layer.target_loss if aims else None,
        fallback_mask=layer.fallback_mask,
        zeros_loss=layer.zeros_loss,
        grid_parameters=parameters,
    )


def _by_smallest(
    problem: Problem, method: Method, loss: float, dtype: torch.dtype
) -> tuple[Compensated, float] | None:
    """Remove the smallest weights instead, if that loses less than the method's `loss`.

    This costs another compensation, so it is tried only if the smallest weights lose less even
    without one. Each column block has the sparsity that the method's mask gives it. Returns the
    result and its loss, or `None` if the method's own result stays.
    """
    if not (method.mask.needs_inverse and isinstance(method.compensation, ExactCompensation)):
        return None
    pruned = smallest_of_blocks(problem)
    uncompensated = problem.loss(problem.weight.masked_fill(pruned, 0), problem.weight)
    # 1. Losses are sums over all processes, so that all take the same branch and make the same
    #    collective calls.
    # 2. A loss that is not finite is an error of the dtype, which `_solution` raises.
    if not uncompensated < loss < math.inf:
        return None
    whole = replace(problem, block_size=problem.inputs.columns)
    result = method.compensation.apply(whole, FixedMask(pruned))
    compensated = problem.loss(result.cast(dtype), problem.weight)
    if not compensated < loss:
        return None
    remedy = "" if isinstance(method.mask, Joint) else "; the method JM as a rule does better then"
    warnings.warn(
        f"{problem.inputs.label}: {method} lost {loss:.4g}, and the smallest weights lose "
        f"{uncompensated:.4g} without and {compensated:.4g} with compensation: these were removed "
        f"instead. Inputs that are nearly copies of others are the usual cause{remedy}.",
        NumericalWarning,
        stacklevel=4,
    )
    return result, compensated
