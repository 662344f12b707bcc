"""The walk over a model in the trainer that holds it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from mrp_lightning.calibration.memory import peak_memory
from mrp_lightning.journal.journal import Journal
from mrp_lightning.journal.shared import SharedJournal
from mrp_lightning.loop.capture import Step
from mrp_lightning.loop.contents import checkpoint_root
from mrp_lightning.loop.progress import PlainLog, Seldom, nested_progress
from mrp_lightning.loop.provenance import provenance
from mrp_lightning.loop.streaming import streamed_blocks
from mrp_lightning.processes import Processes
from mrp_lightning.pruning.extensions import Extensions
from mrp_lightning.pruning.progress import Progress
from mrp_lightning.pruning.sequential import SequentialPruner
from mrp_lightning.records.report import PruningReport
from mrp_lightning.records.rows import LayerReport
from mrp_lightning.solver.recipe import Recipe
from mrp_lightning.targets.plan import Plan

_LAYER_METRICS = ("loss", "relative_loss", "sparsity", "damping", "iterations", "gap", "seconds")


@dataclass(frozen=True, eq=False)
class PruningRun:
    """One pruning of a module, in the trainer whose predict loop gave it the batches.

    Attributes:
        trainer: At the end of its predict loop, with the module on its device.
        module: The LightningModule to prune.
        steps: The calibration batches of this process, with all that `predict_step` takes.
        plan: The blocks and layers to prune.
        recipe: How layers are pruned.
        extensions: What is done beside pruning each layer by itself.
        true_sequential: Whether the layers of a block are pruned one after another.
        offload: Whether blocks and activations stay on the CPU until they are needed.
        processes: The processes of the trainer, each with its steps.
        config: What the report says of how it is done.
        report: The report, which is filled while layers are pruned.
    """

    trainer: Trainer
    module: LightningModule
    steps: Sequence[Step]
    plan: Plan
    recipe: Recipe
    extensions: Extensions
    true_sequential: bool
    offload: bool
    processes: Processes
    config: InitVar[dict[str, Any]]
    report: PruningReport = field(init=False)

    def __post_init__(self, config: dict[str, Any]) -> None:
        config = {**config, "precision": str(self.trainer.precision)}
        if self.processes.size > 1:
            config["processes"] = self.processes.size
        if base_model := getattr(checkpoint_root(self.module)[1], "name_or_path", None):
            config["base_model"] = base_model
        found = provenance(self.trainer, self.steps, self.processes)
        object.__setattr__(self, "report", PruningReport(config, provenance=found))

    def prune(self, journal: Journal | SharedJournal | None = None) -> None:
        """Prune the module in place; progress and metrics go to the trainer's bar and loggers.

        Args:
            journal: Keeps what is done to each block, and knows what is done already.
        """
        trainer, plan, report = self.trainer, self.plan, self.report
        for logger in trainer.loggers:
            logger.log_hyperparams({"prune": report.config})
        plain = PlainLog(trainer, len(plan.blocks) + bool(plan.outside))
        with nested_progress(trainer, plan.num_layers) as show:
            is_time, shown = Seldom(), -1

            def follow(progress: Progress) -> None:
                nonlocal shown
                if progress.layers != shown or is_time():
                    shown, text = progress.layers, _describe(progress) + plain.left
                    show(progress.layers, text)
                    plain.move(text)

            SequentialPruner(
                model=self.module,
                forward=self._forward,
                batches=self.steps,
                batch_of=lambda step: step.batch,
                plan=plan,
                recipe=self.recipe,
                report=report,
                true_sequential=self.true_sequential,
                device=trainer.strategy.root_device,
                offload=self.offload,
                streamed=streamed_blocks(self.module),
                extensions=self.extensions,
                processes=self.processes,
                journal=journal,
                say=rank_zero_info,
                on_progress=follow,
                on_block=self._logging(plain),
            ).prune()
        for name in ("sparsity", "relative_loss"):
            trainer.callback_metrics[f"prune/{name}"] = torch.tensor(report.totals[name])

    def _forward(self, step: Step) -> Any:
        strategy = self.trainer.strategy
        on_device = step.to(strategy.root_device)
        # The strategy's, for its precision.
        return strategy.predict_step(*on_device.args, **on_device.kwargs)

    def _logging(self, plain: PlainLog) -> Callable[[int, list[LayerReport], bool], None]:
        """What tells of each block once it is finished."""
        trainer, device = self.trainer, self.trainer.strategy.root_device
        last = time.monotonic()

        def finish_block(k: int, rows: list[LayerReport], resumed: bool) -> None:
            nonlocal last
            seconds, last = time.monotonic() - last, time.monotonic()
            plain.finish(k + 1, _mean_loss(rows) if rows else None, resumed=resumed)
            _log_metrics(trainer, k, rows, {} if resumed else _cost(device, rows, seconds))
            _log_layers(trainer, self.report.pruned, rows)

        return finish_block


def _cost(device: torch.device, rows: list[LayerReport], seconds: float) -> dict[str, float]:
    """What a block took: all its seconds, and the most memory of the process or the GPU so far."""
    peaks = [*(row.peak_memory for row in rows), peak_memory(device)]
    known = [peak for peak in peaks if peak is not None]
    return {"prune/block_seconds": seconds, **({"prune/peak_memory": max(known)} if known else {})}


def _log_metrics(trainer: Trainer, k: int, rows: list[LayerReport], cost: dict[str, float]) -> None:
    if not rows:
        return
    metrics = {
        "prune/relative_loss": _mean_loss(rows),
        "prune/sparsity": sum(row.sparsity or 0.0 for row in rows) / len(rows),
        "prune/seconds": sum(row.seconds or 0.0 for row in rows),
        **cost,
    }
    for logger in trainer.loggers:
        logger.log_metrics(metrics, step=k)
        logger.save()


def _log_layers(trainer: Trainer, pruned: list[LayerReport], rows: list[LayerReport]) -> None:
    """Log what was found of each layer, with its place among the pruned layers as the step."""
    first = pruned.index(rows[0]) if rows else 0
    for step, row in enumerate(rows, first):
        metrics = {f"prune_layer/{key}": getattr(row, key) for key in _LAYER_METRICS}
        for logger in trainer.loggers:
            known = {key: value for key, value in metrics.items() if value is not None}
            logger.log_metrics(known, step=step)
    for logger in trainer.loggers:
        logger.save()


def _mean_loss(rows: list[LayerReport]) -> float:
    return sum(row.relative_loss or 0.0 for row in rows) / len(rows)


def _describe(progress: Progress) -> str:
    loss = progress.report.relative_loss
    so_far = "" if loss is None else f" · relative loss {loss:.3g}"
    return f"block {progress.block}/{progress.blocks} · {progress.task}{so_far}"
