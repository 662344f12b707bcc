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
    """Base class of stores that bring each block to its device for its `forward`.

    A block moves when its `forward` is called: one whose `forward` is a stub stays where it is.
    """

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        self._moved, self._pinned = set(blocks), set[nn.Module]()

    @abstractmethod
    def bring(self, block: nn.Module) -> None:
        """Move the weights of a block to the device on which it runs."""

    @abstractmethod
    def take_away(self, block: nn.Module) -> None:
        """Move the weights of a block back to their storage, or drop them."""

    @contextmanager
    def pinned(self, block: nn.Module) -> Iterator[None]:
        """Keep a block on its device in a context; modules that are no blocks stay as they are."""
        # Only the outermost context moves the block: an inner one would take it away at its end.
        if block in self._pinned or block not in self._moved:
            yield
            return
        # `bring` is inside the `try`: a block that was brought in part is taken away, too.
        self._pinned.add(block)
        try:
            self.bring(block)
            yield
        finally:
            self._pinned.discard(block)
            self.take_away(block)

    def brought(self, block: nn.Module) -> Callable[..., Any]:
        """Wrap the `forward` of a block, so that the block is pinned while it runs."""
        forward = block.forward

        @functools.wraps(forward)  # for the signature, which transformers inspects
        def bring_and_run(*args: Any, **kwargs: Any) -> Any:
            with self.pinned(block):
                return forward(*args, **kwargs)

        return bring_and_run


def applied_in_place(block: nn.Module, stays: Callable[[Tensor], bool]) -> Callable[..., nn.Module]:
    """Return an `APPLY` method for a block that stays where it is when its model moves.

    Tensors for which `stays` is true change only their dtype.
    """
    apply = getattr(block, APPLY)

    def apply_in_place(fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        def convert(tensor: Tensor) -> Tensor:
            if not stays(tensor):
                return fn(tensor)
            # The function moves and casts in one call. An empty tensor shows its dtype at no cost,
            # and the tensor that stays takes the dtype alone.
            return tensor.to(fn(torch.empty(0, dtype=tensor.dtype)).dtype)

        return apply(convert, recurse)

    return apply_in_place
