"""Prune the layers of one block: calibrate, then solve."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
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
from mrp_lightning.errors import TargetError
from mrp_lightning.narrowing.structure import Structure
from mrp_lightning.pruning.job import Job
from mrp_lightning.pruning.prune_layers import (
    Aim,
    Calibrated,
    measured,
    prune_layers,
    put_layers_on_grid,
    quantise_head,
)
from mrp_lightning.records.report import LayerReport
from mrp_lightning.solver.columns import remove_columns
from mrp_lightning.solver.hessian import HessianAccumulator, InputHessian
from mrp_lightning.solver.patterns import Pattern
from mrp_lightning.solver.problem import output_energy
from mrp_lightning.solver.recipe import Recipe
from mrp_lightning.targets.layers import Expert, Layer

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class WalkedBlock:
    """A block at its turn in the walk, with the layers to prune and the report that they enter.

    Attributes:
        job: The job, which has the settings, the processes and the report.
        walk: Runs the blocks.
        k: The number of the block in the walk.
        padding: Separates tokens from padding in the inputs of layers.
        report_progress: Called with the present task, in words.
        layers: The layers to prune.
        tuned: Other layers of the block, which only tuning changes.
        dense: The dense model's hidden states; `None` if neither target nor tuning needs them.
        first_row: The index in the report of this block's first row.
    """

    job: Job
    walk: Walk
    k: int
    padding: Padding
    report_progress: Callable[[str], None]
    layers: list[Layer]
    tuned: Sequence[Layer] = ()
    dense: DenseStream | None = None
    first_row: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "first_row", len(self.job.report.layers))

    @property
    def pruned_rows(self) -> list[LayerReport]:
        """The rows of the layers that are pruned so far."""
        return self.job.report.pruned_since(self.first_row)

    @property
    def name(self) -> str | None:
        """The name of the block, `None` for layers outside of the blocks."""
        return self.walk.blocks[self.k].name or None

    @property
    def module(self) -> nn.Module:
        """The module of the block."""
        return self.walk.blocks[self.k].module

    @property
    def dense_target(self) -> DenseStream | None:
        """The dense stream if layers aim at its outputs, `None` if it serves the tuning alone."""
        return self.dense if self.job.settings.target_weight else None

    def add(self, row: LayerReport) -> None:
        """Enter the row of a pruned layer, with the name of the block, into the report."""
        self.job.report.add(replace(row, block=self.name))

    def skip(self, layer: Layer, reason: str) -> None:
        """Enter a layer that stays dense into the report."""
        self.job.report.skip(layer.name, tuple(layer.weight.shape), reason, self.name)

    def remember(self, layers: Sequence[Layer]) -> None:
        """Copy the dense weights of layers, before they change, if the dense stream needs them."""
        if self.dense is not None:
            for layer in layers:
                self.dense.remember(layer)

    def stages(self) -> list[list[Layer]]:
        """Return the layers in the groups that are pruned one after another, in the order of calls.

        There is one group unless the settings ask for `true_sequential`.
        """
        layers = self.layers
        if not layers or not self.job.settings.true_sequential:
            return [layers] if layers else []
        order = Calibration(layers, self.padding)
        numbers = None
        if self.walk.batches:
            with order.hooked():
                self.walk.output(self.k, 0)
            number_of = {id(layer): i for i, layer in enumerate(layers)}
            numbers = [[number_of[id(layer)] for layer in group.layers] for group in order.groups]
        # All processes use the order of the first process that has a batch.
        gathered = self.job.processes.all(numbers)
        groups = next(numbers for numbers in gathered if numbers is not None)
        stages: dict[Hashable, list[Layer]] = {}
        for n, group in enumerate(groups):
            first = layers[group[0]]
            # Experts run in parallel, also those to which this batch sends no token.
            key = first.siblings if isinstance(first, Expert) else n
            stages.setdefault(key, []).extend(layers[i] for i in group)
        called = {i for group in groups for i in group}
        for i, layer in enumerate(layers):
            if i not in called:
                key = layer.siblings if isinstance(layer, Expert) else None
                stages.setdefault(key, []).append(layer)
        return list(stages.values())

    def calibrate(self, layers: list[Layer], pooled: list[Expert]) -> Calibration:
        """Accumulate the Hessians of layers in one pass over the batches of all processes.

        `pooled` are experts whose inputs count only in the Hessian of all experts.
        """
        name = self.name or "model"
        batches, dense = len(self.walk.batches), self.dense_target
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
                        self.report_progress(f"{name}, inputs {i + 1}/{batches}")
            except InputsDiffer:
                differ = True
            try:
                calibration.sum_over(self.job.processes, differ=differ)
                return calibration
            except InputsDiffer:
                assert share
                log.info("%s: layers share inputs in some batches only", name)
        raise AssertionError


class Remover(ABC):
    """Removes weights, or whole units, of one block after another, in place."""

    @abstractmethod
    def prune(self, block: WalkedBlock) -> None:
        """Prune the layers of a block, and enter them into the report.

        Layers that cannot be pruned are entered as skipped.
        """

    def put_on_grid(self, block: WalkedBlock) -> None:
        """Quantise the layers that waited for the tuning of their block."""
        del block  # by default, no layer waits


class _HessianRemover(Remover):
    """Prunes layers by the Hessians of their inputs; layers that share an input go together."""

    def prune(self, block: WalkedBlock) -> None:
        """Calibrate and prune the layers of a block, all from one pass or stage by stage."""
        for stage in block.stages():
            for part in portions(stage):
                pooled = [x for x in stage if isinstance(x, Expert) and x not in part]
                calibration = block.calibrate(part, pooled)
                for layer in calibration.not_called:
                    block.skip(layer, _why_not_called(layer, block.padding))
                for group, pool in calibration.hand_over():
                    calibrated = _calibrated(block, group, pool)
                    if calibrated is not None:
                        block.remember(group.layers)
                        self.prune_group(block, group.layers, calibrated)
        _warn_of_shared([row for row in block.pruned_rows if row.shared_hessian])

    @abstractmethod
    def prune_group(self, block: WalkedBlock, layers: list[Layer], calibrated: Calibrated) -> None:
        """Prune the layers of a block that share an input."""


class LayerSolver(_HessianRemover):
    """Prunes each layer by itself: a mask in the pattern, and its compensation.

    Layers with a row in the report have already lost columns, and are only quantised.

    Args:
        recipe: How layers are pruned.
        patterns: The patterns of layers, by name, that differ from the recipe's.
    """

    def __init__(self, recipe: Recipe, patterns: Mapping[str, Pattern] | None = None) -> None:
        self._recipe, self._patterns = recipe, patterns or {}
        self._waiting: list[tuple[list[Layer], InputHessian]] = []  # for the tuning

    def prune_group(self, block: WalkedBlock, layers: list[Layer], calibrated: Calibrated) -> None:
        """Prune each of the layers."""
        recipe, rows = self._recipe, {row.name for row in block.job.report.pruned}
        waits = block.dense is not None and block.job.settings.grid_waits
        if waits:
            recipe = replace(recipe, grid=None)
            # A new object, which does not keep the factorised Hessian in memory.
            hessian = InputHessian(calibrated.inputs.hessian, name=layers[0].name)
            self._waiting.append((layers, hessian))
        narrowed = [layer for layer in layers if layer.name in rows]
        unpruned = [layer for layer in layers if layer.name not in rows]
        # Quantisation is faster for all rows of an input at once; without it, a single layer's
        # solution is in memory at a time.
        for layer_group in [[layer] for layer in unpruned] if recipe.grid is None else [unpruned]:
            if not layer_group:
                continue
            block.report_progress(layer_group[0].name)
            new_rows, parameters = prune_layers(
                layer_group,
                calibrated,
                [
                    replace(recipe, pattern=self._patterns.get(layer.name, recipe.pattern))
                    for layer in layer_group
                ],
                progress=partial(_report_of_layer, block),
                processes=block.job.processes,
            )
            for row in new_rows:
                block.add(row)
            block.job.report.grid |= parameters
            block.report_progress(layer_group[-1].name)
        if narrowed and not waits:
            self._put_on_grid(block, narrowed, calibrated.inputs)

    def put_on_grid(self, block: WalkedBlock) -> None:
        """Quantise the layers that waited for the tuning of their block."""
        for layers, inputs in self._waiting:
            self._put_on_grid(block, layers, inputs)
        self._waiting.clear()

    def _put_on_grid(
        self, block: WalkedBlock, layers: Sequence[Layer], inputs: InputHessian
    ) -> None:
        """Quantise layers that have a row in the report and share an input."""
        rows = {row.name: row for row in block.job.report.pruned}
        replaced, parameters = put_layers_on_grid(
            layers,
            inputs,
            self._recipe,
            [rows[layer.name] for layer in layers],
            progress=partial(_report_of_layer, block, layers[0]),
            processes=block.job.processes,
        )
        block.job.report.replace(replaced)
        block.job.report.grid |= parameters


class HeadSolver(_HessianRemover):
    """Quantises the output head.

    Args:
        recipe: The recipe, which removes nothing and has the grid of the head.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    def prune_group(self, block: WalkedBlock, layers: list[Layer], calibrated: Calibrated) -> None:
        """Quantise the only layer."""
        (head,) = layers
        block.report_progress(head.name)
        progress = partial(_report_of_layer, block, head)
        (row,), parameters = quantise_head(
            head, calibrated, self._recipe, progress, block.job.processes
        )
        block.add(row)
        block.job.report.grid |= parameters
        block.report_progress(head.name)


class UnitRemover(_HessianRemover):
    """Sets the columns of whole neurons or heads to zero in the layers that read them.

    The layers of a block that read the units share the removed set, and so are solved as one matrix
    with their rows stacked.

    Args:
        structure: The units, and the number of them to remove.
        recipe: The recipe; with a grid, the remaining weights of all layers are quantised to it.
    """

    def __init__(self, structure: Structure, recipe: Recipe) -> None:
        self._structure = structure
        self._solver = None if recipe.grid is None else LayerSolver(recipe.grid_alone)
        self._kept = torch.empty(0, dtype=torch.long)  # the units that remain in the present block

    def prune(self, block: WalkedBlock) -> None:
        """Remove units of the block, and with a grid quantise what remains of all its layers.

        Quantisation takes a second calibration pass, since layers then read the remaining units.
        """
        parts = self._structure.blocks.get(block.name or "")
        consumers = [] if parts is None else list(parts.consumers)
        if consumers:
            super().prune(replace(block, layers=consumers))
        if self._solver is None:
            return
        layers = block.layers
        if parts is not None:
            layers = [parts.remainder(layer, self._kept) for layer in layers]
        self._solver.prune(replace(block, layers=layers))
        rows = {row.name: row for row in block.pruned_rows}
        producers = [rows[x.name] for x in layers if x.name in rows and len(x.weight) < len(x.view)]
        shapes = {layer.name: tuple(layer.weight.shape) for layer in block.layers}
        removed = self._structure.count / self._structure.units
        block.job.report.replace(
            replace(row, shape=shapes[row.name], sparsity=removed) for row in producers
        )

    def put_on_grid(self, block: WalkedBlock) -> None:
        """Quantise the layers that waited for the tuning of their block."""
        if self._solver is not None:
            self._solver.put_on_grid(block)

    def prune_group(self, block: WalkedBlock, layers: list[Layer], calibrated: Calibrated) -> None:
        """Remove the columns of some units from `layers`, all layers that read the units.

        Raises:
            TargetError: Other layers that read the units have another input.
            HessianError: The Hessian is unusable.
        """
        block.report_progress(layers[0].name)
        structure, recipe = self._structure, block.job.settings.recipe
        inputs, aim = calibrated.inputs, calibrated.aim
        parts = next(parts for parts in structure.blocks.values() if layers[0] in parts.consumers)
        if len(layers) != len(parts.consumers):
            raise TargetError(
                f"`structure: {structure.kind}`: {', '.join(x.name for x in parts.consumers)} read "
                f"the same {structure.kind}, but not the same input."
            )
        # The consumers lose the same columns, so they are one matrix with their rows stacked: the
        # loss of a set of columns is the sum over all rows.
        weights = [layer.weight for layer in layers]
        weight = torch.cat(weights)
        zeros = [int((weight == 0).sum()) / weight.numel() for weight in weights]
        with measured(weight.device) as used:
            solution = remove_columns(
                weight,
                inputs,
                structure.count,
                group=parts.group,
                method=recipe.method.name,
                damping=recipe.damping,
                target=None if aim is None else aim.target(weight, inputs, recipe),
            )
            # All processes have the same sums, but different machines may round the solution
            # differently.
            narrower = block.job.processes.like_first_(solution.weight.contiguous())
        self._kept = (~solution.removed).nonzero()[:, 0].cpu()
        new_weights, rows = narrower.split([len(w) for w in weights]), []
        for layer, dense, new, zeros_before in zip(
            layers, weights, new_weights, zeros, strict=True
        ):
            wide = torch.promote_types(dense.dtype, torch.float32)
            change = new.to(wide) - dense.to(wide)
            row = LayerReport.of(
                replace(solution, loss=output_energy(change, inputs.hessian)),
                replace(recipe, grid=None),
                name=layer.name,
                shape=dense.shape,
                energy=output_energy(dense, inputs.hessian),
                tokens=calibrated.tokens,
                sparsity=structure.count / structure.units,
                zeros_before=zeros_before or None,
                own_target=None if aim is None else aim.own,
                **used,
            )
            rows.append(row)
        # Written last, when nothing can fail any more: after an error all consumers are untouched.
        for layer, new in zip(layers, new_weights, strict=True):
            layer.write_(new)
        for row in rows:
            block.add(row)


def _calibrated(
    block: WalkedBlock, group: InputGroup, pool: HessianAccumulator | None
) -> Calibrated | None:
    """Return the statistics of an input; skip its layers and return `None` if it has none.

    `pool` is the accumulator of all experts' inputs, for the group of an expert.
    """
    first, accumulator = group.layers[0], group.hand_over()
    tokens = accumulator.num_tokens
    if not (accumulator if pool is None else pool).num_tokens:
        for layer in group.layers:
            block.skip(layer, "saw no tokens, only padding")
        return None
    hessian, shared = (accumulator.hessian(), None) if pool is None else blend(accumulator, pool)
    del accumulator  # as large as the Hessian
    if not bool(hessian.any()):
        names = ", ".join(layer.name for layer in group.layers)
        log.warning("All inputs of %s are zero: nothing says which weights matter.", names)
        for layer in group.layers:
            block.skip(layer, "its inputs were zero in every token")
        return None
    hessian = hessian.to(first.weight.device)
    aim = _aim(block, group, hessian.device)
    return Calibrated(InputHessian(hessian, name=first.name), tokens, shared, aim)


def _aim(block: WalkedBlock, group: InputGroup, device: torch.device) -> Aim | None:
    weight = block.job.settings.target_weight
    if weight is None:
        return None
    if block.dense is None:
        return Aim(weight, own="it is outside the blocks")
    if group.shift is None:
        return Aim(weight, own="its inputs do not pair with the dense model's")
    return Aim(weight, group.shift.matrix().to(device))


def _report_of_layer(block: WalkedBlock, layer: Layer, task: str) -> None:
    block.report_progress(f"{layer.name}, {task}")


def _why_not_called(layer: Layer, padding: Padding) -> str:
    if isinstance(next(padding.around(layer.module), None), nn.MultiheadAttention):
        return "its product is made inside torch's attention, which shows no input of it"
    return "not called in the forward"


def _warn_of_shared(rows: list[LayerReport]) -> None:
    """Warn of experts that were pruned with the help of the Hessian of all experts' tokens."""
    if rows:
        log.warning(
            "%d experts saw fewer tokens than they have input features; the Hessian of all "
            "experts' tokens made up for it. More calibration data helps them: %s",
            len(rows),
            ", ".join(f"{row.name} ({row.tokens})" for row in rows),
        )
