"""A listener that tells a trainer's bar, log and loggers of a pruning."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from mrp_lightning.calibration.memory import peak_memory
from mrp_lightning.loop.progress import PlainLog, Seldom, nested_progress
from mrp_lightning.pruning.job import Job, Listener, Progress
from mrp_lightning.records.report import PruningReport
from mrp_lightning.records.rows import LayerReport

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

    def say(self, text: str) -> None:
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
