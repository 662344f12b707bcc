"""Prune one weight matrix."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mrp_lightning.errors import HessianError, OptionError, PatternError, TargetError
from mrp_lightning.processes import ALONE, Processes
from mrp_lightning.solver.input_hessian import InputHessian
from mrp_lightning.solver.patterns import Pattern
from mrp_lightning.solver.precision import full_float32
from mrp_lightning.solver.problem import Problem
from mrp_lightning.solver.recipe import Recipe


@dataclass(frozen=True)
class Solution:
    """A pruned weight and how good it is.

    Attributes:
        weight: The new weight, (rows, columns), in the dtype of the input; removed weights are
            +0.0.
        pruned: bool (rows, columns), True = removed.
        loss: ½·tr(δ H δᵀ), H undamped, δ = returned weight − weight: the mean over the calibration
            tokens of ‖δ x‖².
        damping_used: λ, what was added to the diagonal of H. Methods without an inverse add
            nothing; then it is what the given damping would have added.
        damping_ratio: Fraction of the mean diagonal of H that λ is: the given damping, or what it
            had to be raised to.
        iterations: Number of conjugate gradient iterations; None for methods without.
        gap: Certified relative distance of the damped loss to that of the optimum for `pruned`,
            before a cast to a narrower dtype; None for methods that do not seek the optimum.
        dead_inputs: Number of columns whose input was always zero.
        target_loss: The same as `loss` against the weight that was aimed at; None where that is the
            weight itself.
    """

    weight: Tensor
    pruned: Tensor
    loss: float
    damping_used: float
    damping_ratio: float
    iterations: int | None
    gap: float | None
    dead_inputs: int
    target_loss: float | None = None


def prune_weight(
    weight: Tensor,
    hessian: Tensor,
    *,
    sparsity: float | None = None,
    pattern: str | None = None,
    method: str = "SM",
    block_size: int | None = 128,
    damping: float = 0.01,
    tolerance: float = 1e-6,
) -> Solution:
    """Remove weights and compensate for them, so that the layer's outputs change least.

    Minimises ½·tr(δ H δᵀ), the mean over tokens of ‖(w + δ)x − wx‖², with the removed weights zero.
    Give exactly one of `sparsity` and `pattern`.

    Args:
        weight: The dense weight, (rows, columns), floating point.
        hessian: H = 2·XᵀX / tokens, (columns, columns), undamped; see `HessianAccumulator`.
        sparsity: Fraction of the weights to remove, in (0, 1).
        pattern: "N:M", N kept of every M consecutive input columns.
        method: magnitude, wanda, SS (= sparsegpt), SM, MS, MM, or MASK+COMPENSATION.
        block_size: Number of columns chosen together (the paper's S); None for all.
        damping: Fraction of the mean diagonal of H that is added to the diagonal, ≥ 0. It rises
            tenfold, with a `NumericalWarning`, while H is not positive definite.
        tolerance: Relative gap to the optimum at which the compensation M stops, > 0.

    Returns:
        The pruned weight and its measures. The inputs are not modified.

    Raises:
        PatternError: The pattern is malformed or does not fit the columns or the block size.
        MethodError: There is no such method, or not for this pattern.
        OptionError: `block_size`, `damping` or `tolerance` is out of range.
        HessianError: H is unusable, or gives a weight out of the range of its dtype.
        TargetError: The weight is not a finite floating-point matrix.
    """
    recipe = Recipe.of(
        method=method,
        sparsity=sparsity,
        pattern=pattern,
        block_size=block_size,
        damping=damping,
        tolerance=tolerance,
    )
    with torch.inference_mode(False), torch.no_grad():
        inputs = InputHessian(hessian.detach().to(weight.device))
        return prune(weight, inputs, recipe)


def prune(
    weight: Tensor,
    inputs: InputHessian,
    recipe: Recipe,
    tell: Callable[[str], None] = lambda _: None,
    *,
    target: Tensor | None = None,
    processes: Processes = ALONE,
) -> Solution:
    """Prune a weight whose Hessian is checked already; `prune_weight` says what is raised.

    Mask and compensation work on the `target` (see `dense_target`), where one is given, in place of
    the dense weight. The processes share the rows: all of them call this with the same weight and
    Hessian and with the target of their own share, and get the same solution. `tell` is called with
    where the solution is, in words, while it takes long.
    """
    _check_weight(weight, inputs, recipe.pattern)
    with torch.inference_mode(False), torch.no_grad(), full_float32(weight.device):
        rows = len(weight)
        mine = weight.detach()[processes.share(rows)]
        wide = torch.float64 in (weight.dtype, inputs.dtype)
        dense = mine.to(torch.float64 if wide else torch.float32)
        problem = Problem(
            weight=dense if target is None else target.to(dense.dtype),
            inputs=inputs,
            pattern=recipe.pattern,
            block_size=recipe.columns_together(inputs.columns),
            damping=recipe.damping,
            tell=tell,
            processes=processes,
            rows=rows,
        )
        result = recipe.method.compensation.apply(problem, recipe.method.mask)
        pruned = result.pruned.contiguous()
        compensated = result.weight.masked_fill(pruned, 0).to(weight.dtype).contiguous()
        ratio = problem.damped.ratio if recipe.method.needs_inverse else recipe.damping

        def loss_against(aim: Tensor) -> float:
            return problem.total(output_energy(compensated.to(dense.dtype) - aim, inputs.hessian))

        gathered = processes.gather_rows(compensated, rows)
        if not bool(gathered.isfinite().all()):
            raise HessianError(
                f"{inputs.label}: the compensated weight is out of the range of {weight.dtype}. "
                "Raise `damping`, calibrate on more tokens, or take a wider dtype."
            )
        return Solution(
            weight=gathered,
            pruned=processes.gather_rows(pruned, rows),
            loss=loss_against(dense),
            damping_used=ratio * inputs.mean_diagonal,
            damping_ratio=ratio,
            iterations=result.iterations,
            gap=result.gap,
            dead_inputs=inputs.dead_inputs,
            target_loss=None if target is None else loss_against(problem.weight),
        )


def output_energy(change: Tensor, hessian: Tensor) -> float:
    """Return ½·tr(δ H δᵀ), the mean over the calibration tokens of ‖δ x‖², H undamped.

    δ is the change of a weight for the layer's loss, and the weight itself for the energy of the
    layer's outputs. It is computed in full float32 whatever precision the user allows elsewhere, or
    in float64 if either tensor is float64.
    """
    wide = torch.float64 in (change.dtype, hessian.dtype)
    dtype = torch.float64 if wide else torch.float32
    change, hessian = change.to(dtype), hessian.to(dtype)
    with full_float32(change.device):
        energy = float(((change @ hessian) * change).sum()) / 2
    apart = float((change.square() * hessian.diagonal()).sum()) / 2
    if energy < 1e-3 * apart and not wide:
        # The changes cancel in the outputs, as they do where tokens are few: float32 would return
        # what its rounding leaves.
        return output_energy(change.double(), hessian)
    return max(energy, 0.0)


def _check_weight(weight: Tensor, inputs: InputHessian, pattern: Pattern) -> None:
    label = inputs.label
    if weight.ndim != 2 or not weight.is_floating_point():
        raise TargetError(
            f"{label}: expected a floating-point weight (rows, columns); got {tuple(weight.shape)} "
            f"of {weight.dtype}."
        )
    if weight.shape[1] != inputs.columns:
        raise HessianError(
            f"{label}: the weight has {weight.shape[1]} columns, its Hessian {inputs.columns}; "
            "they must be equal."
        )
    if weight.device != inputs.hessian.device:
        raise OptionError(
            f"{label}: the weight is on {weight.device}, its Hessian on {inputs.hessian.device}; "
            "move one of them."
        )
    if not pattern.divides(weight.shape[1]):
        raise PatternError(
            f"{label}: {weight.shape[1]} columns do not split into the groups of pattern "
            f'"{pattern}". Choose a group that divides them, or leave the layer out.'
        )
    if not bool(weight.isfinite().all()):
        raise TargetError(f"{label}: the weight holds NaN or Inf.")
