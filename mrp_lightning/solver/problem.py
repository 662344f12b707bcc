"""The pruning problem of one layer: weight, Hessian, target weight and loss."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mrp_lightning.errors import HessianError, OptionError, TargetError
from mrp_lightning.processes import Processes
from mrp_lightning.solver.arithmetic import full_float32
from mrp_lightning.solver.hessian import DampedHessian, InputHessian, TokenSum
from mrp_lightning.solver.patterns import Pattern, Unstructured

TARGET_WEIGHT = 0.5
"""The weight α of the dense model's outputs in a dense target; see docs/methods.md."""


class InputShift(TokenSum):
    """Accumulate 2·(X_d − X̂)ᵀX̂ / tokens for a layer's inputs X̂ and the dense model's X_d.

    This shift is C − H, with C = 2·X_dᵀX̂ / tokens and the Hessian H = 2·X̂ᵀX̂ / tokens.
    Accumulated from differences, it is exactly zero if both inputs are equal.
    """

    def update(self, dense: Tensor, pruned: Tensor) -> None:
        """Add a batch of inputs X_d and X̂, (..., columns) each, whose rows are the same tokens."""
        with torch.inference_mode(False), torch.no_grad(), full_float32(pruned.device):
            inputs = pruned.detach().reshape(-1, self.columns).float()
            # Subtracted before the product: of two sums, nearly equal, only rounding would remain.
            difference = dense.detach().reshape(-1, self.columns).float() - inputs
            self._sum_on(inputs.device).addmm_(difference.T, inputs, alpha=2)
            self.num_tokens += len(inputs)

    def matrix(self) -> Tensor:
        """Return 2·(X_d − X̂)ᵀX̂ / tokens, float32 (columns, columns).

        Raises:
            HessianError: No tokens were seen, or the sum holds NaN or Inf.
        """
        if self._sum is None or self.num_tokens == 0:
            raise HessianError(f"layer `{self.name}`: no calibration tokens were seen.")
        if not bool(self._sum.isfinite().all()):
            raise HessianError(
                f"layer `{self.name}`: the dense model's inputs hold NaN or Inf. Likely causes: "
                "float16 overflow in the model (try bfloat16 or float32), or a broken checkpoint."
            )
        return self._sum / self.num_tokens


def dense_target(weight: Tensor, shift: Tensor, damped: DampedHessian) -> Tensor:
    """Return a weight whose outputs on the pruned model's inputs are nearer to the dense ones.

    W̃ = W + α·W(C − H)(H + λI)⁻¹ for the dense weight W (rows, columns), α = `TARGET_WEIGHT`, and
    the shift C − H of `InputShift`. For α = 1 it would minimise ‖W̃X̂ᵀ − WX_dᵀ‖² / tokens +
    λ/2·‖W̃ − W‖². The result is float32, or float64 if the weight is; if the shift is zero, it is W
    itself, bit for bit.
    """
    exact = damped if damped.float32_suffices else damped.double
    wide = weight.to(torch.float64 if weight.dtype == torch.float64 else torch.float32)
    if not bool(shift.any()):
        return wide
    with full_float32(weight.device):
        missing = wide.to(exact.dtype) @ shift.to(exact.dtype)
        # UᵀU = (H + λI)⁻¹: two products with U, and no inverse is formed.
        change = (missing @ exact.factor.T) @ exact.factor
    return torch.add(wide, change.to(wide.dtype), alpha=TARGET_WEIGHT)


@dataclass(frozen=True, eq=False)
class Problem:
    """The pruning problem of one layer, or of this process's share of its rows.

    The solution x minimises ½·tr((x − w)(H + λI)(x − w)ᵀ) with the removed weights zero.
    """

    weight: Tensor  # w, (rows, columns), float32 or float64: the dtype to compute in
    result_dtype: torch.dtype  # that of the layer's weight, to which the solution is cast
    inputs: InputHessian  # the Hessian H of the layer's inputs
    pattern: Pattern
    block_size: int  # number of columns chosen together, from 1 to all
    damping: float  # fraction of the mean diagonal of H that is added to the diagonal, ≥ 0
    progress: Callable[[str], None]  # called with the progress of a long solution, in words
    processes: Processes  # the processes that share the rows of the layer
    rows: int  # the number of rows of the whole layer

    @property
    def damped(self) -> DampedHessian:
        """H + λI in the dtype of the weight, factorised when a layer first needs it."""
        damped = self.inputs.damped(self.damping)
        return damped.double if self.weight.dtype == torch.float64 else damped

    def select(self, scores: Tensor, start: int) -> Tensor:
        """Mark the lowest scores (rows, width) of the columns from `start` on, True = removed.

        Unstructured patterns rank the rows of all processes together.
        """
        if isinstance(self.pattern, Unstructured):
            # All processes rank the same scores and ties, so that their masks agree without more
            # messages. The groups of other patterns lie within a row.
            everywhere = self.processes.gather_rows(scores, self.rows)
            return self.pattern.select(everywhere, start)[self.processes.share(self.rows)]
        return self.pattern.select(scores, start)

    def total(self, share: float) -> float:
        """Return the sum over all processes of a number, to which this one contributes `share`."""
        # `fsum` rounds once, so that the sum does not depend on the order of the shares.
        return math.fsum(number for (number,) in self.processes.numbers(share))

    def loss(self, weight: Tensor, aim: Tensor) -> float:
        """Return the loss of the whole layer, from this process's rows of `weight` and `aim`."""
        return self.total(output_energy(weight.to(aim.dtype) - aim, self.inputs.hessian))


@dataclass(frozen=True, kw_only=True)
class Quality:
    """The losses of a layer's solution, and the effort of the solver.

    Attributes:
        loss: ½·tr(δ H δᵀ), H undamped, δ = returned weight − weight: the mean over the calibration
            tokens of ‖δ x‖².
        damping_used: λ, which is added to the diagonal of H. Without a grid, methods without an
            inverse add nothing; for these it is `damping` times the mean diagonal. `None` if there
            is no H.
        damping_ratio: λ as a fraction of the mean diagonal of H: the given damping, or the value to
            which it had to be raised. `None` if there is no H.
        iterations: The number of conjugate gradient iterations; `None` for methods without.
        gap: A certified bound of (L − L*) / L for the damped loss L and its optimum L* for the
            removed weights, before a cast to a narrower dtype and before the weights are put on a
            grid (`bits` or `grid`); of `prune_columns` (L − L*) / L*, which is computed exactly.
            `None` for methods that do not seek the optimum.
        dead_inputs: The number of columns whose input was always zero; `None` if there is no H.
        target_loss: `loss` with δ measured from the target weight; `None` if the target is the
            weight itself.
        fallback_mask: The mask that replaced that of the method, because the latter lost more even
            than this one without compensation; usually `None`. See `prune_weight`.
        zeros_loss: With a grid, the loss before the kept weights are put on it, else `None`.
    """

    loss: float
    damping_used: float | None = None
    damping_ratio: float | None = None
    iterations: int | None = None
    gap: float | None = None
    dead_inputs: int | None = None
    target_loss: float | None = None
    fallback_mask: str | None = None
    zeros_loss: float | None = None

    @property
    def grid_loss(self) -> float | None:
        """The part of `loss` that the grid adds.

        It is the loss of the grid alone if the weight was the optimum for its zeros. Otherwise it
        may be negative, since the grid's error feedback also compensates for the removed weights.
        """
        return None if self.zeros_loss is None else self.loss - self.zeros_loss


def output_energy(change: Tensor, hessian: Tensor) -> float:
    """Return ½·tr(δ H δᵀ), the mean over the calibration tokens of ‖δ x‖², H undamped.

    δ is the change of a weight for the layer's loss, and the weight itself for the energy of the
    layer's outputs. Products are in full float32, whatever precision the user allows elsewhere, and
    in float64 if either tensor is float64 or float32 does not suffice; sums are in float64.
    """
    wide = torch.float64 in (change.dtype, hessian.dtype)
    dtype = torch.float64 if wide else torch.float32
    change, hessian = change.to(dtype), hessian.to(dtype)
    with full_float32(change.device):
        energy = _sum((change @ hessian) * change) / 2
    uncorrelated = _sum(change.square() * hessian.diagonal()) / 2
    # NaN fails the comparison and is computed in float64 too.
    if not wide and not 1e-3 * uncorrelated <= energy < math.inf:
        # The changes cancel in the outputs, as happens with few tokens, so that a float32 result
        # would be rounding error; or the products overflow float32.
        return output_energy(change.double(), hessian)
    # Rounding can make it negative. NaN as the first argument of `max` is returned as it is.
    return max(energy, 0.0)


def _sum(values: Tensor) -> float:
    """Sum in float64, in which no sum of float32 numbers overflows."""
    return float(values.sum(dtype=torch.float64))


def require_dense(**tensors: Tensor) -> None:
    """Raise a `TargetError` for an argument on the meta device, or of another layout."""
    for name, tensor in tensors.items():
        if tensor.is_meta or tensor.layout != torch.strided:
            kind = "meta" if tensor.is_meta else str(tensor.layout)
            raise TargetError(
                f"`{name}` must be a dense tensor with values; got a {kind} tensor. Load it to a "
                "device, or make it dense with `to_dense()`."
            )


def require_in_range(weight: Tensor, label: str) -> None:
    """Raise a `HessianError`, begun by `label`, if a compensated, cast weight has Inf or NaN."""
    if not bool(weight.isfinite().all()):
        raise HessianError(
            f"{label}: the compensated weight is out of the range of {weight.dtype}. "
            "Raise `damping`, calibrate on more tokens, or take a wider dtype."
        )


def check_weight(weight: Tensor, inputs: InputHessian) -> None:
    """Check that a weight is a finite floating-point matrix that fits the Hessian of its inputs."""
    label = inputs.label
    # Types of 8 bits are floating point, too, and have no arithmetic.
    if weight.ndim != 2 or not weight.is_floating_point() or weight.itemsize < 2:
        raise TargetError(
            f"{label}: expected a weight (rows, columns) in floating point of 16 bits or more; got "
            f"{tuple(weight.shape)} of {weight.dtype}."
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
    if not bool(weight.isfinite().all()):
        raise TargetError(f"{label}: the weight holds NaN or Inf.")
