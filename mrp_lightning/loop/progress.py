"""The progress of a run: a line in the trainer's bar, log lines, and metrics for loggers."""

import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from rich.markup import escape

from mrp_lightning.devices import peak_memory
from mrp_lightning.environment import progress_log
from mrp_lightning.models.batch import token_ids
from mrp_lightning.pruning.job import Listener, Progress
from mrp_lightning.records.rows import LayerReport, mean_relative_loss

_BAR_SECONDS = 0.1
"""Seconds between two updates of a bar, since drawing takes time."""
_LINE_SECONDS = 30
"""Seconds between two log lines."""
_LAYER_METRICS = ("loss", "relative_loss", "sparsity", "damping", "iterations", "gap", "seconds")


class ProgressReporter:
    """Reports the progress of a long task in the trainer's bar, else in the log, and to loggers.

    The task starts with the construction, and `log_seldom` logs after `first_seconds` first.
    """

    def __init__(self, trainer: Trainer, first_seconds: float = _LINE_SECONDS) -> None:
        self.trainer = trainer
        self._start = time.monotonic()
        self._next_line, self._next_update = self._start + first_seconds, 0.0
        self._update: Callable[[int, str], None] | None = None

    def elapsed(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self._start

    @contextmanager
    def bar(self, total: int, name: str) -> Iterator[None]:
        """Add a bar below the trainer's, if that is a `RichProgressBar`; see `show`."""
        bar = self.trainer.progress_bar_callback
        if isinstance(bar, RichProgressBar) and bar.progress is not None:
            rich = bar.progress
            # Lightning's bar reads descriptions as markup, and layers may have any name.
            task = rich.add_task(escape(name), total=total)

            def update(done: int, text: str) -> None:
                rich.update(task, completed=done, description=escape(text))
                bar.refresh()

            self._update = update
        yield
        self._update = None

    def is_due(self) -> bool:
        """Return whether `_BAR_SECONDS` have passed since this method last returned true."""
        now = time.monotonic()
        due = now >= self._next_update
        # Only a drawn update starts the next interval: frequent calls would put it off.
        self._next_update = now + _BAR_SECONDS if due else self._next_update
        return due

    def show(self, done: int, text: str) -> None:
        """Show the finished part of the total, and the present task, in the bar."""
        if self._update is not None:
            self._update(done, text)

    def log(self, line: str) -> None:
        """Log a line in process 0, unless a bar is shown on a terminal."""
        self._log(line, time.monotonic())

    def log_seldom(self, text: str) -> None:
        """Log the present task and the elapsed time, half a minute after the last line or later."""
        now = time.monotonic()
        if now >= self._next_line:
            self._log(f"{text} · {roughly(now - self._start)}", now)

    def _log(self, line: str, now: float) -> None:
        self._next_line = now + _LINE_SECONDS
        # In a file, the bar is drawn at the end only, so that lines are needed there as well.
        is_seen = self._update is not None and sys.stdout.isatty()
        if self.trainer.is_global_zero and not is_seen:
            progress_log.info(line)

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        """Pass metrics to the trainer's loggers."""
        for logger in self.trainer.loggers:
            logger.log_metrics(metrics, step=step)


def roughly(seconds: float) -> str:
    """Format seconds as s, from 99.5 s on as min, and from 99.5 min on as h, such as "12 min"."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if seconds < 99.5 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


class BatchLog(Callback):
    """Logs the batch of `fit`, `validate` and `test` after five seconds, then every half minute.

    It logs unless a bar is shown on a terminal: in a file, Lightning's bar appears only at the end.
    """

    def __init__(self) -> None:
        self._reporter: ProgressReporter | None = None
        self._first_step = self._tokens = 0
        self._training_since = 0.0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock of the log, unless a bar is shown on a terminal."""
        if trainer.progress_bar_callback is None or not sys.stdout.isatty():
            self._reporter = ProgressReporter(trainer, first_seconds=5)

    on_test_start = on_fit_start

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock as `on_fit_start`, except for a validation within `fit`."""
        if trainer.state.fn == TrainerFn.VALIDATING:  # within `fit`, `trainer.validating` is true
            self.on_fit_start(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock and the counts by which the time left is estimated."""
        self._first_step, self._tokens = trainer.global_step, 0
        self._training_since = time.monotonic()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the epoch, the batch, the metrics of the bar, the tokens and the time left."""
        ids = token_ids(batch)
        self._tokens += 0 if ids is None else ids.numel()
        epoch, batches = trainer.current_epoch + 1, trainer.num_training_batches
        metrics = trainer.progress_bar_metrics.items()
        parts = [f"training: epoch {epoch}", f"batch {batch_idx + 1}/{batches}"]
        line = ", ".join([*parts, *(f"{name} {value:.3g}" for name, value in metrics)])
        line += f" · {self._tokens:,} tokens" if self._tokens else ""
        steps, total = trainer.global_step - self._first_step, trainer.estimated_stepping_batches
        if steps and math.isfinite(total):
            rest = (total - trainer.global_step) / steps
            line += f" · about {roughly(rest * (time.monotonic() - self._training_since))} left"
        self._log(line)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Log the task, the batch, and the number of the text if there are several."""
        if trainer.testing:
            task, totals = "testing", trainer.num_test_batches
        else:
            checked = trainer.num_sanity_val_batches if trainer.sanity_checking else None
            task, totals = "validating", checked or trainer.num_val_batches
        text = f"text {dataloader_idx + 1} of {len(totals)}, " if len(totals) > 1 else ""
        self._log(f"{task}: {text}batch {batch_idx + 1}/{totals[dataloader_idx]}")

    on_test_batch_end = on_validation_batch_end

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Release the trainer, so that it can be pickled."""
        self._reporter = None

    def _log(self, text: str) -> None:
        if self._reporter is not None:
            self._reporter.log_seldom(text)


class PruningProgress(Listener):
    """Reports a pruning in the trainer's bar and log, with an estimate of the remaining time.

    The estimate assumes that all blocks take the same time, except blocks from a journal. `steps`
    are those of the job, and the `device` is that on which the model runs.
    """

    def __init__(self, steps: int, device: torch.device, reporter: ProgressReporter) -> None:
        super().__init__()
        self.reporter, self._steps, self._device = reporter, steps, device
        self._shown = -1
        self._done = self._uncounted = 0
        self._pruning_since = self._last_block = reporter.elapsed()

    def started(self, walk: str) -> None:
        """Start the clock of a walk's first block; blocks of a walk before it count no more."""
        super().started(walk)
        self._uncounted = self._done
        self._pruning_since = self._last_block = self.reporter.elapsed()

    def log(self, text: str) -> None:
        """Log a message, once for all processes."""
        rank_zero_info(text)

    def progress(self, progress: Progress) -> None:
        """Update the bar when a layer is finished, else at most ten times a second."""
        if self.num_layers == self._shown and not self.reporter.is_due():
            return
        self._shown = self.num_layers
        block = f"block {progress.block}/{progress.blocks}"
        self.reporter.show(self.num_layers, f"{block} · {_in_brief(progress.task)}")
        # Of all layers so far, while a finished block is logged with the mean of its own.
        loss = mean_relative_loss(self.pruned_rows)
        parts = [block, progress.task, "" if loss is None else f"relative loss {loss:.3g}"]
        self.reporter.log_seldom(" · ".join(filter(None, [*parts, self._left()])))

    def finished(self, k: int, rows: list[LayerReport], *, resumed: bool) -> None:
        """Log a block and its layers."""
        now = self.reporter.elapsed()
        seconds, self._last_block = now - self._last_block, now
        self._uncounted += (k + 1 - self._done) * resumed
        self._done = k + 1
        # The clock of the estimate starts after the last restored block, since these take little
        # time.
        if self._done == self._uncounted:
            self._pruning_since = now
        block = f"block {self._done}/{self._steps}"
        mean_loss = sum(row.relative_loss or 0.0 for row in rows) / max(1, len(rows))
        loss = f" · relative loss {mean_loss:.3g}" if rows else ""
        time_left = ", ".join(filter(None, [roughly(now), self._left()]))
        self.reporter.log(f"{block}{loss} · {'from the journal' if resumed else time_left}")
        if rows:
            self.reporter.show(len(self.pruned_rows), f"{block} · loss {mean_loss:.2g}")
            metrics = {
                "prune/relative_loss": mean_loss,
                "prune/sparsity": sum(row.sparsity or 0.0 for row in rows) / len(rows),
                "prune/seconds": sum(row.seconds or 0.0 for row in rows),
            }
            # Time and memory of a restored block are of the run that pruned it.
            if not resumed:
                metrics["prune/block_seconds"] = seconds
                peaks = [*(row.peak_memory for row in rows), peak_memory(self._device)]
                if known := [peak for peak in peaks if peak is not None]:
                    metrics["prune/peak_memory"] = max(known)
            self.reporter.log_metrics(metrics, k)
            self._log_layers(rows)
        for logger in self.reporter.trainer.loggers:
            logger.save()

    def _log_layers(self, rows: list[LayerReport]) -> None:
        """Log each layer, with its number among the pruned layers as the step."""
        # The rows of this block are the last ones.
        for step, row in enumerate(rows, len(self.pruned_rows) - len(rows)):
            metrics = {f"prune_layer/{key}": getattr(row, key) for key in _LAYER_METRICS}
            measured = {key: value for key, value in metrics.items() if value is not None}
            self.reporter.log_metrics(measured, step)

    def _left(self) -> str:
        """Return the remaining time in words; empty until a walk has pruned one, and at the end."""
        pruned = self._done - self._uncounted
        if not pruned or self._done >= self._steps:
            return ""
        seconds_each = (self._last_block - self._pruning_since) / pruned
        rest = seconds_each * (self._steps - self._done)
        # The present block has used a part of its time already.
        rest -= self.reporter.elapsed() - self._last_block
        return f"about {roughly(max(0.0, rest))} left"


def _in_brief(task: str) -> str:
    """Shorten the description of a task, so that the bar fits into 80 columns."""
    inside = re.sub(r"^[a-zA-Z_.]*\d+(\.|, |$)", "", task)
    return inside.partition(", ")[0].rpartition(".")[2]
