"""The operators of packed layers: `torch.ops.mrp_lightning.linear24` and `linear_bitmask`.

They are opaque to `torch.compile` and `torch.export`. Which kernel runs is decided inside them,
where the number of tokens is known, so that a new number costs no recompilation and every CUDA
graph captures its own choice: on CUDA devices by `dispatch`. What is here takes the calls of all
other devices: it unpacks the weight and multiplies as a dense one. On a CPU it does so only until
the compiled kernels are there, which register themselves for it and take all calls from then on.

Under autocast all floating operands are cast, as those of `F.linear` are.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from export.kernels import compiled
from export.packed import bitmask_format
from export.packed.sparse24_format import unpack

MAX_ERROR_RATIO = 1.5
"""Largest error of a kernel, as a multiple of the error of the dense product in the same dtype."""


@torch.library.custom_op("mrp_lightning::linear24", mutates_args=())
def linear24(
    x: Tensor,
    weight: Tensor,
    meta: Tensor,
    bias: Tensor | None,
    compressed: Tensor | None = None,
) -> Tensor:
    """Compute x Wᵀ + bias with W = unpack(weight, meta).

    Args:
        x: Input (..., columns), in the dtype of `weight`.
        weight: Kept values (rows, columns / 2).
        meta: Columns of the kept values, uint8 (rows, columns / 8).
        bias: Added to each output, (rows,).
        compressed: The same W in cuSPARSELt's layout, for kernels that can use it.

    Returns:
        The product (..., rows), contiguous.
    """
    if x.device.type == "cpu" and compiled.load():
        return torch.ops.mrp_lightning.linear24(x, weight, meta, bias, compressed)
    return F.linear(x, unpack(weight, meta), bias)


@linear24.register_fake
def _fake24(
    x: Tensor,
    weight: Tensor,
    meta: Tensor,
    bias: Tensor | None,
    compressed: Tensor | None = None,
) -> Tensor:
    del meta, bias, compressed
    torch._check(x.shape[-1] == 2 * weight.shape[1], lambda: "x must have the weight's columns")
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@torch.library.custom_op("mrp_lightning::linear_bitmask", mutates_args=())
def linear_bitmask(
    x: Tensor, values: Tensor, bits: Tensor, offsets: Tensor, bias: Tensor | None
) -> Tensor:
    """Compute x Wᵀ + bias with W = unpack(values, bits, columns).

    Args:
        x: Input (..., columns), in the dtype of `values`. One that is too narrow for the bits is
            refused on a CPU; of one that is wider within the last byte nothing tells.
        values: Kept values, row after row in the order of their columns.
        bits: Where they were, uint8 (rows, ceil(columns / 8)), lowest bit first.
        offsets: Where the values of each row begin, int64 (rows,); the end of the last may follow.
        bias: Added to each output, (rows,).

    Returns:
        The product (..., rows), contiguous.
    """
    if x.device.type == "cpu" and compiled.load():
        return torch.ops.mrp_lightning.linear_bitmask(x, values, bits, offsets, bias)
    _check_bitmask(x, bits)
    # A look at the bits would have other devices wait, which a CUDA graph cannot.
    if x.device.type == "cpu" and (damage := bitmask_format.damage(values, bits, x.shape[-1])):
        raise RuntimeError(f"The packed weight does not fit the input's columns: {damage}.")
    return F.linear(x, bitmask_format.unpack(values, bits, x.shape[-1]), bias)


def _check_bitmask(x: Tensor, bits: Tensor) -> None:
    torch._check(
        bitmask_format.bytes_of(x.shape[-1]) == bits.shape[1],
        lambda: "x must have the weight's columns",
    )


@linear_bitmask.register_fake
def _fake_bitmask(
    x: Tensor, values: Tensor, bits: Tensor, offsets: Tensor, bias: Tensor | None
) -> Tensor:
    del values, offsets, bias
    _check_bitmask(x, bits)
    return x.new_empty(*x.shape[:-1], bits.shape[0])


def _save24(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    _, *weight, _, _ = inputs
    ctx.save_for_backward(*weight)


def _backward24(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of the input and the bias, for prompts, adapters and attributions."""
    _refuse_training(ctx)
    grad_x = grad @ unpack(*ctx.saved_tensors) if ctx.needs_input_grad[0] else None
    grad_bias = grad.sum_to_size(grad.shape[-1:]) if ctx.needs_input_grad[3] else None
    return grad_x, None, None, grad_bias, None


def _save_bitmask(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    x, values, bits, _, _ = inputs
    ctx.columns = x.shape[-1]
    ctx.save_for_backward(values, bits)


def _backward_bitmask(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    _refuse_training(ctx)
    grad_x = None
    if ctx.needs_input_grad[0]:
        values, bits = ctx.saved_tensors
        grad_x = grad @ bitmask_format.unpack(values, bits, ctx.columns)
    grad_bias = grad.sum_to_size(grad.shape[-1:]) if ctx.needs_input_grad[4] else None
    return grad_x, None, None, None, grad_bias


def _refuse_training(ctx: Any) -> None:
    if ctx.needs_input_grad[1]:
        raise NotImplementedError(
            "A packed weight cannot be trained: call `model.dequantize()` first, or freeze it "
            "with `weight.requires_grad_(False)`."
        )


def _cast(tensor: Tensor | None, device: str) -> Tensor | None:
    """A tensor as autocast gives it to `F.linear`."""
    if tensor is None or tensor.device.type != device or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))


def _autocast24(
    device: str,
    x: Tensor,
    weight: Tensor,
    meta: Tensor,
    bias: Tensor | None,
    compressed: Tensor | None = None,
) -> Tensor:
    values = _cast(weight, device)
    if values is not weight:
        compressed = None  # which holds the weight in the dtype that it had
    with torch.autocast(device, enabled=False):
        return linear24(_cast(x, device), values, meta, _cast(bias, device), compressed)


def _autocast_bitmask(
    device: str, x: Tensor, values: Tensor, bits: Tensor, offsets: Tensor, bias: Tensor | None
) -> Tensor:
    cast = [_cast(tensor, device) for tensor in (x, values, bias)]
    with torch.autocast(device, enabled=False):
        return linear_bitmask(cast[0], cast[1], bits, offsets, cast[2])


linear24.register_autograd(_backward24, setup_context=_save24)
linear_bitmask.register_autograd(_backward_bitmask, setup_context=_save_bitmask)

# `torch.library.register_autocast` casts to a dtype that is chosen here, not by the user.
_LIBRARY = torch.library.Library("mrp_lightning", "IMPL")
for _device in ("cpu", "cuda"):
    _key = f"Autocast{_device.upper()}"
    _LIBRARY.impl("linear24", functools.partial(_autocast24, _device), _key)
    _LIBRARY.impl("linear_bitmask", functools.partial(_autocast_bitmask, _device), _key)
