"""Names that Lightning keeps to itself."""

from typing import Any


def movable() -> type:
    """The class of everything that Lightning moves to a device: all that has a method `to`.

    Seen in Lightning 2.6. Batches may hold objects that are no tensors. In its place: a public name
    of it in `lightning.fabric.utilities`.
    """
    from lightning.fabric.utilities.apply_func import _TransferableDataType

    return _TransferableDataType


def in_order(callbacks: list[Any]) -> list[Any]:
    """Callbacks in the order in which a trainer calls them; it refuses those that it would.

    Seen in Lightning 2.6, whose trainer does this with the callbacks that it is made with, and
    with those of a model, but has no method for more. In its place: a method that adds callbacks,
    or `predict(callbacks=…)`.
    """
    from lightning.pytorch.trainer.connectors import callback_connector

    ordered = callback_connector._CallbackConnector._reorder_callbacks(callbacks)
    callback_connector._validate_callbacks_list(ordered)
    return ordered


def works_in_children(trainer: Any) -> bool:
    """Whether a trainer's strategy spawns or forks workers, in which the model is another one.

    Seen in Lightning 2.6, whose strategies tell it by the class of their launcher alone. In its
    place: a property of strategies or of launchers.
    """
    from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

    return isinstance(trainer.strategy.launcher, _MultiProcessingLauncher)


def strategy_as_given(trainer: Any) -> Any:
    """The word, or the object, that a trainer was given as its `strategy`.

    Seen in Lightning 2.6. A message names the strategy as the user did. In its place: a property
    of trainers.
    """
    return trainer._accelerator_connector._strategy_flag


def predict_data(trainer: Any) -> Any:
    """The datamodule or the dataloaders of the `predict` that runs.

    Seen in Lightning 2.6, whose `trainer.datamodule` is still that of an earlier call where this
    one was given dataloaders. In its place: `trainer.datamodule`, once each call sets it.
    """
    return trainer.predict_loop._data_source.instance


def unwrap_dataloaders() -> None:
    """Take away what Lightning wraps around the methods of dataloaders while it asks for one.

    Seen in Lightning 2.6, which leaves it there, for the whole process, where that raises: of
    later dataloaders it then refuses all whose `batch_size` is given by its place. In its place:
    a `finally` in `lightning.fabric.utilities.data._replace_dunder_methods`.
    """
    from lightning_utilities.core.inheritance import get_all_subclasses
    from torch.utils.data import BatchSampler, DataLoader

    for kind in (DataLoader, BatchSampler):
        for each in {kind, *get_all_subclasses(kind)}:
            for method in ("__init__", "__setattr__", "__delattr__"):
                if own := each.__dict__.get(f"__old{method}"):
                    setattr(each, method, own)
                    delattr(each, f"__old{method}")
