"""Pruning the layers of one block: calibrate them, then solve for each."""

import logging
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import nn

from mrp_lightning.calibration.hessians import (
    Calibration,
    InputGroup,
    InputsDiffer,
    blend,
    portions,
)
from mrp_lightning.calibration.padding import Padding
from mrp_lightning.calibration.walks import DenseStream, Walk
from mrp_lightning.narrowing.narrow import Routing
from mrp_lightning.pruning.job import Job
from mrp_lightning.pruning.prune_layer import Aim, Calibrated, prune_layer, put_layer_on_grid
from mrp_lightning.pruning.remove import remove_experts, remove_units
from mrp_lightning.records.report import LayerReport
from mrp_lightning.solver.hessian import HessianAccumulator, InputHessian
from mrp_lightning.solver.patterns import Pattern
from mrp_lightning.targets.layers import Expert, Layer
from mrp_lightning.targets.structure import Structure

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class BlockPruner:
    """Prunes the layers of one block in place, and enters them into the report of the job.

    Attributes:
        job: How the layers are pruned, with whom, and the report.
        walk: The walk, which runs the block.
        k: The number of the block in the walk.
        padding: What tells tokens from padding.
        tell: Called with what is being done.
        dense: What the dense model computes, where it is needed.
        patterns: The patterns of layers, by name, that are not the recipe's.
        waiting: The Hessians of layers, by name, that get on their grid once the block is tuned.
    """

    job: Job
    walk: Walk
    k: int
    padding: Padding
    tell: Callable[[str], None]
    dense: DenseStream | None = None
    patterns: Mapping[str, Pattern] = field(default_factory=dict)
    waiting: dict[str, InputHessian] = field(default_factory=dict)

    def prune(self, layers: list[Layer]) -> list[LayerReport]:
        """Calibrate and prune layers of the block, all from one pass or stage by stage.

        Returns:
            The rows of those that are pruned.
        """
        structure = self.job.plan.structure
        if structure is not None and structure.kind == "experts":
            return [self._prune_experts(layers, structure)] if layers else []
        rows: list[LayerReport] = []
        for stage in self._stages(layers):
            for part in portions(stage):
                pooled = [x for x in stage if isinstance(x, Expert) and x not in part]
                calibration = self._calibrate(part, pooled)
                for layer in calibration.not_called:
                    self._skip(layer, self._why_not_called(layer))
                for group, pool in calibration.hand_over():
                    rows += self._prune_group(group, pool)
        _tell_of_help([row for row in rows if row.shared_hessian])
        return rows

    def _stages(self, layers: list[Layer]) -> list[list[Layer]]:
        """The layers in groups that are pruned one after another, in the order of their calls."""
        if not layers or not self.job.settings.true_sequential:
            return [layers] if layers else []
        order = Calibration(layers, self.padding)
        mine = None
        if self.walk.batches:
            with order.hooked():
                self.walk.output(self.k, 0)
            place = {id(layer): i for i, layer in enumerate(layers)}
            mine = [[place[id(layer)] for layer in group.layers] for group in order.groups]
        # What the first process sees that has a batch holds for all.
        groups = next(found for found in self.job.processes.all(mine) if found is not None)
        stages: dict[Hashable, list[Layer]] = {}
        for n, group in enumerate(groups):
            first = layers[group[0]]
            # Experts stand side by side, also those that this batch does not reach.
            key = first.siblings if isinstance(first, Expert) else n
            stages.setdefault(key, []).extend(layers[i] for i in group)
        called = {i for group in groups for i in group}
        for i, layer in enumerate(layers):
            if i not in called:
                key = layer.siblings if isinstance(layer, Expert) else None
                stages.setdefault(key, []).append(layer)
        return list(stages.values())

    def _calibrate(self, layers: list[Layer], pooled: list[Expert]) -> Calibration:
        """Collect the Hessians of layers in one pass over the batches of all processes."""
        name = self._name or "model"
        batches = len(self.walk.batches)
        dense = self.dense if self.job.settings.target_weight else None
        for share in (True, False):
            calibration = Calibration(
                layers, self.padding, share=share, pooled=pooled, paired=dense is not None
            )
            differ = False
            try:
                with calibration.hooked():
                    for i in range(batches):
                        if dense is not None:
                            with calibration.dense_run():
                                dense.output(self.k, i)
                        self.walk.output(self.k, i)
                        calibration.end_batch()
                        self.tell(f"{name}, inputs {i + 1}/{batches}")
            except InputsDiffer:
                differ = True
            try:
                calibration.sum_over(self.job.processes, differ=differ)
                return calibration
            except InputsDiffer:
                assert share
                log.info("%s: layers share inputs in some batches only", name)
        raise AssertionError

    def _prune_group(self, group: InputGroup, pool: HessianAccumulator | None) -> list[LayerReport]:
        """Prune the layers that share an input, or an expert with the help of all of them."""
        first, own = group.layers[0], group.hand_over()
        tokens = own.num_tokens
        if not (own if pool is None else pool).num_tokens:
            for layer in group.layers:
                self._skip(layer, "saw no tokens, only padding")
            return []
        hessian, shared = (own.hessian(), None) if pool is None else blend(own, pool)
        del own
        if not bool(hessian.any()):
            names = ", ".join(layer.name for layer in group.layers)
            log.warning("All inputs of %s are zero: nothing says which weights matter.", names)
            for layer in group.layers:
                self._skip(layer, "its inputs were zero in every token")
            return []
        hessian = hessian.to(first.weight.device)
        calibrated = Calibrated(
            InputHessian(hessian, name=first.name), tokens, shared, self._aim(group, hessian.device)
        )
        structure = self.job.plan.structure
        if self.dense is not None:
            for layer in group.layers:
                self.dense.remember(layer)
        if structure is not None:
            self.tell(first.name)
            found = remove_units(
                group.layers, calibrated, structure, self.job.settings.recipe, self.job.processes
            )
            for row in found:
                self.job.report.add(replace(row, block=self._name))
            return self.job.report.layers[-len(found) :]
        recipe, rows = self.job.settings.recipe, []
        if self.dense is not None and self.job.settings.grid_waits:
            recipe = replace(recipe, grid=None)
            # One of its own: what a method derived from the Hessian does not wait with it.
            later = InputHessian(hessian, name=first.name)
            self.waiting.update({layer.name: later for layer in group.layers})
        for layer in group.layers:
            self.tell(layer.name)
            row = prune_layer(
                layer,
                calibrated,
                replace(recipe, pattern=self.patterns.get(layer.name, recipe.pattern)),
                progress=partial(self._tell_of, layer),
                processes=self.job.processes,
            )
            rows.append(replace(row, block=self._name))
            self.job.report.add(rows[-1])
            self.tell(layer.name)
        return rows

    def put_on_grid(self, layers: list[Layer]) -> None:
        """Put those of the layers on their grid that waited until the block was tuned."""
        settings, report = self.job.settings, self.job.report
        rows = {row.name: row for row in report.pruned}
        for layer in layers:
            inputs = self.waiting.pop(layer.name, None)
            if inputs is not None:
                row = put_layer_on_grid(
                    layer,
                    inputs,
                    settings.recipe,
                    rows[layer.name],
                    progress=partial(self._tell_of, layer),
                    processes=self.job.processes,
                )
                report.replace([row])

    def _prune_experts(self, layers: list[Layer], structure: Structure) -> LayerReport:
        """Remove whole experts of the block."""
        block, job = self.walk.blocks[self.k], self.job
        if self.dense is not None:
            for layer in layers:
                self.dense.remember(layer)
        row = remove_experts(
            Routing(block.module, structure.blocks[block.name], structure),
            self.walk,
            self.k,
            self.padding,
            job.settings.recipe,
            dense=self.dense,
            target_weight=job.settings.target_weight,
            processes=job.processes,
            tell=self.tell,
        )
        job.report.add(replace(row, block=self._name))
        return job.report.layers[-1]

    def _aim(self, group: InputGroup, device: torch.device) -> Aim | None:
        weight = self.job.settings.target_weight
        if weight is None:
            return None
        if self.dense is None:
            return Aim(weight, own="it is outside the blocks")
        if group.shift is None:
            return Aim(weight, own="its inputs do not pair with the dense model's")
        return Aim(weight, group.shift.matrix().to(device))

    def _tell_of(self, layer: Layer, where: str) -> None:
        self.tell(f"{layer.name}, {where}")

    def _why_not_called(self, layer: Layer) -> str:
        if isinstance(next(self.padding.around(layer.module), None), nn.MultiheadAttention):
            return "its product is made inside torch's attention, which shows no input of it"
        return "not called in the forward"

    def _skip(self, layer: Layer, reason: str) -> None:
        self.job.report.skip(layer.name, tuple(layer.weight.shape), reason, self._name)

    @property
    def _name(self) -> str | None:
        """The name of the block, `None` where the layers are outside the blocks."""
        return self.walk.blocks[self.k].name or None


def _tell_of_help(helped: list[LayerReport]) -> None:
    if helped:
        log.warning(
            "%d experts saw fewer tokens than they have input features; the Hessian of all "
            "experts' tokens made up for it. More calibration data helps them: %s",
            len(helped),
            ", ".join(f"{row.name} ({row.tokens})" for row in helped),
        )
