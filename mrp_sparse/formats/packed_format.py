"""A packed format: names for the files, and functions that turn a weight into it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class PackedFormat:
    """A form of weights with zeros, in some tensors: the kept values, where they were, and more.

    Attributes:
        option: Its name for `--format`.
        suffix: The end of the name of a directory in this format.
        quant_method: Its name in `quantization_config`.
        version: The version of it that is written and read.
        beside: Names of the tensors of a layer beside the values, which are called `weight`: the
            first says where they were.
        count: The argument by which a layer is told how many elements `weight` has, where its
            shape does not say; else `None`.
        pack: Gives the tensors of a weight (rows, columns).
        unpack: `unpack(*tensors, columns)` gives the weight again, bit by bit.
        damage: `damage(*tensors, columns)` says why these were never packed, or `None`.
        why_not: The reason why no weight of a shape has this form, or `None`.
        num_bytes: `num_bytes(shape, dtype, count)` gives the size, in bytes, of all tensors of a
            weight whose values are so many elements.
    """

    option: str
    suffix: str
    quant_method: str
    version: int
    beside: tuple[str, ...]
    count: str | None
    pack: Callable[[Tensor], tuple[Tensor, ...]]
    unpack: Callable[..., Tensor]
    damage: Callable[..., str | None]
    why_not: Callable[[tuple[int, ...]], str | None]
    num_bytes: Callable[[tuple[int, int], torch.dtype, int], int]

    @property
    def places(self) -> str:
        """Name of the tensor that says where the values were."""
        return self.beside[0]

    def names_beside(self, weight: str) -> list[str]:
        """The names in the files of the tensors beside the values, by that of the values."""
        return [weight + name.removeprefix("weight") for name in self.beside]


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
