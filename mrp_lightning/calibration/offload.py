"""Keeping blocks on the CPU, and on the accelerator only while they run."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

CPU = torch.device("cpu")


def hold_on_cpu(blocks: Sequence[nn.Module]) -> None:
    """Make `to(device)` of the model leave these blocks where they are; a change of dtype works.

    Lightning moves the whole module to the accelerator before the first hook that could stop it.
    """
    for block in blocks:
        block.__dict__["_apply"] = _staying(block._apply)


def release(blocks: Sequence[nn.Module]) -> None:
    """Undo `hold_on_cpu`."""
    for block in blocks:
        block.__dict__.pop("_apply", None)


def _staying(apply: Any) -> Any:
    def stay(fn: Any, recurse: bool = True) -> nn.Module:
        return apply(lambda tensor: _at(fn(tensor), tensor.device), recurse)

    return stay


def _at(moved: Any, device: torch.device) -> Any:
    return moved.to(device) if isinstance(moved, Tensor) else moved


class Offload:
    """Brings blocks to the device for as long as they run.

    Args:
        blocks: The blocks that stay on the CPU. Empty: nothing is ever moved.
        device: Where they run.
    """

    def __init__(self, blocks: Sequence[nn.Module], device: torch.device) -> None:
        self.blocks, self.device = list(blocks), device
        self._pinned: nn.Module | None = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Move every block for its own forward only."""
        handles: list[Any] = []
        try:
            for block in self.blocks:
                block.to(CPU)
                handles.append(block.register_forward_pre_hook(self._bring))
                handles.append(block.register_forward_hook(self._take_back))
            yield
        finally:
            for handle in handles:
                handle.remove()
            for block in self.blocks:
                block.to(CPU)

    @contextmanager
    def pinned(self, block: nn.Module) -> Iterator[None]:
        """Keep one block on the device over many forwards."""
        if block not in self.blocks:
            yield
            return
        self._pinned = block
        try:
            block.to(self.device)
            yield
        finally:
            self._pinned = None
            block.to(CPU)

    def _bring(self, module: nn.Module, *_: Any) -> None:
        if module is not self._pinned:
            module.to(self.device)

    def _take_back(self, module: nn.Module, *_: Any) -> None:
        if module is not self._pinned:
            module.to(CPU)
