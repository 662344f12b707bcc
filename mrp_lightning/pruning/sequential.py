"""Pruning a model block by block, each calibrated on the outputs of the pruned blocks before it."""

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from mrp_lightning.calibration.choice import choose_walk
from mrp_lightning.calibration.experts import blend, portions
from mrp_lightning.calibration.hessians import Calibration, InputGroup, InputsDiffer
from mrp_lightning.calibration.offload import CPU, Offload
from mrp_lightning.calibration.padding import Padding
from mrp_lightning.calibration.walks import Walk, WholeModel
from mrp_lightning.errors import TargetError
from mrp_lightning.pruning.prune_layer import prune_layer
from mrp_lightning.pruning.report import LayerReport, PruningReport
from mrp_lightning.solver.hessian import HessianAccumulator
from mrp_lightning.solver.input_hessian import InputHessian
from mrp_lightning.solver.recipe import Recipe
from mrp_lightning.targets.blocks import Block
from mrp_lightning.targets.layers import Expert, Layer
from mrp_lightning.targets.plan import Plan

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Progress:
    """Where the walk is.

    Attributes:
        block: Number of the block, from 1.
        blocks: How many there are.
        task: What is being done.
        layers: Layers finished, pruned or skipped.
        report: The layers so far.
    """

    block: int
    blocks: int
    task: str
    layers: int
    report: PruningReport


@dataclass(eq=False)
class SequentialPruner:
    """Prunes a model in place.

    Args:
        model: The module whose forward `run` calls.
        run: Runs that forward on one batch.
        batches: The calibration batches; anything that `run` takes.
        plan: The blocks and layers.
        recipe: How layers are pruned.
        report: Filled while layers are pruned.
        true_sequential: Whether the layers of a block are pruned one after another, each calibrated
            on the outputs of those before it.
        batch_of: What of an item of `batches` holds an `attention_mask`.
        device: Where the model runs.
        offload: Whether blocks and stored activations stay on the CPU until they are needed.
        on_progress: Called often, for a progress bar.
        on_block: Called with the number of each block (from 0) and the layers pruned in it.
    """

    model: nn.Module
    run: Callable[[Any], Any]
    batches: Sequence[Any]
    plan: Plan
    recipe: Recipe
    report: PruningReport
    true_sequential: bool = False
    batch_of: Callable[[Any], Any] = lambda item: item
    device: torch.device = CPU
    offload: bool = False
    on_progress: Callable[[Progress], None] = lambda *_: None
    on_block: Callable[[int, list[LayerReport]], None] = lambda *_: None
    _block: int = field(default=0, init=False)

    def prune(self) -> None:
        """Walk the model.

        Each layer is written in one copy, then reported: after an exception the report lists the
        layers that are pruned, and all others are as they were.

        Raises:
            TargetError: The blocks have no order, or no layer could be pruned.
            HessianError: A layer's inputs give no usable Hessian.
        """
        start = time.perf_counter()
        self.padding = Padding(self.model)
        blocks = [block.module for block in self.plan.blocks] if self.offload else []
        self._offload = Offload(blocks, self.device)
        self._forward = self.run
        self.run = self._run_one
        try:
            with self.padding.watch(), self._offload.active(), torch.no_grad():
                self._report_skipped()
                self._walk()
            if not self.report.pruned:
                reasons = "\n".join(f"  {row.name}: {row.skipped}" for row in self.report.layers)
                raise TargetError(f"Pruned nothing. Every layer was left out:\n{reasons}")
            self._warn_of_padding()
            self.report.complete = True
        finally:
            self.run = self._forward
            self.report.seconds = time.perf_counter() - start

    def _run_one(self, item: Any) -> Any:
        self.padding.start_batch(self.batch_of(item))
        return self._forward(item)

    def _walk(self) -> None:
        plan = self.plan
        if plan.blocks:
            store = CPU if self.offload else None
            walk = choose_walk(self.run, self.batches, plan.blocks, store=store)
            self.report.config["walk"] = walk.name
            last = max((k for k, b in enumerate(walk.blocks) if plan.layers[b.name]), default=-1)
            for k, block in enumerate(walk.blocks[: last + 1]):
                self._block = k
                with self._offload.pinned(block.module):
                    rows = self._prune_layers(walk, k, plan.layers[block.name])
                    if k < last:
                        for i in walk.advance(k):
                            self._tell(f"{block.name}, outputs {i + 1}/{len(self.batches)}")
                self.on_block(k, rows)
        if plan.outside:
            whole = WholeModel(self.run, self.batches, [Block("", self.model, "")])
            self.report.config.setdefault("walk", whole.name)
            self._block = len(plan.blocks)
            self.on_block(self._block, self._prune_layers(whole, 0, plan.outside))

    def _prune_layers(self, walk: Walk, k: int, layers: list[Layer]) -> list[LayerReport]:
        """Calibrate and prune the layers of one block; all from one pass, or group by group."""
        rows: list[LayerReport] = []
        for stage in self._stages(walk, k, layers):
            for part in portions(stage):
                pooled = [x for x in stage if isinstance(x, Expert) and x not in part]
                calibration = self._calibrate(walk, k, part, pooled)
                rows += self._prune_calibrated(calibration)
        return rows

    def _prune_calibrated(self, calibration: Calibration) -> list[LayerReport]:
        rows: list[LayerReport] = []
        pools = calibration.pools()
        for layer in calibration.not_called:
            if isinstance(layer, Expert) and layer.siblings in pools:
                empty = HessianAccumulator(layer.columns, layer.name)
                calibration.groups.append(InputGroup([layer], empty, 0))
            else:
                self._skip(layer.name, tuple(layer.weight.shape), "not called in the forward")
        while calibration.groups:
            group = calibration.groups.pop(0)
            expert = group.layers[0]
            if isinstance(expert, Expert):
                rows += self._prune_expert(expert, group, pools[expert.siblings])
            else:
                rows += self._prune_group(group)
        helped = {row.name: row.tokens for row in rows if row.shared_hessian}
        if helped:
            log.warning(
                "%d experts saw fewer tokens than they have input features; the Hessian of all "
                "experts' tokens made up for it. More calibration data helps them: %s",
                len(helped),
                ", ".join(f"{name} ({tokens})" for name, tokens in helped.items()),
            )
        return rows

    def _prune_expert(
        self, expert: Expert, group: InputGroup, pool: HessianAccumulator
    ) -> list[LayerReport]:
        own = group.accumulator
        if pool.num_tokens == 0:
            self._skip(expert.name, tuple(expert.weight.shape), "saw no tokens, only padding")
            return []
        hessian, shared = blend(own, pool)
        hessian = hessian.to(expert.weight.device)
        inputs = InputHessian(hessian, name=expert.name)
        return [self._prune_layer(expert, inputs, own.num_tokens, shared)]

    def _stages(self, walk: Walk, k: int, layers: list[Layer]) -> list[list[Layer]]:
        if not layers or not self.true_sequential:
            return [layers] if layers else []
        order = Calibration(layers, self.padding)
        with order.hooked():
            walk.output(k, 0)
        stages: dict[Hashable, list[Layer]] = {}
        for group in order.groups:
            first = group.layers[0]
            # Experts stand side by side, also those that this batch does not reach.
            key = first.siblings if isinstance(first, Expert) else id(group)
            stages.setdefault(key, []).extend(group.layers)
        for layer in order.not_called:
            key = layer.siblings if isinstance(layer, Expert) else None
            stages.setdefault(key, []).append(layer)
        return list(stages.values())

    def _calibrate(
        self, walk: Walk, k: int, layers: list[Layer], pooled: list[Expert]
    ) -> Calibration:
        """One pass over all batches."""
        name = walk.blocks[k].name or "model"
        for share in (True, False):
            calibration = Calibration(layers, self.padding, share=share, pooled=pooled)
            try:
                with calibration.hooked():
                    for i in walk.visit(k):
                        calibration.end_batch()
                        self._tell(f"{name}, inputs {i + 1}/{len(self.batches)}")
                return calibration
            except InputsDiffer:
                assert share
                log.info("%s: layers share inputs in some batches only", name)
        raise AssertionError

    def _prune_group(self, group: InputGroup) -> list[LayerReport]:
        """Prune the layers that share an input."""
        first = group.layers[0]
        if group.accumulator.num_tokens == 0:
            for layer in group.layers:
                self._skip(layer.name, tuple(layer.weight.shape), "saw no tokens, only padding")
            return []
        hessian = group.accumulator.hessian().to(first.weight.device)
        tokens = group.accumulator.num_tokens
        del group.accumulator
        inputs = InputHessian(hessian, name=first.name)
        return [self._prune_layer(layer, inputs, tokens) for layer in group.layers]

    def _prune_layer(
        self, layer: Layer, inputs: InputHessian, tokens: int, shared: float | None = None
    ) -> LayerReport:
        row = prune_layer(layer, inputs, self.recipe, tokens, shared)
        self.report.layers.append(row)
        log.info("%s: relative loss %.4g, %.1f s", row.name, row.relative_loss, row.seconds)
        self._tell(layer.name)
        return row

    def _warn_of_padding(self) -> None:
        if self.padding.unmatched:
            log.warning(
                "Some batches have padding, and the inputs of these layers do not match the "
                "attention mask around them, so all of their rows counted. If rows of theirs are "
                "padding (experts, and not an image tower), calibrate without padding:\n%s",
                "\n".join(
                    f"  {name}: input {shape}, mask {mask}"
                    for name, (shape, mask) in self.padding.unmatched.items()
                ),
            )

    def _report_skipped(self) -> None:
        for left in self.plan.skipped:
            self._skip(left.name, left.shape, left.reason)

    def _skip(self, name: str, shape: tuple[int, ...], reason: str) -> None:
        log.info("%s is left dense: %s", name, reason)
        self.report.layers.append(LayerReport(name=name, shape=shape, skipped=reason))

    def _tell(self, task: str) -> None:
        blocks = len(self.plan.blocks) + bool(self.plan.outside)
        done = len(self.report.layers) - len(self.plan.skipped)
        self.on_progress(Progress(self._block + 1, blocks, task, done, self.report))
