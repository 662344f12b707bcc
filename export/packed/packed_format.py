"""A packed format: names for the files, and functions that turn a weight into it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class PackedFormat:
    """A form of weights with zeros, in two tensors: the kept values, and where they were.

    Attributes:
        option: Its name for `--format`.
        suffix: The end of the name of a directory in this format.
        quant_method: Its name in `quantization_config`.
        version: The version of it that is written and read.
        places: Name of the second tensor of a layer; the first is called `weight`.
        counted: Whether a layer must be told how many values are kept, as its shape does not say.
        pack: Gives both tensors of a weight (rows, columns).
        unpack: `unpack(values, places, columns)` gives the weight again, bit by bit.
        damage: `damage(values, places, columns)` says why these were never packed, or `None`.
        why_not: The reason why no weight of a shape has this form, or `None`.
        num_bytes: `num_bytes(shape, dtype, kept)` gives the size, in bytes, of both tensors of a
            weight of which so many are not zero.
    """

    option: str
    suffix: str
    quant_method: str
    version: int
    places: str
    counted: bool
    pack: Callable[[Tensor], tuple[Tensor, Tensor]]
    unpack: Callable[[Tensor, Tensor, int], Tensor]
    damage: Callable[[Tensor, Tensor, int], str | None]
    why_not: Callable[[tuple[int, ...]], str | None]
    num_bytes: Callable[[tuple[int, int], torch.dtype, int], int]

    def places_beside(self, weight: str) -> str:
        """The name in the files of the second tensor, by that of the first."""
        return weight + self.places.removeprefix("weight")


def why_no_matrix(shape: tuple[int, ...]) -> str | None:
    """The reason why a weight of this shape has no packed form at all, or `None`."""
    if len(shape) != 2:
        return f"its weight has {len(shape)} dimensions; the format packs matrices"
    return None


def as_integers(tensor: Tensor) -> Tensor:
    """The same bits as integers of the same size; a view where the tensor is contiguous."""
    return tensor.contiguous().view(_INTEGERS[tensor.element_size()])


def different_bits(first: Tensor, second: Tensor) -> int:
    """Number of values that differ in a bit; all of them where shapes or dtypes differ."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return second.numel()
    return int((as_integers(first) != as_integers(second)).sum())
