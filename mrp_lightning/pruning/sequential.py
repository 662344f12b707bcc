"""Pruning a model block by block, each calibrated on the outputs of the pruned blocks before it."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mrp_lightning.allocation.dense_pass import DensePass
from mrp_lightning.allocation.sparsities import Sparsities, find_sparsities
from mrp_lightning.calibration.choice import choose_walk
from mrp_lightning.calibration.dense import DenseStream
from mrp_lightning.calibration.memory import explained_out_of_memory, peak_rss
from mrp_lightning.calibration.offload import CPU, Offload, Pinned
from mrp_lightning.calibration.padding import Padding
from mrp_lightning.calibration.walks import Rerun, Walk, WholeModel
from mrp_lightning.errors import TargetError
from mrp_lightning.journal.block_record import BlockRecord
from mrp_lightning.journal.journal import Journal
from mrp_lightning.journal.shared import SharedJournal
from mrp_lightning.processes import ALONE, Processes
from mrp_lightning.pruning.block import BlockPruner
from mrp_lightning.pruning.extensions import Extensions
from mrp_lightning.pruning.progress import Progress
from mrp_lightning.records.report import PruningReport
from mrp_lightning.records.rows import BlockReport, LayerReport
from mrp_lightning.solver.patterns import Pattern
from mrp_lightning.solver.recipe import Recipe
from mrp_lightning.targets.blocks import Block
from mrp_lightning.targets.layers import Layer
from mrp_lightning.targets.plan import Plan, refuse_not_finite
from mrp_lightning.tuning.block_tuner import BlockTuner

if TYPE_CHECKING:
    from mrp_lightning.models.streaming import StreamedBlocks

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class SequentialPruner:
    """Prunes a model in place.

    Args:
        model: The module whose forward `forward` runs.
        forward: Runs that forward on one batch.
        batches: The calibration batches of this process: anything that `forward` takes.
        plan: The blocks and layers to prune.
        recipe: How layers are pruned.
        report: The report, which is filled while layers are pruned.
        true_sequential: Whether the layers of a block are pruned one after another, each calibrated
            on the outputs of those before it.
        batch_of: Finds in an item of `batches` what may hold an `attention_mask`.
        device: The device on which the model runs.
        offload: Whether blocks and stored activations stay on the CPU until they are needed.
        streamed: The blocks that stay in files until they are needed; then the journal is a
            `StreamedJournal`.
        extensions: What is done beside pruning each layer by itself.
        processes: The processes that prune the model together. All of them prune it, each with
            batches of its own, and end with the same weights.
        journal: Keeps what is done to each block; what it holds is not done again, and the result
            has the same bits.
        on_progress: Called often, for a progress bar.
        say: Called, seldom, with what a user should be told.
        on_block: Called with the number of each block (from 0), the layers pruned in it, and
            whether the journal held them.
    """

    model: nn.Module
    forward: Callable[[Any], Any]
    batches: Sequence[Any]
    plan: Plan
    recipe: Recipe
    report: PruningReport
    true_sequential: bool = False
    batch_of: Callable[[Any], Any] = lambda item: item
    device: torch.device = CPU
    offload: bool = False
    streamed: "StreamedBlocks | None" = None
    extensions: Extensions = field(default_factory=Extensions)
    processes: Processes = ALONE
    journal: Journal | SharedJournal | None = None
    say: Callable[[str], None] = log.info
    on_progress: Callable[[Progress], None] = lambda *_: None
    on_block: Callable[[int, list[LayerReport], bool], None] = lambda *_: None

    def prune(self) -> None:
        """Walk the model.

        Each layer is written in one copy, then reported: after an exception the report lists the
        layers that are pruned, and all others are as they were.

        Raises:
            TargetError: The blocks have no order, no layer could be pruned, or there are no blocks
                where `allocation` or `tuning` need them.
            HessianError: A layer's inputs give no usable Hessian.
            OutOfMemoryError: There is not enough memory.
            SaveError: The journal cannot be written.
        """
        start, cpu_start, peak_before = time.perf_counter(), time.process_time(), peak_rss()
        if self.journal is not None:
            start -= self.journal.manifest.seconds
            cpu_start -= self.journal.manifest.cpu_seconds
        self.report.model_weights = sum(p.numel() for p in self.model.parameters())
        padding = Padding(self.model)
        here = self.offload and self.streamed is None
        offload = Offload([b.module for b in self.plan.blocks] if here else [], self.device)
        try:
            with (
                explained_out_of_memory(self.device, offload=self.offload),
                padding.watch(),
                offload.active(),
                torch.no_grad(),
            ):
                for left in self.plan.skipped:
                    self.report.skip(left.name, left.shape, left.reason)
                self._prune_blocks(padding, (self.streamed or offload).pinned)
                self._prune_outside(padding)
            if not self.report.pruned:
                reasons = "\n".join(f"  {row.name}: {row.skipped}" for row in self.report.layers)
                raise TargetError(f"Pruned nothing. Every layer was left out:\n{reasons}")
            _warn_of_unmatched(self.processes.all(padding.unmatched))
            self.report.complete = True
        finally:
            self.report.seconds = time.perf_counter() - start
            self.report.cpu_seconds = time.process_time() - cpu_start
            peak = peak_rss()
            self.report.peak_rss = peak if peak != peak_before else None

    def _prune_blocks(self, padding: Padding, pinned: Pinned) -> None:
        """Walk the blocks up to the last one that has layers to prune."""
        if not self.plan.blocks:
            self.extensions.require_blocks()
            return
        layers, store = self.plan.layers, CPU if self.offload else None
        walk = choose_walk(
            self._forward_with(padding),
            self.batches,
            self.plan.blocks,
            store=store,
            processes=self.processes,
        )
        self.report.config["walk"] = walk.name
        dense, tuning = None, self.extensions.tuning
        if self.extensions.target_weight or tuning:
            self._refuse_streamed_dense(walk)
            dense = DenseStream(walk, keeps_outputs=tuning is not None)
        tuner = self._tuner(walk, dense, padding, pinned)
        sparsities = self._sparsities(walk.twin(), padding, pinned)
        journal = self.journal or ()
        waiting = [k for k, block in enumerate(walk.blocks) if layers[block.name]]
        last = max(waiting, default=-1)
        for k, block in enumerate(walk.blocks[: last + 1]):
            mine, first = layers[block.name], len(self.report.layers)
            with pinned(block.module):
                pruner = self._block_pruner(walk, k, k, padding, dense, sparsities.layers)
                resumed = self._restore(k, mine, dense)
                if not resumed:
                    refuse_not_finite(mine if self.streamed is not None else [])
                    pruner.prune(mine)
                rows = self.report.pruned_since(first)
                # A block that is pruned again may come out otherwise, and void those after it.
                later = [j for j in waiting if j > k and (not resumed or j not in journal)]
                if dense is not None and (later or (tuner and not resumed)):
                    for i in dense.advance(k):
                        pruner.tell(f"{block.name}, dense outputs {i + 1}/{len(self.batches)}")
                if not resumed:
                    done = BlockReport(name=block.name, sparsity=sparsities.blocks.get(block.name))
                    if tuner is not None:
                        pruned = {row.name for row in rows}
                        tuned = [layer for layer in mine if layer.name in pruned]
                        done = tuner.tune(k, tuned, done, pruner.tell)
                    has_row = tuner is not None or bool(sparsities.blocks)
                    self._keep(k, block.name, mine, first, done if has_row else None)
                if later:
                    for i in walk.advance(k):
                        pruner.tell(f"{block.name}, outputs {i + 1}/{len(self.batches)}")
            self.on_block(k, rows, resumed)

    def _restore(self, step: int, layers: list[Layer], dense: DenseStream | None) -> bool:
        """Take what was done in a step from the journal, if it is there."""
        record = None if self.journal is None else self.journal.read(step)
        if record is None:
            return False
        record.restore(layers, lambda layer: dense.remember(layer) if dense is not None else None)
        self.report.layers += record.rows
        self.report.blocks += [] if record.block is None else [record.block]
        self.report.resumed_blocks += 1
        return True

    def _keep(
        self, step: int, name: str, layers: list[Layer], first: int, block: BlockReport | None
    ) -> None:
        """Enter what was done in a step into the report and the journal."""
        self.report.blocks += [] if block is None else [block]
        if self.journal is not None and layers:
            rows = self.report.layers[first:]
            self.journal.write(step, BlockRecord.of(name, layers, rows, block))

    def _refuse_streamed_dense(self, walk: Walk) -> None:
        """A dense stream that runs all blocks needs the dense weights of those that are pruned."""
        if self.streamed is not None and isinstance(walk, Rerun):
            raise TargetError(
                "`target` and `tuning` need the dense model beside the pruned one, and this "
                "model's blocks cannot run on stored inputs: with `streaming` there is no dense "
                "one left. Leave these out, or load the model without `streaming`."
            )

    def _tuner(
        self, walk: Walk, dense: DenseStream | None, padding: Padding, pinned: Pinned
    ) -> BlockTuner | None:
        tuning = self.extensions.tuning
        if tuning is None or dense is None:
            return None
        tuner = BlockTuner(
            self.model, walk, dense, padding, tuning, say=self.say, processes=self.processes
        )
        with pinned(walk.blocks[0].module):
            tuner.check(self.plan.layers)
        return tuner

    def _sparsities(self, walk: Walk, padding: Padding, pinned: Pinned) -> Sparsities:
        """Those that are allocated. The pass ends here, with all that its walk stores."""
        told = self._teller(0)
        dense_pass = DensePass(
            self.model, walk, self.plan.layers, padding, pinned, told, self.processes
        )

        def prune_block(k: int, layers: list[Layer]) -> set[str]:
            pruner = BlockPruner(
                walk=walk,
                k=k,
                recipe=self.recipe,
                true_sequential=False,
                padding=padding,
                report=PruningReport({}),
                tell=lambda task: told(f"dry run, {task}"),
                processes=self.processes,
            )
            return {row.name for row in pruner.prune(layers)}

        return find_sparsities(
            self.extensions.allocation,
            self.recipe.pattern.sparsity,
            dense_pass,
            prune_block,
            self.journal,
        )

    def _prune_outside(self, padding: Padding) -> None:
        """Prune the layers outside the blocks, in one pass over the whole model."""
        if not self.plan.outside:
            return
        block = Block("", self.model, "")
        walk = WholeModel(self._forward_with(padding), self.batches, [block])
        self.report.config.setdefault("walk", walk.name)
        step, first = len(self.plan.blocks), len(self.report.layers)
        resumed = self._restore(step, self.plan.outside, None)
        if not resumed:
            self._block_pruner(walk, 0, step, padding).prune(self.plan.outside)
            self._keep(step, "", self.plan.outside, first, None)
        self.on_block(step, self.report.pruned_since(first), resumed)

    def _forward_with(self, padding: Padding) -> Callable[[Any], Any]:
        """The forward, of which the padding knows each batch before it runs."""

        def forward(item: Any) -> Any:
            padding.start_batch(self.batch_of(item))
            return self.forward(item)

        return forward

    def _block_pruner(
        self,
        walk: Walk,
        k: int,
        step: int,
        padding: Padding,
        dense: DenseStream | None = None,
        patterns: Mapping[str, Pattern] | None = None,
    ) -> BlockPruner:
        return BlockPruner(
            walk=walk,
            k=k,
            recipe=self.recipe,
            true_sequential=self.true_sequential,
            padding=padding,
            report=self.report,
            tell=self._teller(step),
            dense=dense,
            target_weight=self.extensions.target_weight,
            patterns=patterns or {},
            processes=self.processes,
        )

    def _teller(self, step: int) -> Callable[[str], None]:
        steps = len(self.plan.blocks) + bool(self.plan.outside)

        def tell(task: str) -> None:
            done = len(self.report.layers) - len(self.plan.skipped)
            self.on_progress(Progress(step + 1, steps, task, done, self.report))

        return tell


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
