"""Giving each window of a text to one of several processes, and to no other."""

from collections.abc import Sized
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from lightning.pytorch.trainer.states import TrainerFn

from mrp_lightning.errors import DataError


def one_share_each(windows: Sized, trainer: Trainer | None) -> Any:
    """A sampler of the windows of this process, `None` where Lightning is to find one.

    Lightning's own sampler for `test` and `validate` repeats windows, so that all processes get as
    many; they would count twice. Only within `fit` must all of them get as many.

    Raises:
        DataError: There are fewer windows than processes.
    """
    if trainer is None or trainer.world_size == 1 or trainer.state.fn == TrainerFn.FITTING:
        return None
    if len(windows) < trainer.world_size:
        raise DataError(
            f"{trainer.world_size} processes need at least as many windows of text; got "
            f"{len(windows)}. Give more text or samples, or use fewer `devices`."
        )
    return UnrepeatedDistributedSampler(
        windows, num_replicas=trainer.world_size, rank=trainer.global_rank, shuffle=False
    )
