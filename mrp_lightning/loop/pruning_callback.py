"""How a `PruningCallback`, which belongs to another package, is known here."""

from typing import Any, Protocol, runtime_checkable

from lightning.pytorch import Trainer

from mrp_lightning.pruning.settings import Settings
from mrp_lightning.records.report import PruningReport


@runtime_checkable
class Pruning(Protocol):
    """What is needed of a callback that prunes.

    Attributes:
        settings: How it prunes.
        report: What was done to each layer, `None` before the first run.
    """

    settings: Settings
    report: PruningReport | None


def callbacks_that_prune(trainer: Trainer) -> list[Pruning]:
    """The callbacks of a trainer that prune, in their order."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, Pruning)]
