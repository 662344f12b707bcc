"""Memory: blocks on the accelerator only while they run, what was in use, and what to lower."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from mrp_lightning.calibration.walks import replaced
from mrp_lightning.environment import is_out_of_memory
from mrp_lightning.errors import OutOfMemoryError, first_line
from mrp_lightning.models.moved_blocks import MovedBlocks, applied_in_place
from mrp_lightning.upstream.torch_names import APPLY


def peak_rss() -> int | None:
    """The most memory, in bytes, that this process has held so far; `None` on Windows."""
    if sys.platform == "win32":
        return None
    import resource

    unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@contextmanager
def explained_out_of_memory(device: torch.device, *, offload: bool) -> Iterator[None]:
    """Say of an error inside that is one of memory what to lower, in an `OutOfMemoryError`.

    `offload` says whether blocks and activations stay on the CPU already.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, OutOfMemoryError) or not is_out_of_memory(error):
            raise
        lower = "Lower `batch_size` or `sequence_length` (those of your own dataloader)"
        if device.type == "cpu":
            step = (
                f"{lower}, calibrate on fewer samples, or load the model with `dtype: bfloat16` or "
                "`streaming: true`."
            )
        elif offload:
            step = f"{lower}; `offload` is on already."
        else:
            step = (
                "Set `offload: true` of the pruning callback, which keeps all blocks but one and "
                f"the activations in CPU memory. {lower}, if that is not enough."
            )
        raise OutOfMemoryError(
            f"Not enough memory to prune on {device}. {step} ({first_line(error)})"
        ) from error


def peak_memory(device: torch.device) -> int | None:
    """The most bytes in use so far: those of torch on a GPU, else those of the process in memory.

    On a GPU it is since torch's count was last reset, which pruning a layer does.
    """
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_rss()


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
