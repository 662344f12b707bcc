"""How a `PruningCallback`, which belongs to another package, is known here."""

from os import PathLike
from typing import Any, Protocol, runtime_checkable

from lightning.pytorch import Trainer

from mrp_lightning.records.report import PruningReport


@runtime_checkable
class Pruning(Protocol):
    """What is needed of a callback that prunes.

    Attributes:
        report: What was done to each layer, `None` before the first run.
        save_dir: The directory for the pruned model, `None` if it is not saved.
        overwrite: Whether `save_dir` may be replaced.
        journal_beside: The directory beside which the journal lies, in place of `save_dir`. Whoever
            sets it removes the journal.
    """

    report: PruningReport | None
    save_dir: str | PathLike[str] | None
    overwrite: bool
    journal_beside: str | PathLike[str] | None


def callbacks_that_prune(trainer: Trainer) -> list[Pruning]:
    """The callbacks of a trainer that prune, in their order."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, Pruning)]
