"""Prune one weight matrix."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mrp_lightning.errors import HessianError, OptionError, PatternError, TargetError
from mrp_lightning.solver.damping import DampedHessian
from mrp_lightning.solver.methods import Method, parse_method
from mrp_lightning.solver.patterns import Pattern, make_pattern
from mrp_lightning.solver.precision import full_float32


@dataclass(frozen=True)
class Solution:
    """A pruned weight and how good it is.

    Attributes:
        weight: (rows, columns), in the dtype of the input; removed weights are +0.0.
        pruned: bool (rows, columns), True = removed.
        loss: ½·tr(δ H δᵀ), H undamped, δ = returned weight − weight: the mean over the calibration
            tokens of ‖δ x‖².
        damping_used: λ, what was added to the diagonal of H.
        iterations: conjugate gradient iterations; None for methods without.
        gap: certified relative distance of the damped loss to that of the optimum for `pruned`,
            before a cast to a narrower dtype; None for methods that do not seek the optimum.
        dead_inputs: columns whose input was always zero.
    """

    weight: Tensor
    pruned: Tensor
    loss: float
    damping_used: float
    iterations: int | None
    gap: float | None
    dead_inputs: int


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
        weight: (rows, columns), floating point.
        hessian: H = 2·XᵀX / tokens, (columns, columns), undamped; see `HessianAccumulator`.
        sparsity: fraction of the weights to remove, in (0, 1).
        pattern: "N:M", N kept of every M consecutive input columns.
        method: magnitude, wanda, SS (= sparsegpt), SM, MS, MM, or MASK+COMPENSATION.
        block_size: columns chosen at a time (paper's S); None = all.
        damping: fraction of the mean diagonal of H that is added to the diagonal, ≥ 0.
        tolerance: relative gap to the optimum at which compensation M stops, > 0.

    Returns:
        The pruned weight and its measures. The inputs are not modified.

    Raises:
        PatternError: the pattern is malformed or does not fit the columns or the block size.
        MethodError: no such method, or not for this pattern.
        HessianError: H is unusable.
        TargetError: the weight is not a finite floating-point matrix.
    """
    chosen_pattern, chosen_method = make_pattern(sparsity, pattern), parse_method(method)
    chosen_method.check(chosen_pattern, block_size)
    with torch.inference_mode(False), torch.no_grad():
        prepared = DampedHessian(hessian.detach().to(weight.device), damping)
        return prune(
            weight,
            prepared,
            chosen_pattern,
            chosen_method,
            block_size=block_size,
            tolerance=tolerance,
        )


def prune(
    weight: Tensor,
    prepared: DampedHessian,
    pattern: Pattern,
    method: Method,
    *,
    block_size: int | None = 128,
    tolerance: float = 1e-6,
) -> Solution:
    """Prune a weight whose Hessian is prepared already; see `prune_weight`.

    Args:
        weight: (rows, columns), floating point.
        prepared: the damped Hessian of the layer's input, shared by all layers that read it.
        pattern: how many weights go, and where.
        method: mask and compensation.
        block_size: columns chosen at a time; None = all.
        tolerance: relative gap to the optimum at which compensation M stops, > 0.

    Raises:
        As `prune_weight`.
    """
    method.check(pattern, block_size)
    if not (isinstance(tolerance, int | float) and math.isfinite(tolerance) and tolerance > 0):
        raise OptionError(f"`tolerance` must be a number > 0; got {tolerance!r}.")
    _check_weight(weight, prepared, pattern)
    with torch.inference_mode(False), torch.no_grad(), full_float32(weight.device):
        weight = weight.detach()
        if weight.dtype == torch.float64:
            prepared = prepared.double
        dense = weight.to(prepared.dtype)
        result = method.compensation.apply(
            dense,
            prepared,
            method.mask,
            pattern,
            min(block_size or prepared.columns, prepared.columns),
            tolerance,
        )
        pruned = result.pruned.contiguous()
        compensated = result.weight.masked_fill(pruned, 0).to(weight.dtype).contiguous()
        return Solution(
            weight=compensated,
            pruned=pruned,
            loss=_loss(compensated.to(prepared.dtype) - dense, prepared.hessian),
            damping_used=prepared.damping_used,
            iterations=result.iterations,
            gap=result.gap,
            dead_inputs=prepared.dead_inputs,
        )


def _loss(change: Tensor, hessian: Tensor) -> float:
    """½·tr(δ H δᵀ), H undamped, for δ (rows, columns)."""
    hessian = hessian.to(change.dtype)
    loss = float(((change @ hessian) * change).sum()) / 2
    apart = float((change.square() * hessian.diagonal()).sum()) / 2
    if loss < 1e-3 * apart and change.dtype != torch.float64:
        # The changes cancel in the outputs, as they do where tokens are few: float32 would return
        # what its rounding leaves.
        return _loss(change.double(), hessian.double())
    return max(loss, 0.0)


def _check_weight(weight: Tensor, prepared: DampedHessian, pattern: Pattern) -> None:
    label = prepared.label
    if weight.ndim != 2 or not weight.is_floating_point():
        raise TargetError(
            f"{label}: expected a floating-point weight (rows, columns); got {tuple(weight.shape)} "
            f"of {weight.dtype}."
        )
    if weight.shape[1] != prepared.columns:
        raise HessianError(
            f"{label}: the weight has {weight.shape[1]} columns, its Hessian {prepared.columns}; "
            "they must be equal."
        )
    if weight.device != prepared.hessian.device:
        raise OptionError(
            f"{label}: the weight is on {weight.device}, its Hessian on {prepared.hessian.device}; "
            "move one of them."
        )
    if not pattern.divides(weight.shape[1]):
        raise PatternError(
            f"{label}: {weight.shape[1]} columns do not split into the groups of pattern "
            f'"{pattern}". Choose a group that divides them, or leave the layer out.'
        )
    if not bool(weight.isfinite().all()):
        raise TargetError(f"{label}: the weight holds NaN or Inf.")
