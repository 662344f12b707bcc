"""Prune a model block by block, each calibrated on the outputs of the pruned blocks before it."""

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mrp_lightning.calibration.offload import CPU, Offload, Pinned, explained_out_of_memory
from mrp_lightning.calibration.padding import Padding
from mrp_lightning.calibration.walk_choice import choose_walk
from mrp_lightning.calibration.walks import DenseStream, Rerun, ToHead, Walk, WholeModel, hidden_of
from mrp_lightning.devices import peak_rss
from mrp_lightning.errors import TargetError
from mrp_lightning.narrowing.cutting import BlockTrial
from mrp_lightning.narrowing.routing import rerouted
from mrp_lightning.pruning.block import HeadSolver, LayerSolver, Remover, WalkedBlock
from mrp_lightning.pruning.block_tuner import BlockTuner
from mrp_lightning.pruning.job import Job, Usage
from mrp_lightning.pruning.survey import survey
from mrp_lightning.pruning.units import ExpertRemover, UnitRemover
from mrp_lightning.records.block_result import BlockResult, LayerResult
from mrp_lightning.records.rows import BlockReport, LayerReport
from mrp_lightning.targets.blocks import Block, refuse_not_finite
from mrp_lightning.targets.layers import Layer

log = logging.getLogger(__name__)


def prune_model(job: Job) -> list[BlockResult]:
    """Prune the layers of a model in place, one block after another.

    Each layer is written in one copy, then its result goes to the listener of the job: after an
    exception the listener has the results of the pruned layers, and all others are unchanged,
    except in the block in progress, which may be scaled and tuned. The results are returned
    without weights; the first is that of the layers that the plan leaves dense.

    Raises:
        TargetError: The blocks are not called in one order, no layer could be pruned, weights of a
            streamed block are not finite, or the model does not support one of the settings.
        HessianError: A layer's inputs give no usable Hessian, or its solution exceeds its dtype.
        DataError: `tuning` has fewer than two calibration windows.
        OutOfMemoryError: There is not enough memory.
        SaveError: The journal cannot be written.
        JournalError: The journal has layers that the plan lacks.
    """
    with started(job) as (padding, pinned), rerouted(job.plan):
        rows = [
            LayerReport.left_dense(x.name, x.shape, x.reason, job.plan.block_of(x.name))
            for x in job.plan.skipped
        ]
        results = [BlockResult("", tuple(map(LayerResult, rows)))]
        job.listener.block(results[0])
        steps = _Steps(job, padding, pinned)
        # Blocks come first, in the order of their calls: each is calibrated on the outputs of the
        # pruned ones before it, and what is outside of them on those of all.
        for k, block in enumerate(steps.start()):
            # Blocks run many times at their turn, and change in between: they stay on the device
            # until the walk has passed them.
            with pinned(block.module):
                results.append(steps.prune_block(k))
        if job.plan.outside:
            results.append(steps.prune_outside())
        if job.plan.head is not None:
            results.append(steps.prune_head(job.plan.head))
        # Only now, since calibration decides which layers are called and see tokens.
        if not any(result.pruned_rows for result in results):
            rows = [row for result in results for row in result.rows]
            reasons = "\n".join(f"  {row.name}: {row.skipped}" for row in rows)
            raise TargetError(f"Pruned nothing. Every layer was left out:\n{reasons}")
        _warn_of_unmatched(job.processes.all(padding.unmatched))
    return results


@contextmanager
def started(job: Job) -> Iterator[tuple[Padding, Pinned]]:
    """Run a job in this context: its time and memory are measured, and offloaded blocks moved.

    Yields the padding, which watches all forwards, and the context that keeps a block on the
    device.
    """
    offloads, padding = job.settings.offload, Padding(job.model)
    # Streamed blocks come from their files when they run, so there is nothing to move.
    moves = offloads and job.streamed is None
    offload = Offload([b.module for b in job.plan.blocks] if moves else [], job.device)
    with (
        _used_by(job),
        explained_out_of_memory(job.device, offload=offloads),
        padding.watch(),
        offload.active(),
        torch.no_grad(),
    ):
        yield padding, (job.streamed or offload).pinned


@contextmanager
def _used_by(job: Job) -> Iterator[None]:
    """Measure the time and the memory of this context, also after an error, for the listener."""
    start, cpu_start, peak_before = time.perf_counter(), time.process_time(), peak_rss()
    if job.journal is not None:
        start -= job.journal.manifest.seconds
        cpu_start -= job.journal.manifest.cpu_seconds
    try:
        yield
    finally:
        peak = peak_rss()
        # The process's peak says nothing of this context if it had held as much before.
        of_context = peak if peak != peak_before else None
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        job.listener.ended(Usage(seconds, cpu_seconds, of_context))


class _Steps:
    """The steps of a pruning: the blocks, the layers outside of them, and the head.

    Each is restored from the journal, or pruned, tuned and stored in it.
    """

    def __init__(self, job: Job, padding: Padding, pinned: Pinned) -> None:
        self.job, self.padding, self.pinned = job, padding, pinned
        self.walk: Walk | None = None
        self.with_layers: list[int] = []  # the numbers of the blocks that have layers to prune

    def start(self) -> Sequence[Block]:
        """Choose the walk over the blocks, and survey the dense model.

        Returns the blocks up to the last one with layers to prune, in the order of their calls.
        """
        job = self.job
        if not job.plan.blocks:
            return []
        self.walk = walk = choose_walk(
            self._forward,
            job.batches,
            job.plan.blocks,
            store=CPU if job.settings.offload else None,
            processes=job.processes,
        )
        job.listener.started(walk.name)
        # Checked before the survey, which takes long.
        self.dense = self._dense_stream(walk)
        self.tuner = self._tuner(walk, self.dense)
        # The survey moves a twin to the end: the walk of the pruning stays at the first block.
        self.survey = survey(job, walk.twin(), self.padding, self.pinned)
        recipe = job.settings.recipe
        self.trial = None if job.structure is None else BlockTrial(job.structure)
        self.remover: Remover
        if job.structure is None:
            self.remover = LayerSolver(recipe, self.survey.patterns)
        elif job.structure.kind == "experts":
            self.remover = ExpertRemover(job.structure)
        else:
            self.remover = UnitRemover(job.structure, recipe)
        layers = job.plan.layers
        self.with_layers = [k for k, block in enumerate(walk.blocks) if layers[block.name]]
        return walk.blocks[: self._num_blocks]

    @property
    def _num_blocks(self) -> int:
        """The number of blocks up to the last one that has layers to prune."""
        return max(self.with_layers, default=-1) + 1

    def prune_block(self, k: int) -> BlockResult:
        """Finish block k, and compute the inputs of the next one."""
        assert self.walk is not None
        job, name = self.job, self.walk.blocks[k].name
        layers_of_both = job.plan.layers[name], job.tuned_with(name)
        block = self._block(k, self.walk, k, *layers_of_both, self.dense)
        # 1. The block is scaled first: the dense weights that are remembered have to fit the
        #    norms as these are from now on.
        self.survey.scale(self.walk.blocks[k])
        block.remember(block.tuned)
        # 2. The weights change: as the journal has them, or by pruning.
        restored = self._restored(k, block)
        layers: list[LayerResult] = []
        if restored is None:
            self._check(block)
            layers = self.remover.prune(block)
            self._require_all(block, layers)
        # 3. The dense stream passes the block, while its dense weights are remembered: its outputs
        #    are the dense inputs of the next block, and the target of this block's tuning.
        is_followed = self._is_followed(k, resumed=restored is not None)
        if self.dense is not None and (is_followed or (self.tuner and restored is None)):
            for i in self.dense.advance(k):
                block.report_progress(f"{name}, dense outputs {i + 1}/{len(job.batches)}")
        # 4. The weights change for the last time, and are stored. Only then may the walk pass the
        #    block, since the next one is calibrated on its outputs.
        result = restored or self._kept(k, block, self._tuned(block, layers))
        if is_followed:
            for i in self.walk.advance(k):
                block.report_progress(f"{name}, outputs {i + 1}/{len(job.batches)}")
        job.listener.finished(k, result.pruned_rows, resumed=restored is not None)
        return result

    def prune_outside(self) -> BlockResult:
        """Prune the layers outside of the blocks, calibrated by forwards of the whole model."""
        solver, step = LayerSolver(self.job.settings.recipe), len(self.job.plan.blocks)
        return self._prune(step, self._whole_model(), self.job.plan.outside, solver)

    def prune_head(self, head: Layer) -> BlockResult:
        """Quantise the output head by the Hessian of its inputs in the pruned model."""
        job = self.job
        # The layers outside of the blocks, which changed after them, may feed the blocks.
        if self.walk is None or job.plan.outside:
            to_head = ToHead(self._whole_model(), 0, head.module)
        else:
            to_head = ToHead(self.walk, self._num_blocks, head.module)
        # Last of all, since a head has no block after it that would need its outputs.
        solver = HeadSolver(job.settings.recipe.for_head)
        return self._prune(job.plan.steps - 1, to_head, [head], solver)

    def _prune(self, step: int, walk: Walk, layers: list[Layer], solver: Remover) -> BlockResult:
        """Restore layers outside, or the head, from the journal, or prune and store them."""
        block = self._block(step, walk, 0, layers)
        restored = self._restored(step, block)
        if (result := restored) is None:
            pruned = BlockResult(block.name or "", tuple(solver.prune(block)))
            result = self._kept(step, block, pruned)
        self.job.listener.finished(step, result.pruned_rows, resumed=restored is not None)
        return result

    def _block(
        self,
        step: int,
        walk: Walk,
        k: int,
        layers: list[Layer],
        tuned: Sequence[Layer] = (),
        dense: DenseStream | None = None,
    ) -> WalkedBlock:
        job, progress = self.job, partial(self.job.progress, step)
        of_block = layers, tuned, dense, job.listener.layer
        return WalkedBlock(job, walk, k, self.padding, progress, *of_block)

    def _whole_model(self) -> WholeModel:
        walk = WholeModel(self._forward, self.job.batches, [Block("", self.job.model, "")])
        self.job.listener.started(walk.name)
        return walk

    def _forward(self, item: Any) -> Any:
        """Read the mask of a batch, then run the model on it."""
        self.padding.start_batch(self.job.batch_of(item))
        return self.job.forward(item)

    def _restored(self, step: int, block: WalkedBlock) -> BlockResult | None:
        """Restore the result of a step from the journal; `None` if the journal has none."""
        if self.job.journal is None:
            return None
        # Dense weights are remembered before they are overwritten: the dense stream needs them for
        # this block, also in a run that restores it.
        stored = self.job.journal.restore(
            step, block.layers, lambda layer: block.remember([layer]), block.tuned
        )
        if stored is None:
            return None
        result = replace(stored, weights={})
        self.job.listener.block(result, resumed=True)
        return result

    def _kept(self, step: int, block: WalkedBlock, result: BlockResult) -> BlockResult:
        """Pass the result of a step on to the listener, and store it in the journal."""
        self.job.listener.block(result)
        if self.job.journal is not None and block.layers:
            # After the listener has the result: if the disk is full, the report still has this
            # block, whose weights are in the model.
            weights = result.with_weights_of(block.layers, block.tuned)
            self.job.journal.write(step, weights)
        return result

    def _dense_stream(self, walk: Walk) -> DenseStream | None:
        settings = self.job.settings
        if settings.target == "own" and not settings.tuning:
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

    def _check(self, block: WalkedBlock) -> None:
        """Raise a `TargetError`, before a block is pruned, if its weights or units cannot be."""
        job, in_walk = self.job, block.walk.blocks[block.k]
        if job.streamed is not None:  # the plan could not check weights that were in files
            refuse_not_finite(block.layers, block.module.named_parameters(prefix=in_walk.name))
        if self.trial is not None and job.batches:
            self.trial.check(in_walk, partial(_hidden, block.walk, block.k))

    def _require_all(self, block: WalkedBlock, results: Sequence[LayerResult]) -> None:
        """Raise a `TargetError` if a block lost no units, and so is wider than the others."""
        structure, names = self.job.structure, {layer.name for layer in block.layers}
        dense = [x.row for x in results if x.name in names and not x.is_pruned]
        if structure is not None and dense:
            reasons = [f"{row.name} ({row.skipped})" for row in dense]
            raise TargetError(
                f"`structure` needs the same number of {structure.kind} in every block, and "
                f"in {block.name} none could be removed: {', '.join(reasons)}."
            )

    def _is_followed(self, k: int, *, resumed: bool) -> bool:
        """Return whether a later block, or the head, needs the outputs of block k.

        After a restored block, only blocks that the journal lacks need them. After a block that was
        pruned again all later blocks do, since the journal's were calibrated on other outputs.
        """
        journal = self.job.journal or ()
        later = [j for j in self.with_layers if j > k]
        if self.job.plan.head is not None and not self.job.plan.outside:
            later.append(self.job.plan.steps - 1)
        return any(j not in journal for j in later) if resumed else bool(later)

    def _tuned(self, block: WalkedBlock, layers: Sequence[LayerResult]) -> BlockResult:
        """Tune a pruned block, quantise the layers that waited, and return the block's result."""
        name = block.name or ""
        row = BlockReport(name=name, sparsity=self.survey.sparsities.get(name))
        pruned = BlockResult(name, tuple(layers), row if self.survey.patterns else None)
        if self.tuner is None:
            return pruned
        # Layers that were left dense are not tuned: a report of them as dense would be wrong.
        changed = [*pruned.pruned(block.layers), *block.tuned]
        row, grid = self.tuner.tune(block.k, changed, pruned.grid, row, block.report_progress)
        results = self.remover.put_on_grid(block, pruned.with_grid(grid).layers)
        return BlockResult(name, tuple(results), row)


def _hidden(walk: Walk, k: int) -> Tensor | None:
    """Return the output of block k for the first batch, `None` if the batch does not reach it."""
    output = walk.output(k, 0)
    return None if output is None else hidden_of(output)


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
