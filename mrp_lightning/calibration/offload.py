"""Offload blocks to the CPU, and explain when memory is not enough."""

import functools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from mrp_lightning.calibration.walks import replaced
from mrp_lightning.devices import is_out_of_memory
from mrp_lightning.errors import OutOfMemoryError, first_line
from mrp_lightning.models.moved_blocks import MovedBlocks, applied_in_place
from mrp_lightning.upstream.torch_names import APPLY

log = logging.getLogger(__name__)


@contextmanager
def explained_out_of_memory(device: torch.device, *, offload: bool) -> Iterator[None]:
    """Replace out-of-memory errors of torch and Python by an `OutOfMemoryError` with the next step.

    The device is the one of the pruning; with `offload`, blocks stay on the CPU already.
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


CPU = torch.device("cpu")

Pinned = Callable[[nn.Module], AbstractContextManager[None]]
"""Called with a block: a context in which the block stays on its device."""


@contextmanager
def held_on_cpu(model: nn.Module, blocks: Callable[[], Sequence[nn.Module]]) -> Iterator[None]:
    """Let `to(device)` of a model move all but its blocks, and `to(dtype)` change all.

    `blocks` returns the blocks when the model is moved: they may be created as late as that.
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
    """Brings blocks from the CPU to the device while they run.

    A forward changes no parameter, so afterwards the CPU tensors are put back without a copy. A
    pinned block may be changed, and is copied back. For CUDA devices the CPU tensors are
    page-locked if memory allows it, which doubles the speed of copies.
    """

    def __init__(self, blocks: Sequence[nn.Module], device: torch.device) -> None:
        super().__init__(blocks)
        self.blocks, self.device = list(blocks), device
        self._locks_pages = device.type == "cuda" and 2 * self.num_bytes <= _free_memory() // 2

    @property
    def num_bytes(self) -> int:
        """The bytes of the parameters of all blocks."""
        return sum(p.nbytes for block in self.blocks for p in block.parameters())

    def bring(self, block: nn.Module) -> None:
        """Move a block to the device."""
        block.to(self.device, non_blocking=True)

    def take_away(self, block: nn.Module) -> None:
        """Move a block to the CPU."""
        block.to(CPU)
        self._lock_pages(block)

    def brought(self, block: nn.Module) -> Callable[..., Any]:
        """Wrap the `forward` of a block, so that the block is on the device while it runs."""
        forward = block.forward

        @functools.wraps(forward)  # for the signature, which transformers inspects
        def bring_and_run(*args: Any, **kwargs: Any) -> Any:
            if block in self._pinned:
                return forward(*args, **kwargs)
            stored = [
                (module, name, parameter, parameter.data)
                for module in block.modules()
                for name, parameter in module.named_parameters(
                    recurse=False, remove_duplicate=False
                )
            ]
            try:
                self.bring(block)
                return forward(*args, **kwargs)
            finally:
                # `to` either changes a parameter's data or replaces the parameter: restore both.
                for module, name, parameter, data in stored:
                    parameter.data = data
                    setattr(module, name, parameter)
                block.to(CPU)  # its buffers

        return bring_and_run

    @contextmanager
    def active(self) -> Iterator[None]:
        """Move all blocks to the CPU, and, in this context, to the device for their own forward."""
        with ExitStack() as stack:
            for block in self.blocks:
                block.to(CPU)
                self._lock_pages(block)
                stack.callback(block.to, CPU)
                stack.enter_context(replaced(block, "forward", self.brought(block)))
            yield

    @contextmanager
    def resident(self) -> Iterator[bool]:
        """Keep all blocks on a CUDA device if half its free memory suffices; yield whether so."""
        is_cuda = self.device.type == "cuda"
        room = torch.cuda.mem_get_info(self.device)[0] // 2 if is_cuda else 0
        with ExitStack() as stack:
            if fits := self.num_bytes <= room:
                for block in self.blocks:
                    stack.enter_context(self.pinned(block))
            yield fits

    def _lock_pages(self, block: nn.Module) -> None:
        if not self._locks_pages:
            return
        try:
            for parameter in block.parameters():
                parameter.data = parameter.data.pin_memory()
        except RuntimeError as error:  # the system limits the memory that a process may lock
            self._locks_pages = False
            log.debug("Blocks stay in pageable memory: %s", first_line(error))


def _free_memory() -> int:
    """Return this machine's free memory in bytes; 0 if it reports none."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 0
