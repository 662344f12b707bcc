"""What pruning changes in a module while Lightning's predict loop runs it."""

import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from lightning.pytorch import LightningModule

from mrp_lightning.loop.capture import Step, StepCapture, eager
from mrp_lightning.loop.contents import check_batch
from mrp_lightning.loop.distributed import one_voice
from mrp_lightning.loop.placement import blocks_on_cpu
from mrp_lightning.loop.signals import interruptible, unclaimed_signals
from mrp_lightning.processes import Processes
from mrp_lightning.targets.blocks import find_blocks
from mrp_lightning.targets.plan import Plan


class Session:
    """One `predict` that will prune, from its `setup` until the batches are there.

    It changes the module for that time, and `close` takes all changes back.

    Attributes:
        signals: The signals that the program leaves to us; Lightning takes SIGTERM later.
    """

    plan: Plan
    steps: Sequence[Step] = ()

    def __init__(self) -> None:
        self._changes = ExitStack()
        self.signals = unclaimed_signals()

    def close(self) -> None:
        """Give the module back as it was."""
        self._changes.close()

    def hold(self, pl_module: LightningModule, patterns: Sequence[str]) -> None:
        """Keep the blocks on the CPU when Lightning makes and moves the module."""

        def blocks() -> list[torch.nn.Module]:
            return [block.module for block in find_blocks(pl_module, patterns)]

        self._changes.enter_context(blocks_on_cpu(pl_module, blocks))

    def capture(self, pl_module: LightningModule, plan: Plan) -> None:
        """Store the batches of the loop in place of running the model on them."""
        self._changes.close()
        stop_at = [block.module for block in plan.blocks] or [x.module for x in plan.outside]
        capture = StepCapture(pl_module, stop_at, lambda batch: check_batch(pl_module, batch))
        self._changes.callback(capture.remove)
        self._changes.enter_context(interruptible(self.signals))
        self.plan, self.steps = plan, capture.steps


@contextmanager
def outside_the_loop(signals: Sequence[signal.Signals], processes: Processes) -> Iterator[None]:
    """Do in a callback what is no part of Lightning's loop, which may be in inference mode.

    Args:
        signals: Those that end it at once.
        processes: The processes that do it; the first one speaks for all.
    """
    with (
        interruptible(signals, at_once=True),
        torch.inference_mode(False),
        torch.no_grad(),
        eager(),
        one_voice(processes),
    ):
        yield
