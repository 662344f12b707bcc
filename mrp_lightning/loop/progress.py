"""The progress of a run: a line in the trainer's bar, a plain log, and loggers."""

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from mrp_lightning.calibration.offload import peak_memory
from mrp_lightning.environment import progress_log as log
from mrp_lightning.pruning.job import Job, Listener, Progress
from mrp_lightning.records.report import LayerReport, PruningReport

_BAR_SECONDS = 0.1
_LINE_SECONDS = 30


@contextmanager
def nested_progress(
    trainer: Trainer, total: int, name: str = "pruning"
) -> Iterator[Callable[[int, str], None]]:
    """Show a task below the running one, in Rich or in tqdm, or nowhere if the trainer has no bar.

    Yields:
        A function that takes how much is done of the total, such as the number of layers, and what
        is being done.
    """
    bar = trainer.progress_bar_callback
    if not _has_bar(trainer) or not trainer.is_global_zero:
        yield lambda *_: None
    elif isinstance(bar, RichProgressBar) and bar.progress is not None:
        rich = bar.progress
        task = rich.add_task(name, total=total)

        def update_rich(done: int, text: str) -> None:
            rich.update(task, completed=done, description=text)
            bar.refresh()

        yield update_rich
    else:
        with Tqdm(
            total=total,
            desc=name,
            position=2 * getattr(bar, "process_position", 0) + 1,
            dynamic_ncols=True,
            file=sys.stdout,
            miniters=0,  # by time: the text changes more often than the count
        ) as line:

            def update_tqdm(done: int, text: str) -> None:
                line.set_description_str(text, refresh=False)
                line.update(done - line.n)

            yield update_tqdm


class PlainLog:
    """Lines where nobody sees a bar: for each finished block, and where a block takes long.

    It counts the time from here, and estimates the rest as if all blocks were alike, but for those
    that came from a journal.

    Args:
        trainer: The trainer, whose bar may be switched off, or go to a file.
        blocks: The number of blocks in all.
    """

    def __init__(self, trainer: Trainer, blocks: int) -> None:
        self._silent = is_seen(trainer)
        self._blocks = blocks
        self._done = self._resumed = 0
        self._start = self._last_line = time.monotonic()
        self._pruning_since = self._last_block = self._start

    def finish(self, done: int, relative_loss: float | None, *, resumed: bool = False) -> None:
        """Log a finished block, with an estimate of the rest.

        Args:
            done: The number of finished blocks.
            relative_loss: That of the last one, `None` if no layer of it is pruned.
            resumed: Whether it was finished by an interrupted run before this one.
        """
        now = self._last_line = self._last_block = time.monotonic()
        self._resumed += (done - self._done) * resumed
        self._done = done
        if done == self._resumed:
            self._pruning_since = now
        parts = [f"block {done}/{self._blocks}"]
        if relative_loss is not None:
            parts.append(f"relative loss {relative_loss:.3g}")
        rest = self._rest(now)
        left = f", {rest}" if rest else ""
        parts.append("from the journal" if resumed else roughly(now - self._start) + left)
        self._say(" · ".join(parts))

    @property
    def left(self) -> str:
        """The time that is left, as a text; empty until a block is finished."""
        rest = self._rest(time.monotonic())
        return f" · {rest}" if rest else ""

    def move(self, text: str) -> None:
        """Log what is being done, if there was no line for half a minute."""
        now = time.monotonic()
        if now - self._last_line >= _LINE_SECONDS:
            self._last_line = now
            self._say(f"{text} · {roughly(now - self._start)}")

    def _rest(self, now: float) -> str:
        pruned = self._done - self._resumed
        if not pruned or self._done >= self._blocks:
            return ""
        seconds_each = (self._last_block - self._pruning_since) / pruned
        rest = seconds_each * (self._blocks - self._done) - (now - self._last_block)
        return f"about {roughly(max(0.0, rest))} left"

    def _say(self, line: str) -> None:
        if not self._silent:
            log.info(line)


class Seldom:
    """True at most ten times a second: a bar that is drawn more often costs more than it shows."""

    def __init__(self) -> None:
        self._last = 0.0

    def __call__(self) -> bool:
        """Whether it is time again."""
        now = time.monotonic()
        due = now - self._last >= _BAR_SECONDS
        self._last = now if due else self._last
        return due


def is_seen(trainer: Trainer) -> bool:
    """Whether a trainer has a bar that is drawn on a terminal."""
    return _has_bar(trainer) and sys.stdout.isatty()


def _has_bar(trainer: Trainer) -> bool:
    bar = trainer.progress_bar_callback
    return bar is not None and not getattr(bar, "is_disabled", False)


def roughly(seconds: float) -> str:
    """A time that is an estimate, in its largest unit."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if seconds < 99.5 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


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


_LAYER_METRICS = ("loss", "relative_loss", "sparsity", "damping", "iterations", "gap", "seconds")


class TrainerListener(Listener):
    """Shows and logs a pruning as a trainer shows and logs what it does itself.

    Args:
        trainer: The trainer.
        steps: The number of blocks in all, and one for the layers outside of them.
        report: The report of the layers so far.
        show: Shows how many layers are done, and a text, in the trainer's bar.
    """

    def __init__(
        self, trainer: Trainer, steps: int, report: PruningReport, show: Callable[[int, str], None]
    ) -> None:
        self._trainer, self._report, self._show = trainer, report, show
        self._plain, self._steps = PlainLog(trainer, steps), steps
        self._is_time, self._shown, self._last = Seldom(), -1, time.monotonic()

    def log(self, text: str) -> None:
        """Tell the user, once for all processes."""
        rank_zero_info(text)

    def progress(self, progress: Progress) -> None:
        """Move the bar, but not more often than anybody can see."""
        if progress.layers == self._shown and not self._is_time():
            return
        loss = self._report.relative_loss
        so_far = "" if loss is None else f" · relative loss {loss:.3g}"
        block = f"block {progress.block}/{progress.blocks} · "
        self._shown = progress.layers
        self._show(progress.layers, block + _in_brief(progress.task))
        self._plain.move(f"{block}{progress.task}{so_far}{self._plain.left}")

    def finished(self, k: int, rows: list[LayerReport], *, resumed: bool) -> None:
        """Log a block and its layers."""
        seconds, self._last = time.monotonic() - self._last, time.monotonic()
        self._plain.finish(k + 1, _mean_loss(rows) if rows else None, resumed=resumed)
        if rows:
            where = f"block {k + 1}/{self._steps}"
            self._show(len(self._report.pruned), f"{where} · loss {_mean_loss(rows):.2g}")
            metrics = {
                "prune/relative_loss": _mean_loss(rows),
                "prune/sparsity": sum(row.sparsity or 0.0 for row in rows) / len(rows),
                "prune/seconds": sum(row.seconds or 0.0 for row in rows),
            }
            self._log(metrics | ({} if resumed else self._cost(rows, seconds)), k)
            self.log_layers(self._report.pruned, rows)
        for logger in self._trainer.loggers:
            logger.save()

    def log_layers(self, pruned: list[LayerReport], rows: list[LayerReport]) -> None:
        """Log what was found of each layer, with its place among the pruned layers as the step."""
        for step, row in enumerate(rows, pruned.index(rows[0])):
            metrics = {f"prune_layer/{key}": getattr(row, key) for key in _LAYER_METRICS}
            self._log({key: value for key, value in metrics.items() if value is not None}, step)

    def _cost(self, rows: list[LayerReport], seconds: float) -> dict[str, float]:
        """The seconds of a block, and the most memory of the process or the GPU so far."""
        device = self._trainer.strategy.root_device
        peaks = [*(row.peak_memory for row in rows), peak_memory(device)]
        known = [peak for peak in peaks if peak is not None]
        cost = {"prune/block_seconds": seconds}
        return cost | ({"prune/peak_memory": max(known)} if known else {})

    def _log(self, metrics: dict[str, float], step: int) -> None:
        for logger in self._trainer.loggers:
            logger.log_metrics(metrics, step=step)


@contextmanager
def listening(trainer: Trainer, job: Job) -> Iterator[TrainerListener]:
    """Give a trainer's listener to a job, with a bar of its own below the trainer's."""
    with nested_progress(trainer, job.plan.num_layers) as show:
        yield TrainerListener(trainer, job.steps, job.report, show)


def _in_brief(task: str) -> str:
    """What is being done in a block, short enough to leave a bar its place in 80 columns."""
    inside = re.sub(r"^[a-zA-Z_.]*\d+(\.|, |$)", "", task)
    return inside.partition(", ")[0].rpartition(".")[2]


def _mean_loss(rows: list[LayerReport]) -> float:
    return sum(row.relative_loss or 0.0 for row in rows) / len(rows)
