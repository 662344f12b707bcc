"""Keeping blocks on the CPU, and on the accelerator only while they run."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from mrp_lightning.calibration.forwards import replaced
from mrp_lightning.models.moved_blocks import MovedBlocks, applied_in_place
from mrp_lightning.upstream.torch_names import APPLY

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
    apply = getattr(model, APPLY)

    def apply_but_stay(fn: Any, recurse: bool = True) -> nn.Module:
        with ExitStack() as stack:
            for block in blocks():
                in_place = applied_in_place(block, stays=lambda _: True)
                stack.enter_context(replaced(block, APPLY, in_place))
            return apply(fn, recurse)

    with replaced(model, APPLY, apply_but_stay):
        yield


class Offload(MovedBlocks):
    """Brings blocks from the CPU to the device for as long as they run.

    Args:
        blocks: The blocks that stay on the CPU.
        device: The device on which they run.
    """

    def __init__(self, blocks: Sequence[nn.Module], device: torch.device) -> None:
        super().__init__(blocks)
        self.blocks, self.device = list(blocks), device

    def bring(self, block: nn.Module) -> None:
        """Move a block to the device."""
        block.to(self.device)

    def take_away(self, block: nn.Module) -> None:
        """Move a block to the CPU."""
        block.to(CPU)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Move every block for its own forward only."""
        with ExitStack() as stack:
            for block in self.blocks:
                block.to(CPU)
                stack.callback(block.to, CPU)
                stack.enter_context(replaced(block, "forward", self.brought(block)))
            yield
