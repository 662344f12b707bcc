"""The weight that pruning aims at: the layer's own, or one that undoes what its inputs lost."""

import torch
from torch import Tensor

from mrp_lightning.errors import HessianError
from mrp_lightning.solver.damping import DampedHessian
from mrp_lightning.solver.hessian import TokenSum
from mrp_lightning.solver.precision import full_float32


class InputShift(TokenSum):
    """Sum up how far a layer's inputs are from those of the dense model: 2·(X_d − X̂)ᵀX̂ / tokens.

    It is C − H, with C = 2·X_dᵀX̂ / tokens and the Hessian H = 2·X̂ᵀX̂ / tokens. Summed up as the
    product of a difference, it is exactly zero where both inputs are the same.
    """

    def update(self, dense: Tensor, pruned: Tensor) -> None:
        """Add a batch of inputs X_d and X̂, (..., columns) each, whose rows are the same tokens."""
        with torch.inference_mode(False), torch.no_grad(), full_float32(pruned.device):
            given = pruned.detach().reshape(-1, self.columns).float()
            difference = dense.detach().reshape(-1, self.columns).float() - given
            self._sum_on(given.device).addmm_(difference.T, given, alpha=2)
            self.num_tokens += len(given)

    def matrix(self) -> Tensor:
        """Return 2·(X_d − X̂)ᵀX̂ / tokens, float32 (columns, columns).

        Raises:
            HessianError: No tokens were seen, or NaN or Inf.
        """
        if self._sum is None:
            raise HessianError(f"layer `{self.name}`: no calibration tokens were seen.")
        if not bool(self._sum.isfinite().all()):
            raise HessianError(
                f"layer `{self.name}`: the dense model's inputs hold NaN or Inf. Likely causes: "
                "float16 overflow in the model (try bfloat16 or float32), or a broken checkpoint."
            )
        return self._sum / self.num_tokens


def dense_target(
    weight: Tensor, shift: Tensor, damped: DampedHessian, target_weight: float
) -> Tensor:
    """Return the weight whose outputs on the pruned model's inputs are most like the dense ones.

    W̃ = W + α·W(C − H)(H + λI)⁻¹ for the dense weight W (rows, columns), α = `target_weight` from 0
    (the dense weight itself) to 1, and the shift C − H of `InputShift`. For α = 1 it minimises
    ‖W̃X̂ᵀ − WX_dᵀ‖² / tokens + λ/2·‖W̃ − W‖². It is in float32, or float64 if the weight is; and W
    itself, bit for bit, where the shift is zero.
    """
    exact = damped if damped.float32_suffices else damped.double
    wide = weight.to(torch.float64 if weight.dtype == torch.float64 else torch.float32)
    if not bool(shift.any()):
        return wide
    with full_float32(weight.device):
        missing = wide.to(exact.dtype) @ shift.to(exact.dtype)
        change = (missing @ exact.factor.T) @ exact.factor
    return torch.add(wide, change.to(wide.dtype), alpha=target_weight)
