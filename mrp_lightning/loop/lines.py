"""Lines about the batches of `fit`, `validate` and `test`, where nobody sees a bar."""

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from mrp_lightning.environment import progress_log as log
from mrp_lightning.loop.progress import is_seen, roughly

_FIRST_SECONDS, _NEXT_SECONDS = 5, 30


class Lines(Callback):
    """A line after five seconds, and one each half minute.

    Lightning draws its bar into files at the end only, and not at all where it is switched off. A
    pruning is told by `PlainLog`.
    """

    def __init__(self) -> None:
        self._start = self._next = 0.0

    def on_fit_start(self, *_: Any) -> None:
        """Count the time from here, validations within included."""
        self._begin()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the time from here, but for a validation within `fit`."""
        if trainer.validating:
            self._begin()

    def on_test_start(self, *_: Any) -> None:
        """Count the time from here."""
        self._begin()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Tell the epoch and the batch."""
        what = f"training: epoch {trainer.current_epoch + 1}, batch"
        self._tell(trainer, what, batch_idx, trainer.num_training_batches)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Tell the batch, and of several texts the text."""
        if trainer.testing:
            what, totals = "testing", trainer.num_test_batches
        else:
            checked = trainer.num_sanity_val_batches if trainer.sanity_checking else None
            what, totals = "validating", checked or trainer.num_val_batches
        text = f"text {dataloader_idx + 1} of {len(totals)}, " if len(totals) > 1 else ""
        self._tell(trainer, f"{what}: {text}batch", batch_idx, totals[dataloader_idx])

    on_test_batch_end = on_validation_batch_end

    def _begin(self) -> None:
        self._start = time.monotonic()
        self._next = self._start + _FIRST_SECONDS

    def _tell(self, trainer: Trainer, what: str, index: int, total: int | float) -> None:
        now = time.monotonic()
        if now >= self._next and trainer.is_global_zero and not is_seen(trainer):
            self._next = now + _NEXT_SECONDS
            log.info("%s %d/%s · %s", what, index + 1, total, roughly(now - self._start))
