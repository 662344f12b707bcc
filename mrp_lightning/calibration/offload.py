"""Keeping blocks on the CPU, and on the accelerator only while they run."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mrp_lightning.calibration.forwards import replaced

CPU = torch.device("cpu")

Pinned = Callable[[nn.Module], AbstractContextManager[None]]
"""Keeps a block where it runs, over many forwards."""


@contextmanager
def held_on_cpu(model: nn.Module, blocks: Callable[[], Sequence[nn.Module]]) -> Iterator[None]:
    """Let `to(device)` of the model leave its blocks where they are; a change of dtype works.

    Args:
        model: The module that is moved as a whole.
        blocks: Finds the blocks. It is called when the model is moved, since they may not have
            been made before.
    """
    apply = model._apply

    def apply_but_stay(fn: Any, recurse: bool = True) -> nn.Module:
        with ExitStack() as stack:
            for block in blocks():
                stack.enter_context(replaced(block, "_apply", _staying(block._apply)))
            return apply(fn, recurse)

    with replaced(model, "_apply", apply_but_stay):
        yield


def _staying(apply: Any) -> Any:
    def stay(fn: Any, recurse: bool = True) -> nn.Module:
        return apply(lambda tensor: _at(fn(tensor), tensor.device), recurse)

    return stay


def _at(moved: Any, device: torch.device) -> Any:
    return moved.to(device) if isinstance(moved, Tensor) else moved


class Offload:
    """Brings blocks to the device for as long as they run.

    A block moves with its own `forward`: one that is replaced by a stub stays where it is.

    Args:
        blocks: The blocks that stay on the CPU. If there are none, nothing is ever moved.
        device: The device on which they run.
    """

    def __init__(self, blocks: Sequence[nn.Module], device: torch.device) -> None:
        self.blocks, self.device = list(blocks), device
        self._pinned: set[nn.Module] = set()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Move every block for its own forward only."""
        with ExitStack() as stack:
            for block in self.blocks:
                block.to(CPU)
                stack.callback(block.to, CPU)
                stack.enter_context(replaced(block, "forward", self._brought(block)))
            yield

    @contextmanager
    def pinned(self, block: nn.Module) -> Iterator[None]:
        """Keep one block on the device over many forwards."""
        if block not in self.blocks:
            yield
            return
        self._pinned.add(block)
        try:
            block.to(self.device)
            yield
        finally:
            self._pinned.discard(block)
            block.to(CPU)

    def _brought(self, block: nn.Module) -> Callable[..., Any]:
        forward = block.forward

        @functools.wraps(forward)  # whoever asks for the signature gets that of the model
        def bring_and_run(*args: Any, **kwargs: Any) -> Any:
            if block in self._pinned:
                return forward(*args, **kwargs)
            try:
                block.to(self.device)
                return forward(*args, **kwargs)
            finally:
                block.to(CPU)

        return bring_and_run
