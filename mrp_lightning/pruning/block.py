"""Prune the layers of one block: calibrate, then solve."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

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
from mrp_lightning.devices import return_freed_memory
from mrp_lightning.pruning.job import Job
from mrp_lightning.pruning.prune_layers import (
    Calibrated,
    prune_layers,
    put_layers_on_grid,
    quantise_head,
)
from mrp_lightning.records.block_result import LayerResult
from mrp_lightning.records.rows import LayerReport
from mrp_lightning.solver.hessian import HessianAccumulator, InputHessian
from mrp_lightning.solver.patterns import Pattern
from mrp_lightning.solver.recipe import Recipe
from mrp_lightning.targets.layers import Expert, Layer

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class WalkedBlock:
    """A block at its turn in the walk, with the layers to prune."""

    job: Job
    walk: Walk
    k: int  # the number of the block in the walk
    padding: Padding
    report_progress: Callable[[str], None]  # called with the present task, in words
    layers: list[Layer]
    tuned: Sequence[Layer] = ()  # other layers of the block, which only tuning changes
    dense: DenseStream | None = None  # the dense model's hidden states, if they are needed
    on_result: Callable[[LayerResult], None] = lambda _: None
    """Called with the result of each layer, as soon as its weight is written or it is left
    dense."""

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
        return self.dense if self.job.settings.target == "dense" else None

    def published(self, results: Iterable[LayerResult]) -> list[LayerResult]:
        """Set the block in results of pruned layers, log them, and pass them to `on_result`."""
        named = [replace(x, row=replace(x.row, block=self.name)) for x in results]
        for result in named:
            row = result.row
            log.info("%s: relative loss %.4g, %.1f s", row.name, row.relative_loss, row.seconds)
            self.on_result(result)
        return named

    def left_dense(self, layers: Iterable[Layer], reason: str) -> list[LayerResult]:
        """Return the results of layers that stay dense, after passing them to `on_result`."""
        rows = [LayerReport.left_dense(x.name, x.weight.shape, reason, self.name) for x in layers]
        results = list(map(LayerResult, rows))
        for result in results:
            self.on_result(result)
        return results

    def remember(self, layers: Sequence[Layer]) -> None:
        """Copy the dense weights of layers, before they change, if the dense stream needs them."""
        if self.dense is not None:
            for layer in layers:
                self.dense.remember(layer)

    def calibrate(self, layers: list[Layer], pooled: list[Expert]) -> Calibration:
        """Accumulate the Hessians of layers in one pass over the batches of all processes.

        A second pass follows if layers share an input in some batches only. All processes must call
        this. `pooled` are experts whose inputs count only in the Hessian of all experts.
        """
        name = self.name or "model"
        batches, dense = len(self.walk.batches), self.dense_target
        # 1. At first layers share an accumulator while they have the same input, as q, k and v do:
        #    one product and one Hessian for all of them.
        # 2. If a later batch contradicts, the sums so far are useless, and a second pass gives each
        #    layer its own. Nothing is shared then, so that two passes are the most.
        # 3. Every process calls `sum_over`, also one whose inputs differ: it is collective, and all
        #    processes have to repeat the pass together.
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


def calibrated_inputs(
    block: WalkedBlock, results: list[LayerResult]
) -> Iterator[tuple[list[Layer], Calibrated]]:
    """Calibrate a block, and yield the inputs of its layers; their dense weights are remembered.

    The caller prunes the layers of an input before it takes the next, so that one yielded Hessian
    at a time is in memory. The results of layers that stay dense are added to `results`.

    Yields:
        Layers that share an input, and its statistics.
    """
    for part in portions(block.layers):
        pooled = [x for x in block.layers if isinstance(x, Expert) and x not in part]
        calibration = block.calibrate(part, pooled)
        for layer in calibration.not_called:
            results += block.left_dense([layer], _why_not_called(layer, block.padding))
        for group, pool in calibration.hand_over():
            return_freed_memory()
            calibrated = _calibrated(block, group, pool)
            if isinstance(calibrated, str):
                results += block.left_dense(group.layers, calibrated)
                continue
            block.remember(group.layers)
            yield group.layers, calibrated


class Remover(ABC):
    """Removes weights, or whole units, of one block after another, in place."""

    @abstractmethod
    def prune(self, block: WalkedBlock) -> list[LayerResult]:
        """Prune the layers of a block in place.

        Returns the results of all layers, those that stay dense included. Each is published as soon
        as its layer is written.
        """

    def put_on_grid(self, block: WalkedBlock, results: Sequence[LayerResult]) -> list[LayerResult]:
        """Quantise the layers that waited for the tuning of their block.

        Returns the `results` of `prune`, with those of the quantised layers replaced.
        """
        del block
        return list(results)  # by default, no layer waits


class LayerSolver(Remover):
    """Prunes each layer by itself; `patterns` are those of layers that differ from the recipe's."""

    def __init__(self, recipe: Recipe, patterns: Mapping[str, Pattern] | None = None) -> None:
        self._recipe, self._patterns = recipe, patterns or {}
        self._waiting: list[tuple[list[Layer], InputHessian]] = []  # for the tuning

    def prune(self, block: WalkedBlock) -> list[LayerResult]:
        """Prune the layers of a block."""
        results: list[LayerResult] = []
        waits = block.dense is not None and block.job.settings.grid_waits
        # Before tuning, weights are free: codes that are chosen now would not fit the tuned
        # weights.
        recipe = replace(self._recipe, grid=None) if waits else self._recipe
        for layers, calibrated in calibrated_inputs(block, results):
            if waits:
                # A new object, which does not keep the factorised Hessian in memory.
                hessian = InputHessian(calibrated.inputs.hessian, name=layers[0].name)
                self._waiting.append((layers, hessian))
            # Quantisation is faster for all rows of an input at once; without it, a single layer's
            # solution is in memory at a time.
            for together in [[layer] for layer in layers] if recipe.grid is None else [layers]:
                block.report_progress(together[0].name)
                recipes = [
                    replace(recipe, pattern=self._patterns.get(layer.name, recipe.pattern))
                    for layer in together
                ]
                progress, processes = partial(_report_of_layer, block), block.job.processes
                new = prune_layers(together, calibrated, recipes, progress, processes)
                results += block.published(new)
                block.report_progress(together[-1].name)
        _warn_of_shared([result.row for result in results if result.row.shared_hessian])
        return results

    def put_on_grid(self, block: WalkedBlock, results: Sequence[LayerResult]) -> list[LayerResult]:
        """Quantise the layers that waited for the tuning of their block."""
        by_name = {result.name: result for result in results}
        for layers, inputs in self._waiting:
            quantised = put_layers_on_grid(
                layers,
                inputs,
                self._recipe,
                [by_name[layer.name] for layer in layers],
                progress=partial(_report_of_layer, block, layers[0]),
                processes=block.job.processes,
            )
            for result in quantised:
                block.on_result(result)
                by_name[result.name] = result
        # The Hessians of one block at most are held, and the next block waits with its own.
        self._waiting.clear()
        return list(by_name.values())


class HeadSolver(Remover):
    """Quantises the output head by a recipe which removes nothing and has the grid of the head."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    def prune(self, block: WalkedBlock) -> list[LayerResult]:
        """Quantise the only layer."""
        results: list[LayerResult] = []
        for (head,), calibrated in calibrated_inputs(block, results):
            block.report_progress(head.name)
            progress = partial(_report_of_layer, block, head)
            result = quantise_head(head, calibrated, self._recipe, progress, block.job.processes)
            results += block.published([result])
            block.report_progress(head.name)
        return results


def _calibrated(
    block: WalkedBlock, group: InputGroup, pool: HessianAccumulator | None
) -> Calibrated | str:
    """Return the statistics of an input, or the reason why its layers cannot be pruned."""
    first, accumulator = group.layers[0], group.hand_over()
    tokens = accumulator.num_tokens
    # For an expert the pool decides: without tokens of its own it has the Hessian of all experts.
    if not (accumulator if pool is None else pool).num_tokens:
        return "saw no tokens, only padding"
    hessian, shared = (accumulator.hessian(), None) if pool is None else blend(accumulator, pool)
    del accumulator  # as large as the Hessian
    # H = 0 makes every loss 0, and relative damping has no diagonal to refer to.
    if not bool(hessian.any()):
        names = ", ".join(layer.name for layer in group.layers)
        log.warning("All inputs of %s are zero: nothing says which weights matter.", names)
        return "its inputs were zero in every token"
    hessian = hessian.to(first.weight.device)
    shift, own_target = None, None
    if block.job.settings.target == "dense":
        if group.shift is not None:
            shift = group.shift.matrix().to(hessian.device)
        elif block.dense is None:
            own_target = "it is outside the blocks"
        else:
            own_target = "its inputs do not pair with the dense model's"
    inputs = InputHessian(hessian, name=first.name)
    return Calibrated(inputs, tokens, shared, shift, own_target)


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
