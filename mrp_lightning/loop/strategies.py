"""Under which of Lightning's strategies the walk can run, and with which processes."""

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

from mrp_lightning.errors import StrategyError
from mrp_lightning.processes import Processes

_SHARDING = ("FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy")


def require_whole_models(trainer: Trainer, caller: str) -> None:
    """Refuse strategies under which not every process keeps a whole model.

    Args:
        trainer: The trainer, whose strategy is asked.
        caller: The name of what needs the models, for the message.

    Raises:
        StrategyError: The strategy, which is named, shards the model, runs in workers that are
            spawned or forked, or is not known.
    """
    strategy: Any = trainer.strategy
    if isinstance(strategy.launcher, _MultiProcessingLauncher):
        problem = "runs in workers that are spawned or forked, whose pruned weights would be lost"
    elif _shards(strategy):
        problem = "shards the model"
    elif isinstance(strategy, DDPStrategy | SingleDeviceStrategy):
        return
    else:
        problem = "is none that it knows"
    raise StrategyError(
        f"{caller} needs the whole model in each process. Strategy {_name_of(trainer)!r} "
        f"{problem}. Use strategy='ddp', in which several processes share the work, or "
        "Trainer(devices=1, strategy='auto'); for a model larger than the device, `offload: true`."
    )


def processes_of(trainer: Trainer) -> Processes:
    """The processes of a trainer that has set up its strategy."""
    device = trainer.strategy.root_device
    return Processes(trainer.global_rank, trainer.world_size, device)


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
    return any(kind.__name__ in _SHARDING for kind in type(strategy).__mro__)
