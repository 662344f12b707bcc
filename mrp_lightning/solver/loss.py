"""The loss that pruning minimises: what a change of a weight changes in the layer's outputs."""

import torch
from torch import Tensor

from mrp_lightning.solver.precision import full_float32


def output_energy(change: Tensor, hessian: Tensor) -> float:
    """Return ½·tr(δ H δᵀ), the mean over the calibration tokens of ‖δ x‖².

    It is computed in full float32 whatever precision the user allows elsewhere, or in float64 if
    either tensor is float64.

    Args:
        change: δ, (rows, columns): the change of a weight for the layer's loss, the weight itself
            for the energy of the layer's outputs.
        hessian: H = 2·XᵀX / tokens, (columns, columns), undamped.
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
