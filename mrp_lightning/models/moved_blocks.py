"""Blocks that are on their device only while they run: brought from CPU memory, or from files."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mrp_lightning.upstream.torch_names import APPLY


class MovedBlocks(ABC):
    """Base of classes that bring each block for its own `forward`, or for as long as it is pinned.

    A block moves with its `forward`: one that is replaced by a stub stays where it is.

    Args:
        blocks: The blocks. If there are none, nothing is ever moved.
    """

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        self._moved, self._pinned = set(blocks), set[nn.Module]()

    @abstractmethod
    def bring(self, block: nn.Module) -> None:
        """Give a block its weights, on the device on which it runs."""

    @abstractmethod
    def take_away(self, block: nn.Module) -> None:
        """Return the weights of a block to their storage."""

    @contextmanager
    def pinned(self, block: nn.Module) -> Iterator[None]:
        """Keep a block where it runs over many forwards; other modules are left alone."""
        if block in self._pinned or block not in self._moved:
            yield
            return
        self._pinned.add(block)
        try:
            self.bring(block)
            yield
        finally:
            self._pinned.discard(block)
            self.take_away(block)

    def brought(self, block: nn.Module) -> Callable[..., Any]:
        """Return the `forward` of a block, with the block pinned meanwhile."""
        forward = block.forward

        @functools.wraps(forward)  # so that the signature is that of the model
        def bring_and_run(*args: Any, **kwargs: Any) -> Any:
            with self.pinned(block):
                return forward(*args, **kwargs)

        return bring_and_run


def applied_in_place(block: nn.Module, stays: Callable[[Tensor], bool]) -> Callable[..., nn.Module]:
    """Return an `APPLY` for a block that stays where it is when its model moves.

    Tensors for which `stays` is true change their dtype alone.
    """
    apply = getattr(block, APPLY)

    def apply_in_place(fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        def convert(tensor: Tensor) -> Tensor:
            if not stays(tensor):
                return fn(tensor)
            return tensor.to(fn(torch.empty(0, dtype=tensor.dtype)).dtype)

        return apply(convert, recurse)

    return apply_in_place
