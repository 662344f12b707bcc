"""`torch.ops.mrp_lightning.linear24`: a linear layer whose weight is packed 2:4.

The operator is opaque to `torch.compile` and `torch.export`. Which kernel runs on a CUDA device
(`export.kernels.dispatch`) is decided inside it, where the number of tokens is known, so that a new
number costs no recompilation and every CUDA graph captures its own choice.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from export.packed.format import unpack

MAX_ERROR_RATIO = 1.5
"""Largest error of a kernel, as a multiple of the error of the dense product in the same dtype."""


@torch.library.custom_op("mrp_lightning::linear24", mutates_args=(), device_types="cpu")
def linear24(
    x: Tensor,
    weight: Tensor,
    meta: Tensor,
    bias: Tensor | None,
    compressed: Tensor | None = None,
) -> Tensor:
    """Compute x Wᵀ + bias with W = unpack(weight, meta).

    A CPU has no instruction for 2:4: there the weight is unpacked and multiplied as a dense one.

    Args:
        x: Input (..., columns), in the dtype of `weight`.
        weight: Kept values (rows, columns / 2).
        meta: Columns of the kept values, uint8 (rows, columns / 8).
        bias: Added to each output, (rows,).
        compressed: The same W in cuSPARSELt's layout, for kernels that can use it.

    Returns:
        The product (..., rows), contiguous.
    """
    del compressed
    return F.linear(x, unpack(weight, meta), bias)


@linear24.register_fake
def _fake(
    x: Tensor,
    weight: Tensor,
    meta: Tensor,
    bias: Tensor | None,
    compressed: Tensor | None = None,
) -> Tensor:
    del meta, bias, compressed
    torch._check(x.shape[-1] == 2 * weight.shape[1], lambda: "x must have the weight's columns")
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    _, weight, meta, *_ = inputs
    ctx.save_for_backward(weight, meta)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, Tensor | None, None]:
    """Gradients of the input and the bias, for prompts, adapters and attributions."""
    if ctx.needs_input_grad[1]:
        raise NotImplementedError(
            "A packed 2:4 weight cannot be trained: call `model.dequantize()` first, or freeze it "
            "with `weight.requires_grad_(False)`."
        )
    weight, meta = ctx.saved_tensors
    grad_x = grad @ unpack(weight, meta) if ctx.needs_input_grad[0] else None
    grad_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[3] else None
    return grad_x, None, None, grad_bias, None


linear24.register_autograd(_backward, setup_context=_save_for_backward)
