"""Pruning a model block by block, each calibrated on the outputs of the pruned blocks before it."""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mrp_lightning.calibration.offload import (
    CPU,
    Offload,
    Pinned,
    explained_out_of_memory,
    peak_rss,
)
from mrp_lightning.calibration.padding import Padding
from mrp_lightning.calibration.walk_choice import choose_walk
from mrp_lightning.calibration.walks import DenseStream, Rerun, Walk, WholeModel, hidden_of
from mrp_lightning.errors import TargetError
from mrp_lightning.journal.block_record import BlockRecord
from mrp_lightning.narrowing.narrow import BlockTrial, rerouted
from mrp_lightning.pruning.allocation import find_sparsities
from mrp_lightning.pruning.block import BlockPruner
from mrp_lightning.pruning.block_tuner import BlockTuner
from mrp_lightning.pruning.job import Job
from mrp_lightning.records.report import BlockReport, LayerReport
from mrp_lightning.targets.blocks import Block
from mrp_lightning.targets.layers import Layer
from mrp_lightning.targets.plan import refuse_not_finite

log = logging.getLogger(__name__)


def prune_model(job: Job) -> None:
    """Prune the layers of a model, one block after another, and fill the report of the job.

    Each layer is written in one copy, then reported: after an exception the report lists the layers
    that are pruned, and all others are as they were.

    Raises:
        TargetError: The blocks have no order, no layer could be pruned, or there are no blocks
            where `allocation` or `tuning` need them.
        HessianError: A layer's inputs give no usable Hessian.
        OutOfMemoryError: There is not enough memory.
        SaveError: The journal cannot be written.
    """
    report, offloads = job.report, job.settings.offload
    start, cpu_start, peak_before = time.perf_counter(), time.process_time(), peak_rss()
    if job.journal is not None:
        start -= job.journal.manifest.seconds
        cpu_start -= job.journal.manifest.cpu_seconds
    report.model_weights = sum(p.numel() for p in job.model.parameters())
    padding = Padding(job.model)
    moves = offloads and job.streamed is None
    offload = Offload([b.module for b in job.plan.blocks] if moves else [], job.device)
    try:
        with (
            explained_out_of_memory(job.device, offload=offloads),
            padding.watch(),
            offload.active(),
            torch.no_grad(),
            rerouted(job.plan),
        ):
            for left in job.plan.skipped:
                report.skip(left.name, left.shape, left.reason, job.plan.block_of(left.name))
            walker = _Walker(job, padding, (job.streamed or offload).pinned)
            walker.prune_blocks()
            walker.prune_outside()
        if not report.pruned:
            reasons = "\n".join(f"  {row.name}: {row.skipped}" for row in report.layers)
            raise TargetError(f"Pruned nothing. Every layer was left out:\n{reasons}")
        _warn_of_unmatched(job.processes.all(padding.unmatched))
    finally:
        report.seconds = time.perf_counter() - start
        report.cpu_seconds = time.process_time() - cpu_start
        peak = peak_rss()
        report.peak_rss = peak if peak != peak_before else None


class _Walker:
    """Walks the model of a job, and prunes where it is.

    Args:
        job: The job.
        padding: What tells tokens from padding.
        pinned: Keeps a block on the device while it is walked.
    """

    def __init__(self, job: Job, padding: Padding, pinned: Pinned) -> None:
        self.job, self.report, self.padding, self.pinned = job, job.report, padding, pinned

    def prune_blocks(self) -> None:
        """Walk the blocks up to the last one that has layers to prune."""
        job, layers = self.job, self.job.plan.layers
        if not job.plan.blocks:
            job.settings.require_blocks()
            return
        walk = choose_walk(
            self._forward,
            job.batches,
            job.plan.blocks,
            store=CPU if job.settings.offload else None,
            processes=job.processes,
        )
        self.report.config["walk"] = walk.name
        dense = self._dense_stream(walk)
        tuner = self._tuner(walk, dense)
        sparsities = find_sparsities(job, walk.twin(), self.padding, self.pinned)
        journal = job.journal or ()
        waiting = [k for k, block in enumerate(walk.blocks) if layers[block.name]]
        last = max(waiting, default=-1)
        trial = None if job.plan.structure is None else BlockTrial(job.plan.structure)
        for k, block in enumerate(walk.blocks[: last + 1]):
            mine, first, tell = layers[block.name], len(self.report.layers), partial(job.tell, k)
            beside = job.plan.beside.get(block.name, []) if tuner is not None else []
            with self.pinned(block.module):
                if dense is not None:
                    for layer in beside:
                        dense.remember(layer)
                resumed = self._restore(k, mine, dense, beside)
                if not resumed:
                    if job.streamed is not None:
                        every = block.module.named_parameters(prefix=block.name)
                        refuse_not_finite(mine, every)
                    if trial is not None and job.batches:
                        trial.check(block, partial(_hidden, walk, k))
                    pruner = BlockPruner(job, walk, k, self.padding, tell, dense, sparsities.layers)
                    pruner.prune(mine)
                    _require_all(job, block.name, self.report.pruned_since(first))
                rows = self.report.pruned_since(first)
                # A block that is pruned again may come out otherwise, and void those after it.
                later = [j for j in waiting if j > k and (not resumed or j not in journal)]
                if dense is not None and (later or (tuner and not resumed)):
                    for i in dense.advance(k):
                        tell(f"{block.name}, dense outputs {i + 1}/{len(job.batches)}")
                if not resumed:
                    done = BlockReport(name=block.name, sparsity=sparsities.blocks.get(block.name))
                    if tuner is not None:
                        pruned = {row.name for row in rows}
                        tuned = [*(x for x in mine if x.name in pruned), *beside]
                        done = tuner.tune(k, tuned, done, tell)
                        pruner.put_on_grid(mine)
                        rows = self.report.pruned_since(first)
                    has_row = tuner is not None or bool(sparsities.blocks)
                    self._keep(k, block.name, mine, first, done if has_row else None, beside)
                if later:
                    for i in walk.advance(k):
                        tell(f"{block.name}, outputs {i + 1}/{len(job.batches)}")
            job.listener.finished(k, rows, resumed=resumed)

    def prune_outside(self) -> None:
        """Prune the layers outside the blocks, in one pass over the whole model."""
        job = self.job
        if not job.plan.outside:
            return
        walk = WholeModel(self._forward, job.batches, [Block("", job.model, "")])
        self.report.config.setdefault("walk", walk.name)
        step, first = len(job.plan.blocks), len(self.report.layers)
        resumed = self._restore(step, job.plan.outside, None)
        if not resumed:
            pruner = BlockPruner(job, walk, 0, self.padding, partial(job.tell, step))
            pruner.prune(job.plan.outside)
            self._keep(step, "", job.plan.outside, first, None)
        job.listener.finished(step, self.report.pruned_since(first), resumed=resumed)

    def _forward(self, item: Any) -> Any:
        """Run the model on a batch, of which the padding knows before it runs."""
        self.padding.start_batch(self.job.batch_of(item))
        return self.job.forward(item)

    def _restore(
        self,
        step: int,
        layers: list[Layer],
        dense: DenseStream | None,
        beside: Sequence[Layer] = (),
    ) -> bool:
        """Take what was done in a step from the journal, if it is there."""
        record = None if self.job.journal is None else self.job.journal.read(step)
        if record is None:
            return False
        remember = (lambda _: None) if dense is None else dense.remember
        record.restore(layers, remember, beside)
        self.report.layers += record.rows
        self.report.blocks += [] if record.block is None else [record.block]
        self.report.resumed_blocks += 1
        return True

    def _keep(
        self,
        step: int,
        name: str,
        layers: list[Layer],
        first: int,
        block: BlockReport | None,
        tuned: Sequence[Layer] = (),
    ) -> None:
        """Enter what was done in a step into the report and the journal."""
        self.report.blocks += [] if block is None else [block]
        if self.job.journal is not None and layers:
            rows = self.report.layers[first:]
            self.job.journal.write(step, BlockRecord.of(name, layers, rows, block, tuned))

    def _dense_stream(self, walk: Walk) -> DenseStream | None:
        settings = self.job.settings
        if settings.target_weight is None and not settings.tuning:
            return None
        if self.job.streamed is not None and isinstance(walk, Rerun):
            raise TargetError(
                "`target` and `tuning` need the dense model beside the pruned one, and this "
                "model's blocks cannot run on stored inputs: with `streaming` there is no dense "
                "one left. Leave these out, or load the model without `streaming`."
            )
        return DenseStream(walk, keeps_outputs=bool(settings.tuning))

    def _tuner(self, walk: Walk, dense: DenseStream | None) -> BlockTuner | None:
        job = self.job
        tuning = job.settings.block_tuning
        if tuning is None or dense is None:
            return None
        recipe = job.settings.recipe
        tuner = BlockTuner(
            job.model,
            walk,
            dense,
            self.padding,
            tuning,
            recipe=replace(recipe, grid=None) if job.settings.grid_waits else recipe,
            say=job.listener.say,
            processes=job.processes,
        )
        with self.pinned(walk.blocks[0].module):
            tuner.check(job.plan.layers)
        return tuner


def _hidden(walk: Walk, k: int) -> Tensor | None:
    """What block k returns for the first batch, `None` if that does not reach it."""
    output = walk.output(k, 0)
    return None if output is None else hidden_of(output)


def _require_all(job: Job, block: str, rows: list[LayerReport]) -> None:
    """Refuse to go on where a block could not be pruned that is to be as narrow as the others."""
    missing = {layer.name for layer in job.plan.layers[block]} - {row.name for row in rows}
    if job.plan.structure is not None and missing:
        reasons = [
            f"{row.name} ({row.skipped})" for row in job.report.layers if row.name in missing
        ]
        raise TargetError(
            f"`structure` needs the same number of {job.plan.structure.kind} in every block, and "
            f"in {block} none could be removed: {', '.join(reasons)}."
        )


def _warn_of_unmatched(found: Iterable[Mapping[str, tuple[Any, Any]]]) -> None:
    unmatched = {name: shapes for each in found for name, shapes in each.items()}
    if unmatched:
        log.warning(
            "Some batches have padding, and the inputs of these layers do not match the "
            "attention mask around them, so all of their rows counted. If rows of theirs are "
            "padding (experts, and not an image tower), calibrate without padding:\n%s",
            "\n".join(
                f"  {name}: input {shape}, mask {mask}" for name, (shape, mask) in unmatched.items()
            ),
        )
