"""Prune a model block by block, each calibrated on the outputs of the pruned blocks before it."""

import logging
import time
from collections.abc import Iterable, Mapping
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
from mrp_lightning.calibration.walks import (
    DenseStream,
    Rerun,
    ToHead,
    Walk,
    WholeModel,
    hidden_of,
)
from mrp_lightning.errors import TargetError
from mrp_lightning.journal.block_record import BlockRecord
from mrp_lightning.narrowing.cutting import BlockTrial
from mrp_lightning.narrowing.routing import rerouted
from mrp_lightning.narrowing.structure import Structure
from mrp_lightning.pruning.allocation import Sparsities, find_sparsities
from mrp_lightning.pruning.balance import Balance, find_balance
from mrp_lightning.pruning.block import HeadSolver, LayerSolver, Remover, UnitRemover, WalkedBlock
from mrp_lightning.pruning.block_tuner import BlockTuner
from mrp_lightning.pruning.experts import ExpertRemover
from mrp_lightning.pruning.job import Job
from mrp_lightning.records.report import BlockReport
from mrp_lightning.solver.recipe import Recipe
from mrp_lightning.targets.blocks import Block
from mrp_lightning.targets.layers import Layer
from mrp_lightning.targets.values import refuse_not_finite

log = logging.getLogger(__name__)


def prune_model(job: Job) -> None:
    """Prune the layers of a model, one block after another, and fill the report of the job.

    Each layer is written in one copy, then reported: after an exception the report lists the pruned
    layers, and all others are unchanged.

    Raises:
        TargetError: The blocks are not called in one order, no layer could be pruned, or
            `allocation` or `tuning` lack the blocks that they need.
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
            for skipped in job.plan.skipped:
                report.skip(
                    skipped.name, skipped.shape, skipped.reason, job.plan.block_of(skipped.name)
                )
            walker = _Walker(job, padding, (job.streamed or offload).pinned)
            walker.prune_blocks()
            walker.prune_outside()
            walker.prune_head()
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
    """Walks the model of a job and prunes its layers, in the order of their calls.

    Args:
        job: The job.
        padding: Separates tokens from padding in the inputs of layers.
        pinned: Context that keeps a block on the device.
    """

    def __init__(self, job: Job, padding: Padding, pinned: Pinned) -> None:
        self.job, self.report, self.padding, self.pinned = job, job.report, padding, pinned
        # The walk over the blocks, and the number of blocks that it walked.
        self._walked: tuple[Walk, int] | None = None

    def prune_blocks(self) -> None:
        """Prune the blocks one after another, up to the last one that has layers to prune."""
        job = self.job
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
        balance = find_balance(job, walk.twin(), self.padding, self.pinned)
        steps = _BlockSteps(self, walk, dense, tuner, sparsities, balance)
        for k, block in enumerate(walk.blocks[: steps.last + 1]):
            with self.pinned(block.module):
                steps.run(k)
        self._walked = walk, steps.last + 1

    def prune_outside(self) -> None:
        """Prune the layers outside of the blocks, in one pass over the whole model."""
        if layers := self.job.plan.outside:
            solver = LayerSolver(self.job.settings.recipe)
            self._prune(len(self.job.plan.blocks), self._whole_model(), layers, solver)

    def prune_head(self) -> None:
        """Quantise the output head by the Hessian of its inputs in the pruned model."""
        job, head = self.job, self.job.plan.head
        if head is None:
            return
        # The layers outside of the blocks, which changed after them, may feed the blocks.
        if self._walked is None or job.plan.outside:
            self._walked = self._whole_model(), 0
        walk = ToHead(*self._walked, head.module)
        self._prune(job.steps - 1, walk, [head], HeadSolver(job.settings.recipe.for_head))

    def _whole_model(self) -> WholeModel:
        walk = WholeModel(self._forward, self.job.batches, [Block("", self.job.model, "")])
        self.report.config.setdefault("walk", walk.name)
        return walk

    def _prune(self, step: int, walk: Walk, layers: list[Layer], solver: Remover) -> None:
        """Restore layers outside of the blocks from the journal, or prune and record them."""
        job = self.job
        block = WalkedBlock(job, walk, 0, self.padding, partial(job.progress, step), layers)
        resumed = self.restore(step, block)
        if not resumed:
            solver.prune(block)
            self.record(step, block, None)
        job.listener.finished(step, block.pruned_rows, resumed=resumed)

    def _forward(self, item: Any) -> Any:
        """Read the mask of a batch, then run the model on it."""
        self.padding.start_batch(self.job.batch_of(item))
        return self.job.forward(item)

    def restore(self, step: int, block: WalkedBlock) -> bool:
        """Restore the results of a step from the journal; return False if it has none."""
        if self.job.journal is None:
            return False
        record = self.job.journal.restore(
            step, block.layers, lambda layer: block.remember([layer]), block.tuned
        )
        if record is None:
            return False
        self.report.extend(record.rows, record.block)
        self.report.grid |= record.grid
        self.report.resumed_blocks += 1
        return True

    def record(self, step: int, block: WalkedBlock, row: BlockReport | None) -> None:
        """Enter the results of a step into the report and the journal."""
        self.report.add_block(row)
        if self.job.journal is not None and block.layers:
            rows = self.report.rows_since(block.first_row)
            record = BlockRecord.of(block.name or "", block.layers, rows, row, block.tuned)
            grid = self.report.grid
            grid = {row.name: grid[row.name] for row in rows if row.name in grid}
            self.job.journal.write(step, replace(record, grid=grid))

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
        if dense is None or not self.job.settings.tuning:
            return None
        tuner = BlockTuner(self.job, walk, dense, self.padding)
        with self.pinned(walk.blocks[0].module):
            tuner.check()
        return tuner


class _BlockSteps:
    """The steps over the blocks: each is restored from the journal, or pruned, tuned and recorded.

    Args:
        walker: Holds the job, and restores and records steps.
        walk: Runs the blocks on the outputs of the pruned blocks before them.
        dense: The dense model's hidden states; `None` if neither target nor tuning needs them.
        tuner: Tunes a pruned block towards the dense outputs; `None` without `tuning`.
        sparsities: The allocated sparsities of blocks, empty without `allocation`.
        balance: The factors of blocks, empty without `balance`.

    Attributes:
        last: The number of the last block that has layers to prune; −1 if none has.
    """

    def __init__(
        self,
        walker: _Walker,
        walk: Walk,
        dense: DenseStream | None,
        tuner: BlockTuner | None,
        sparsities: Sparsities,
        balance: Balance,
    ) -> None:
        self.walker, self.walk, self.job = walker, walk, walker.job
        self.dense, self.tuner, self.sparsities = dense, tuner, sparsities
        self.balance = balance
        layers, structure = self.job.plan.layers, self.job.structure
        self.with_layers = [k for k, block in enumerate(walk.blocks) if layers[block.name]]
        self.last = max(self.with_layers, default=-1)
        self.trial = None if structure is None else BlockTrial(structure)
        self.remover = _remover(structure, self.job.settings.recipe, sparsities)

    def run(self, k: int) -> None:
        """Finish block k, and compute the inputs of the next one."""
        job, walker, name = self.job, self.walker, self.walk.blocks[k].name
        block = WalkedBlock(
            job,
            self.walk,
            k,
            walker.padding,
            partial(job.progress, k),
            job.plan.layers[name],
            job.tuned_with(name),
            self.dense,
        )
        # First: the dense weights that are remembered belong to the norms as they are from now on.
        self.balance.apply(self.walk.blocks[k])
        block.remember(block.tuned)
        resumed = walker.restore(k, block)
        if not resumed:
            self._check(block)
            self.remover.prune(block)
            _require_all(block)
        is_followed = self._is_followed(k, resumed=resumed)
        # The dense outputs are the dense inputs of the next block, and the target of this block's
        # tuning.
        if self.dense is not None and (is_followed or (self.tuner and not resumed)):
            for i in self.dense.advance(k):
                block.report_progress(f"{name}, dense outputs {i + 1}/{len(job.batches)}")
        if not resumed:
            walker.record(k, block, self._tune(block))
        if is_followed:
            for i in self.walk.advance(k):
                block.report_progress(f"{name}, outputs {i + 1}/{len(job.batches)}")
        job.listener.finished(k, block.pruned_rows, resumed=resumed)

    def _check(self, block: WalkedBlock) -> None:
        """Raise, before a block is changed, if its weights or its units cannot be pruned."""
        job, in_walk = self.job, self.walk.blocks[block.k]
        if job.streamed is not None:  # the plan could not check weights that were in files
            refuse_not_finite(block.layers, block.module.named_parameters(prefix=in_walk.name))
        if self.trial is not None and job.batches:
            self.trial.check(in_walk, partial(_hidden, self.walk, block.k))

    def _is_followed(self, k: int, *, resumed: bool) -> bool:
        """Return whether a later block, or the head, needs the outputs of block k.

        After a restored block, only blocks that the journal lacks need them. After a block that was
        pruned again all later blocks do, since the journal's were calibrated on other outputs.
        """
        journal = self.job.journal or ()
        later = [j for j in self.with_layers if j > k]
        if self.job.plan.head is not None and not self.job.plan.outside:
            later.append(self.job.steps - 1)
        return any(j not in journal for j in later) if resumed else bool(later)

    def _tune(self, block: WalkedBlock) -> BlockReport | None:
        """Tune a block, quantise the layers that waited, and return the block's row, if any."""
        name = self.walk.blocks[block.k].name
        row = BlockReport(name=name, sparsity=self.sparsities.blocks.get(name))
        if self.tuner is None:
            return row if self.sparsities.blocks else None
        names = {row.name for row in block.pruned_rows}
        weights = [*(layer for layer in block.layers if layer.name in names), *block.tuned]
        row = self.tuner.tune(block.k, weights, row, block.report_progress)
        self.remover.put_on_grid(block)
        return row


def _remover(structure: Structure | None, recipe: Recipe, sparsities: Sparsities) -> Remover:
    """Return the remover of single weights, of neurons or heads, or of experts."""
    if structure is None:
        return LayerSolver(recipe, sparsities.layers)
    if structure.kind == "experts":
        return ExpertRemover(structure)
    return UnitRemover(structure, recipe)


def _hidden(walk: Walk, k: int) -> Tensor | None:
    """Return the output of block k for the first batch, `None` if the batch does not reach it."""
    output = walk.output(k, 0)
    return None if output is None else hidden_of(output)


def _require_all(block: WalkedBlock) -> None:
    """Raise if layers of a block could not be pruned, so that it would be wider than the others."""
    job = block.job
    missing = {layer.name for layer in block.layers} - {row.name for row in block.pruned_rows}
    if job.structure is not None and missing:
        reasons = [
            f"{row.name} ({row.skipped})" for row in job.report.layers if row.name in missing
        ]
        raise TargetError(
            f"`structure` needs the same number of {job.structure.kind} in every block, and "
            f"in {block.name} none could be removed: {', '.join(reasons)}."
        )


def _warn_of_unmatched(of_processes: Iterable[Mapping[str, tuple[Any, Any]]]) -> None:
    unmatched = {name: shapes for each in of_processes for name, shapes in each.items()}
    if unmatched:
        log.warning(
            "Some batches have padding, and the inputs of these layers do not match the "
            "attention mask around them, so all of their rows counted. If rows of theirs are "
            "padding (experts, and not an image tower), calibrate without padding:\n%s",
            "\n".join(
                f"  {name}: input {shape}, mask {mask}" for name, (shape, mask) in unmatched.items()
            ),
        )
