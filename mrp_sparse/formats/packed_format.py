"""A packed format: names for the files, and functions that turn a weight into it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NOTE = "install mrp-sparse and import mrp_sparse to load this model"
"""Name of an empty tensor in packed checkpoints.

Without the plug-in, `from_pretrained` lists it among the tensors that it did not expect.
"""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class PackedFormat:
    """A stored form of a weight with zeros: the non-zero values, their columns, and more.

    Attributes:
        option: Name for `--format`.
        name: End of the names of exported directories, and of the `quant_method`.
        version: Version of the format that is written and read.
        companions: Names of a layer's tensors next to the values, which are called `weight`. The
            first holds the columns of the values.
        pack: `pack(weight)` returns the values and companions of a weight (rows, columns).
        unpack: `unpack(*tensors, columns)` returns the weight bit by bit, but −0.0 as +0.0.
        empty: `empty(shape, count, dtype)` returns uninitialised tensors of a weight of a shape.
        damage: `damage(*tensors, columns)` returns the reason why these tensors cannot be the
            result of packing one weight, or `None`.
        why_not: `why_not(shape)` returns the reason why no weight of a shape has this form, or
            `None`.
        operator: Name of the operator in `torch.ops.mrp_lightning` that multiplies with a weight.
        row_offsets: `row_offsets(columns of the values)` returns the first index of each row in the
            values, int64 (rows,); `None` if the shape of a weight determines them.
        activations: The dtypes to which a directory may ask for activations to be rounded.
    """

    option: str
    name: str
    version: int
    companions: tuple[str, ...]
    pack: Callable[[Tensor], tuple[Tensor, ...]]
    unpack: Callable[..., Tensor]
    empty: Callable[[tuple[int, int], int, torch.dtype], tuple[Tensor, ...]]
    damage: Callable[..., str | None]
    why_not: Callable[[tuple[int, ...]], str | None]
    operator: str
    row_offsets: Callable[[Tensor], Tensor] | None = None
    activations: tuple[str, ...] = ()

    def multiply(
        self,
        x: Tensor,
        tensors: Sequence[Tensor],
        bias: Tensor | None,
        *options: Any,
        offsets: Tensor | None = None,
    ) -> Tensor:
        """Return x Wᵀ + bias (..., rows) for x (..., columns) by the operator of this format.

        Args:
            x: The input, in the dtype of the weight.
            tensors: The values and companions of W.
            bias: Added to each output, (rows,).
            *options: The arguments of the operator after the bias.
            offsets: The `row_offsets` of W, where the format has these; `None` computes them.
        """
        if self.row_offsets is not None:
            tensors = *tensors, self.row_offsets(tensors[1]) if offsets is None else offsets
        operator = getattr(torch.ops.mrp_lightning, self.operator)
        product: Tensor = operator(x, *tensors, bias, *options)
        return product

    @property
    def quant_method(self) -> str:
        """Name in `quantization_config`."""
        return f"mrp_{self.name}"

    @property
    def counted(self) -> bool:
        """Whether the shape of a layer does not determine the number of elements of `weight`."""
        return self.row_offsets is not None

    def num_bytes(self, shape: tuple[int, int], dtype: torch.dtype, count: int) -> int:
        """Return the bytes of all tensors of a weight of a shape."""
        with torch.device("meta"):
            return sum(tensor.nbytes for tensor in self.empty(shape, count, dtype))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of a layer's tensors, in the order of the format."""
        return ("weight", *self.companions)

    @property
    def places(self) -> str:
        """Name of the tensor that holds the columns of the values."""
        return self.companions[0]

    def companion_names(self, weight: str) -> list[str]:
        """Return the names of the `companions` in a checkpoint, given that of the values."""
        return [weight + name.removeprefix("weight") for name in self.companions]


def why_no_matrix(shape: tuple[int, ...]) -> str | None:
    """Return the reason why a weight of this shape has no packed form, or `None`."""
    if len(shape) != 2:
        return f"its weight has {len(shape)} dimensions; the format packs matrices"
    return None


def as_integers(tensor: Tensor) -> Tensor:
    """Return the same bits as integers of the same size, as a view of the tensor if contiguous."""
    return tensor.contiguous().view(_INTEGERS[tensor.element_size()])


def different_bits(first: Tensor, second: Tensor) -> int:
    """Return how many values of `second` differ in a bit: all if its shape or dtype differs."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return second.numel()
    # As numbers, NaN would differ from itself and −0.0 would equal +0.0.
    return int((as_integers(first) != as_integers(second)).sum())
