"""Keeping the blocks of a LightningModule in CPU memory while Lightning makes and moves it."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from lightning.pytorch import LightningModule
from torch import nn

from mrp_lightning.calibration.forwards import replaced
from mrp_lightning.calibration.offload import CPU, held_on_cpu


@contextmanager
def blocks_on_cpu(
    module: LightningModule, blocks: Callable[[], Sequence[nn.Module]]
) -> Iterator[None]:
    """Let what `configure_model` makes be made on the CPU, and the blocks stay there.

    Lightning calls `configure_model` with the accelerator as the default device, and moves the
    whole module to it before the first hook of a callback that could stop it.

    Args:
        module: The LightningModule, before it is set up.
        blocks: Finds its blocks, once they are made.
    """
    original = module.configure_model

    @functools.wraps(original)  # Lightning looks whether it is overridden
    def configure_model() -> None:
        with CPU:
            original()

    with replaced(module, "configure_model", configure_model), held_on_cpu(module, blocks):
        yield
