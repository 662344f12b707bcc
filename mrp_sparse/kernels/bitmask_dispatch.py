"""The operators of both bitmasks on CUDA devices: a kernel for few tokens, or one dense product.

Both read the packed tensors by Triton, without waiting for the device and without a second copy
that stays. Where Triton cannot run, or for other dtypes than 16 bits, torch unpacks the weight.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mrp_sparse.formats import bitmask, bitmask4
from mrp_sparse.kernels.candidates import LARGEST, triton_missing
from mrp_sparse.kernels.operator import check_bitmask, linear_bitmask, linear_bitmask4

FEW_TOKENS = 64
"""Up to here the time is that of reading the weight; beyond, it is unpacked for a dense product."""


@linear_bitmask.register_kernel("cuda")
def multiply(
    x: Tensor, values: Tensor, bits: Tensor, offsets: Tensor, bias: Tensor | None
) -> Tensor:
    """Compute `linear_bitmask`.

    Raises:
        ValueError: Input and weight differ in dtype.
        RuntimeError: They differ in columns, counted in bytes of bits.
    """
    _check_dtypes(x, values)
    check_bitmask(x, bits)
    if not _by_triton(x):
        return F.linear(x, bitmask.unpack(values, bits, x.shape[-1]), bias)
    return _product(x, values, bits, None, offsets, bias)


@linear_bitmask4.register_kernel("cuda")
def multiply_coded(
    x: Tensor,
    nibbles: Tensor,
    bits: Tensor,
    scales: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    eight_bits: bool = False,
) -> Tensor:
    """Compute `linear_bitmask4`; activations are never rounded to 8 bits here.

    Raises:
        ValueError: Input and weight differ in dtype.
        RuntimeError: They differ in columns, counted in bytes of bits.
    """
    del eight_bits
    # Codes are integers: the weight's dtype is that of its scales.
    _check_dtypes(x, scales)
    check_bitmask(x, bits)
    if not _by_triton(x):
        return F.linear(x, bitmask4.unpack(nibbles, bits, scales, x.shape[-1]), bias)
    return _product(x, nibbles, bits, scales, offsets, bias)


def _product(
    x: Tensor,
    values: Tensor,
    bits: Tensor,
    scales: Tensor | None,
    offsets: Tensor,
    bias: Tensor | None,
) -> Tensor:
    from mrp_sparse.kernels import triton_bitmask

    columns = x.shape[-1]
    flat = x.reshape(-1, columns)
    # `product` decodes the weight again for every 16 tokens; unpacking decodes it once for all.
    if len(flat) > FEW_TOKENS:
        return F.linear(x, triton_bitmask.unpack(values, bits, scales, offsets, columns), bias)
    y = triton_bitmask.product(flat, values, bits, scales, offsets, bias)
    return y.view(*x.shape[:-1], bits.shape[0])


def _check_dtypes(x: Tensor, floating: Tensor) -> None:
    if x.dtype != floating.dtype:
        raise ValueError(
            f"The input is {x.dtype} and the packed weight {floating.dtype}; cast one of them."
        )


def _by_triton(x: Tensor) -> bool:
    """Return whether Triton runs here and takes x: 16-bit, not empty, fewer than 2³¹ elements."""
    if x.dtype not in (torch.bfloat16, torch.float16) or triton_missing(x.device) is not None:
        return False
    # No program is launched for no tokens. Only x is bounded: the unpacked weight is addressed with
    # 64 bits.
    return 0 < x.numel() < LARGEST
