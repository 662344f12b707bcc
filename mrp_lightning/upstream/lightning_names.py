"""Private names of Lightning."""

from typing import Any


def in_order(callbacks: list[Any]) -> list[Any]:
    """Return callbacks in the order in which a trainer calls them, or raise as a trainer would.

    Seen in Lightning 2.6, whose trainer does this for the callbacks of its constructor and of a
    model, but has no method to add others. Replacement: such a method, or `predict(callbacks=…)`.
    """
    from lightning.pytorch.trainer.connectors import callback_connector

    ordered = callback_connector._CallbackConnector._reorder_callbacks(callbacks)
    callback_connector._validate_callbacks_list(ordered)
    return ordered


def works_in_children(trainer: Any) -> bool:
    """Return whether a trainer's strategy spawns or forks workers, which have copies of the model.

    Seen in Lightning 2.6, in which only the class of a strategy's launcher shows it. Replacement: a
    property of strategies or launchers.
    """
    from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

    return isinstance(trainer.strategy.launcher, _MultiProcessingLauncher)


def spawns_workers(trainer: Any) -> bool:
    """Return whether a trainer's strategy starts new interpreters, to which it pickles itself.

    Seen in Lightning 2.6, whose launchers in interactive sessions fork. Replacement: as of
    `works_in_children`.
    """
    return works_in_children(trainer) and not trainer.strategy.launcher.is_interactive_compatible


def strategy_as_given(trainer: Any) -> Any:
    """Return the `strategy` argument of a trainer, a string or an object.

    Seen in Lightning 2.6. Messages name the strategy as the user did. Replacement: a property of
    trainers.
    """
    return trainer._accelerator_connector._strategy_flag


def predict_data(trainer: Any) -> Any:
    """Return the datamodule or the dataloaders of the present `predict`.

    Seen in Lightning 2.6, whose `trainer.datamodule` is that of an earlier call if the present one
    has dataloaders. Replacement: `trainer.datamodule`, once each call sets it.
    """
    return trainer.predict_loop._data_source.instance


def unwrap_dataloaders() -> None:
    """Remove Lightning's temporary wrappers around methods of dataloader classes.

    Seen in Lightning 2.6, which leaves them in place, for the whole process, after an error: it
    then refuses later dataloaders whose `batch_size` is a positional argument. Replacement: a
    `finally` in `lightning.fabric.utilities.data._replace_dunder_methods`.
    """
    from lightning_utilities.core.inheritance import get_all_subclasses
    from torch.utils.data import BatchSampler, DataLoader

    for kind in (DataLoader, BatchSampler):
        for loader in {kind, *get_all_subclasses(kind)}:
            for method in ("__init__", "__setattr__", "__delattr__"):
                if original := loader.__dict__.get(f"__old{method}"):
                    setattr(loader, method, original)
                    delattr(loader, f"__old{method}")
