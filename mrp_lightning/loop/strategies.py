"""Refusing those of Lightning's strategies under which the walk cannot run."""

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

from mrp_lightning.errors import StrategyError


def require_one_process(trainer: Trainer, caller: str) -> None:
    """Refuse strategies that shard the model, or that run in other processes.

    Args:
        trainer: The trainer, whose strategy is asked.
        caller: The name of what runs in one process, for the message.

    Raises:
        StrategyError: The strategy, which is named, needs more than one process or shards.
    """
    strategy: Any = trainer.strategy
    if trainer.world_size > 1:
        problem = f"{trainer.world_size} processes"
    elif isinstance(strategy.launcher, _MultiProcessingLauncher):
        problem = "workers that are spawned or forked, whose pruned weights would be lost"
    elif not isinstance(strategy, SingleDeviceStrategy) and _shards(strategy):
        problem = "a model that is sharded"
    else:
        return
    raise StrategyError(
        f"{caller} runs in one process, on one device. Got strategy {_name_of(trainer)!r} "
        f"with {problem}. Use "
        "Trainer(devices=1, strategy='auto'); for a model larger than the device, `offload: true`."
    )


def require_whole_parameters(trainer: Trainer, caller: str) -> None:
    """Refuse strategies under which a process holds parts of the weights only.

    Raises:
        StrategyError: It names the strategy.
    """
    if _shards(trainer.strategy):
        raise StrategyError(
            f"{caller} needs whole weights in each process. Got strategy "
            f"{_name_of(trainer)!r}, which shards them. Use a single device or `strategy='ddp'`."
        )


def _name_of(trainer: Trainer) -> str:
    """As the user gave it."""
    flag = trainer._accelerator_connector._strategy_flag
    return flag if isinstance(flag, str) else type(trainer.strategy).__name__


def _shards(strategy: Any) -> bool:
    return any(
        kind.__name__ in ("FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy")
        for kind in type(strategy).__mro__
    )
