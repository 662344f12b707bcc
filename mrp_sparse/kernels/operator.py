"""The operators `linear24`, `linear_bitmask`, `linear_bitmask4` and `linear8` of `mrp_lightning`.

They are opaque to `torch.compile` and `torch.export`: the kernel is chosen inside the operator,
where the number of tokens is known, so that a new number needs no recompilation and every CUDA
graph captures its own choice. On CUDA devices, `dispatch` implements the first. The functions in
this module are the default: they unpack the weight and multiply densely. On a CPU, the compiled
kernels replace them once they are loaded.

Under autocast all floating operands are cast, as those of `F.linear` are.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef
from torch.nn import functional as F

from mrp_sparse import upstream
from mrp_sparse.formats import bitmask, bitmask4, eight_bit
from mrp_sparse.formats.bitmask import BITMASK
from mrp_sparse.formats.bitmask4 import BITMASK4, num_groups
from mrp_sparse.formats.sparse24 import SPARSE24, spread
from mrp_sparse.kernels import library

MAX_ERROR_RATIO = 1.5
"""The largest allowed error of a kernel, relative to that of the dense product in its dtype."""

# `torch.library.register_autocast` casts to a dtype that is chosen here, not by the user.
_LIBRARY = torch.library.Library("mrp_lightning", "IMPL")


def _operator(
    unpack: Callable[..., Tensor],
    fits: Callable[..., Sequence[Any]],
    *,
    stored: Sequence[str],
    floating: Sequence[str],
    layout: str | None = None,
) -> Callable[[Callable[..., Tensor]], CustomOpDef]:
    """Make an operator of a function, with its derivatives and its behaviour under autocast.

    The function computes y = x Wᵀ + bias; its first argument is `x`.

    Args:
        unpack: Returns W; called with the `stored` tensors and its number of columns.
        fits: Returns conditions on sizes; called with the number of columns of x and the `stored`
            tensors. Sizes may be symbols.
        stored: The arguments that W is computed from; the second has a row for each of W.
        floating: The arguments that autocast casts.
        layout: An argument that holds W in another layout. It is dropped where W is cast.
    """

    def decorate(function: Callable[..., Tensor]) -> CustomOpDef:
        names = [*inspect.signature(function).parameters]
        packed, bias = [names.index(name) for name in stored], names.index("bias")
        operator = torch.library.custom_op(
            f"mrp_lightning::{function.__name__}", function, mutates_args=()
        )

        def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
            del output
            ctx.columns, ctx.num_inputs = inputs[0].shape[-1], len(inputs)
            ctx.save_for_backward(*(inputs[i] for i in packed))

        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            # A gradient of `None` would freeze a weight that the user believes to be trained.
            if any(ctx.needs_input_grad[i] for i in packed):
                raise NotImplementedError(
                    "A packed weight cannot be trained: call `model.dequantize()` first, or freeze "
                    "it with `weight.requires_grad_(False)`."
                )
            # From y = x Wᵀ + b: ∂L/∂x = ∂L/∂y · W, and ∂L/∂b is the sum of ∂L/∂y over all tokens.
            grads: list[Tensor | None] = [None] * ctx.num_inputs
            if ctx.needs_input_grad[0]:
                grads[0] = grad @ unpack(*ctx.saved_tensors, ctx.columns)
            if ctx.needs_input_grad[bias]:
                grads[bias] = grad.sum_to_size(grad.shape[-1:])
            return tuple(grads)

        def autocast(device: str, *operands: Any) -> Any:
            given = dict(zip(names, operands, strict=False))  # without those left at their defaults
            cast = given | {name: _cast(given[name], device) for name in floating}
            if layout in cast and any(cast[name] is not given[name] for name in stored):
                cast[layout] = None
            # Under autocast the call would come back to this function, without end.
            with torch.autocast(device, enabled=False):
                return operator(*cast.values())

        def fake(x: Tensor, *operands: Any) -> Tensor:
            tensors = [operands[i - 1] for i in packed]
            for condition in fits(x.shape[-1], *tensors):
                _check_columns(condition)
            return x.new_empty(*x.shape[:-1], tensors[1].shape[0])

        operator.register_fake(fake)
        operator.register_autograd(backward, setup_context=save)
        for device in ("cpu", "cuda"):
            kernel = functools.partial(autocast, device)
            _LIBRARY.impl(function.__name__, kernel, f"Autocast{device.upper()}")
        return operator

    return decorate


def _cast(tensor: Tensor | None, device: str) -> Tensor | None:
    # Autocast leaves float64 as it is, in `F.linear` too.
    if tensor is None or tensor.device.type != device or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))


def check_bitmask(x: Tensor, bits: Tensor) -> None:
    """Raise a RuntimeError if x has more or fewer columns than the bits, counted in bytes."""
    _check_columns(bitmask.bytes_of(x.shape[-1]) == bits.shape[1])


def _check_columns(fit: Any) -> None:
    upstream.check(fit, "x must have the weight's columns")


@_operator(
    SPARSE24.unpack,
    lambda columns, weight, _: [columns == 2 * weight.shape[1]],
    stored=("weight", "meta"),
    floating=("x", "weight", "bias"),
    layout="compressed",
)
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
    # Once loaded, the library's kernel for the CPU comes before this one: the call by name reaches
    # it, and later products do not come here.
    if x.device.type == "cpu" and library.load():
        return torch.ops.mrp_lightning.linear24(x, weight, meta, bias, compressed)
    return F.linear(x, spread(weight, meta), bias)


@_operator(
    BITMASK.unpack,
    lambda columns, _, bits: [bitmask.bytes_of(columns) == bits.shape[1]],
    stored=("values", "bits"),
    floating=("x", "values", "bias"),
)
def linear_bitmask(
    x: Tensor, values: Tensor, bits: Tensor, offsets: Tensor, bias: Tensor | None
) -> Tensor:
    """Compute x Wᵀ + bias with W = unpack(values, bits, columns).

    Args:
        x: Input (..., columns), in the dtype of `values`. On a CPU, bits that are set beyond these
            columns raise, and a wrong number of columns is only detected by the number of bytes.
        values: Kept values, row after row in the order of their columns.
        bits: The positions of the kept values, uint8 (rows, ceil(columns / 8)), lowest bit first.
        offsets: The index of each row's first value, int64 (rows,); the end of the last row may
            follow.
        bias: Added to each output, (rows,).

    Returns:
        The product (..., rows), contiguous.
    """
    if x.device.type == "cpu" and library.load():
        return torch.ops.mrp_lightning.linear_bitmask(x, values, bits, offsets, bias)
    check_bitmask(x, bits)
    # Reading the bits would synchronise other devices, which a CUDA graph forbids.
    if x.device.type == "cpu" and (damage := bitmask.damage(values, bits, x.shape[-1])):
        raise RuntimeError(f"The packed weight does not fit the input's columns: {damage}.")
    return F.linear(x, bitmask.unpack(values, bits, x.shape[-1]), bias)


@_operator(
    BITMASK4.unpack,
    lambda columns, _, bits, scales: [
        bitmask.bytes_of(columns) == bits.shape[1],
        num_groups(columns) == scales.shape[1],
    ],
    stored=("nibbles", "bits", "scales"),
    floating=("x", "scales", "bias"),
)
def linear_bitmask4(
    x: Tensor,
    nibbles: Tensor,
    bits: Tensor,
    scales: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    eight_bits: bool = False,
) -> Tensor:
    """Compute x Wᵀ + bias with W = unpack(nibbles, bits, scales, columns).

    Args:
        x: Input (..., columns), in the dtype of `scales`. On a CPU, bits that are set beyond these
            columns raise, and a wrong number of columns is only detected by the number of bytes.
        nibbles: Codes of the kept values, uint8, two in a byte, group after group.
        bits: The positions of the kept values, uint8 (rows, ceil(columns / 8)), lowest bit first.
        scales: Scales (rows, ceil(columns / 64)).
        offsets: The index of each row's first byte of codes, int64 (rows,).
        bias: Added to each output, (rows,).
        eight_bits: Whether x is rounded to 8 bits before; see `bitmask4.multiply_rounded`. Sums are
            then float32 for any dtype.

    Returns:
        The product (..., rows), contiguous.
    """
    if x.device.type == "cpu" and library.load():
        operator = torch.ops.mrp_lightning.linear_bitmask4
        return operator(x, nibbles, bits, scales, offsets, bias, eight_bits)
    check_bitmask(x, bits)
    if x.device.type == "cpu" and (damage := bitmask4.damage(nibbles, bits, scales, x.shape[-1])):
        raise RuntimeError(f"The packed weight does not fit the input's columns: {damage}.")
    if eight_bits:
        y = bitmask4.multiply_rounded(x.reshape(-1, x.shape[-1]), nibbles, bits, scales)
        return (y if bias is None else y + bias).to(x.dtype).view(*x.shape[:-1], len(bits))
    return F.linear(x, bitmask4.unpack(nibbles, bits, scales, x.shape[-1]), bias)


@_operator(
    lambda numbers, scales, _: eight_bit.unpack(numbers, scales),
    lambda columns, numbers, _: [columns == numbers.shape[1]],
    stored=("numbers", "scales"),
    floating=("x", "scales", "bias"),
)
def linear8(x: Tensor, numbers: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x Wᵀ + bias with W = unpack(numbers, scales).

    Args:
        x: Input (..., columns), in the dtype of `scales`.
        numbers: From −127 to 127, int8 (rows, columns).
        scales: A scale for each row, (rows,).
        bias: Added to each output, (rows,).

    Returns:
        The product (..., rows), contiguous.
    """
    if x.device.type == "cpu" and library.load():
        return torch.ops.mrp_lightning.linear8(x, numbers, scales, bias)
    return F.linear(x, eight_bit.unpack(numbers, scales), bias)
