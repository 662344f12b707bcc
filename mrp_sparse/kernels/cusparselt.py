"""cuSPARSELt on plain tensors.

cuSPARSELt multiplies with the sparse tensor cores (sm_80 and newer) and needs its own layout,
which depends on library and device: it is built at load and never written to disk. Each call sets
up its product on the host, so it is only fast inside a CUDA graph, and the default algorithm is
often slow.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mrp_sparse import upstream

DTYPES = (torch.float16, torch.bfloat16)
_WEIGHT_MULTIPLE = 16  # rows and columns of the sparse operand, 16-bit dtypes
_TOKEN_MULTIPLE = 8  # the dense operand, 16-bit dtypes


def missing(device: torch.device) -> str | None:
    """Return the reason why cuSPARSELt cannot be used on a device, or `None`."""
    if device.type != "cuda":
        return f"cuSPARSELt runs on CUDA devices, not on {device.type!r}"
    # The build is checked before the capability, since that question starts CUDA.
    if not torch.backends.cusparselt.is_available():
        return f"torch {torch.__version__} was built without cuSPARSELt"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"sparse tensor cores need sm_80 or newer; this device is sm_{major}{minor}"
    return None


def refuse(out_features: int, in_features: int, dtype: torch.dtype) -> str | None:
    """Return the reason why a weight of this shape and dtype cannot be compressed, or `None`."""
    if dtype not in DTYPES:
        name = str(dtype).removeprefix("torch.")
        return f"cuSPARSELt takes float16 and bfloat16 here, not {name}"
    if out_features % _WEIGHT_MULTIPLE or in_features % _WEIGHT_MULTIPLE:
        return (
            f"cuSPARSELt needs both dimensions to be multiples of {_WEIGHT_MULTIPLE}, "
            f"not {out_features}×{in_features}"
        )
    return None


def compress(weight: Tensor) -> Tensor:
    """Return a 2:4 weight (out, in) in the library's layout. The pattern is not checked."""
    return upstream.compress_cusparselt(weight.contiguous())


def matmul(x: Tensor, compressed: Tensor, bias: Tensor | None) -> Tensor:
    """Return x Wᵀ + b (tokens, out), contiguous, for x (tokens, in)."""
    # The sparse operand is the left one, hence W xᵀ, which is transposed back. Padded tokens give
    # the last rows of y, which the slice drops: rows do not influence each other.
    return upstream.matmul_cusparselt(compressed, _padded(x).t(), bias)[: x.shape[0]]


def _padded(x: Tensor) -> Tensor:
    padding = -x.shape[0] % _TOKEN_MULTIPLE
    return F.pad(x, (0, 0, 0, padding)) if padding else x.contiguous()
