"""Prune the layers of one input: solve, measure, write."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mrp_lightning.processes import ALONE, Processes
from mrp_lightning.records.block_result import LayerResult
from mrp_lightning.records.rows import LayerReport
from mrp_lightning.solver.arithmetic import ELEMENTS, split_range
from mrp_lightning.solver.grid import GridParameters
from mrp_lightning.solver.hessian import InputHessian
from mrp_lightning.solver.problem import dense_target, output_energy
from mrp_lightning.solver.pruning import LayerTask, Solution, prune, prune_together
from mrp_lightning.solver.recipe import Recipe
from mrp_lightning.targets.layers import Layer

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Calibrated:
    """The calibration statistics of an input that some layers share."""

    inputs: InputHessian
    tokens: int  # number of tokens that the layers saw; for an expert its own
    shared: float | None = None  # for an expert: the weight, 0 to 1, of all experts' Hessian in it
    shift: Tensor | None = None  # of `InputShift`; None if layers approximate their own outputs
    own_target: str | None = None  # the reason why they do in spite of `target: dense`

    def target(self, weight: Tensor, recipe: Recipe) -> Tensor | None:
        """Return the target of a weight (rows, columns), `None` for its own outputs."""
        if self.shift is None:
            return None
        return dense_target(weight, self.shift, self.inputs.damped(recipe.damping))


def prune_layers(
    layers: Sequence[Layer],
    calibrated: Calibrated,
    recipes: Sequence[Recipe],
    progress: Callable[[Layer, str], None] = lambda _, __: None,
    processes: Processes = ALONE,
) -> list[LayerResult]:
    """Prune layers that share an input in place.

    All processes, which share the rows, must call this. `recipes` has one recipe for each layer,
    all with the same grid. `progress` is called with a layer and the progress of its long solution,
    in words. The results are in the order of layers.

    Raises:
        HessianError: The Hessian is unusable, or a new weight exceeds the range of its dtype.
    """
    inputs = calibrated.inputs
    unpruned = [_Unpruned(*pair, processes) for pair in zip(layers, recipes, strict=True)]
    with measured(inputs.hessian.device) as used:
        tasks = [each.task(calibrated, progress) for each in unpruned]
        solutions = prune_together(tasks, inputs, processes=processes)
    pairs = list(zip(unpruned, solutions, strict=True))
    parts = _parts(used, [each.weight for each in unpruned])
    results = [
        each.result(solution, calibrated, part)
        for (each, solution), part in zip(pairs, parts, strict=True)
    ]
    # Written last, when nothing can fail any more: after an error all layers are as they were.
    for each, solution in pairs:
        each.layer.write_(solution.weight)
    return results


class _Unpruned:
    """A layer to prune, with its weight before anything changes."""

    def __init__(self, layer: Layer, recipe: Recipe, processes: Processes) -> None:
        self.layer, self.recipe, self.processes = layer, recipe, processes
        self.weight = layer.weight.contiguous()  # a Conv1D's view is strided
        self.zeros = self.weight == 0
        # Rows are independent in the loss, so that each process needs targets and energies of its
        # own rows alone.
        self.share = self.weight[processes.share(len(self.weight))]
        # A pattern that removes nothing holds for every weight, and means nothing here.
        self.is_pruned = recipe.pattern.sparsity > 0 and recipe.pattern.holds(self.zeros)

    def task(self, calibrated: Calibrated, progress: Callable[[Layer, str], None]) -> LayerTask:
        """Return the problem to solve."""
        if self.is_pruned:
            log.info("%s has the pattern %s and keeps it", self.layer.name, self.recipe.pattern)
        target = calibrated.target(self.share, self.recipe)
        progress_of_layer = partial(progress, self.layer)
        return LayerTask(self.weight, self.recipe, target, progress_of_layer, self.is_pruned)

    def result(
        self, solution: Solution, calibrated: Calibrated, used: Mapping[str, Any]
    ) -> LayerResult:
        """Measure the solution; `used` is the time and the memory that it took."""
        # The loss is relative to the energy of the layer's outputs, ½·tr(W H Wᵀ), of all rows.
        energies = self.processes.numbers(output_energy(self.share, calibrated.inputs.hessian))
        zeros_before = _fraction(self.zeros)
        # A kept weight that its compensation, or a grid, puts at 0 is not counted: `sparsity` has
        # only removed ones, and both numbers have to be of one kind.
        zeros_now = (solution.weight == 0) & (solution.pruned | self.zeros)
        row = LayerReport.of(
            solution,
            self.recipe,
            name=self.layer.name,
            shape=self.weight.shape,
            energy=math.fsum(number for (number,) in energies),
            tokens=calibrated.tokens,
            sparsity=_fraction(solution.pruned),
            zeros_before=zeros_before or None,
            zeros=_fraction(zeros_now) if zeros_before else None,
            already_pruned=self.is_pruned,
            shared_hessian=calibrated.shared,
            own_target=calibrated.own_target,
            **used,
        )
        return _result(row, self.recipe, solution.grid_parameters)


def _result(row: LayerReport, recipe: Recipe, parameters: GridParameters | None) -> LayerResult:
    """Return the result of a layer, without parameters of grids whose values give them back."""
    # Products of the grids of `bits` are exact in bfloat16, those of engines' types are not.
    is_named = recipe.grid is not None and recipe.grid.name is not None
    return LayerResult(row, parameters if is_named else None)


def _parts(used: Mapping[str, Any], weights: Sequence[Tensor]) -> list[dict[str, Any]]:
    """Return the measures `used` of several weights as those of each, with its part of the time."""
    # Weights that are solved together have no times of their own. The cost for one input is about
    # proportional to rows, and so to weights.
    total = max(1, sum(weight.numel() for weight in weights))
    return [{**used, "seconds": used["seconds"] * (x.numel() / total)} for x in weights]


def put_layers_on_grid(
    layers: Sequence[Layer],
    inputs: InputHessian,
    recipe: Recipe,
    pruned: Sequence[LayerResult],
    progress: Callable[[str], None] = lambda _: None,
    processes: Processes = ALONE,
) -> list[LayerResult]:
    """Quantise pruned and tuned layers that share an input, in place.

    `inputs` is the Hessian with which the layers were pruned, and `pruned` are their results then.
    Returns these with the loss of quantisation added. All processes must call this.
    """
    assert recipe.grid is not None
    weights = [layer.weight.contiguous() for layer in layers]
    with measured(weights[0].device) as used:
        tasks = [LayerTask(each, recipe, progress=progress, is_pruned=True) for each in weights]
        solutions = prune_together(tasks, inputs, processes=processes)
    results, parts = [], _parts(used, weights)
    for layer, earlier, solution, part in zip(layers, pruned, solutions, parts, strict=True):
        layer.write_(solution.weight)
        row = earlier.row.on_grid(solution.loss, recipe.grid.bits, part["seconds"])
        results.append(_result(row, recipe, solution.grid_parameters))
    return results


def quantise_head(
    layer: Layer,
    calibrated: Calibrated,
    recipe: Recipe,
    progress: Callable[[str], None] = lambda _: None,
    processes: Processes = ALONE,
) -> LayerResult:
    """Quantise the output head in place.

    A vocabulary has so many rows that float32 copies of all of them would take more memory than any
    layer of a block. Rows of a quantisation are independent, so some are solved at a time; the
    weight is written in one copy at the end.
    """
    weight, inputs = layer.weight, calibrated.inputs
    quantised, columns = torch.empty_like(weight), weight.shape[1]
    losses, energies, parts = list[float](), list[float](), list[GridParameters]()
    with measured(weight.device) as used:
        # All parts use one Hessian, which is factorised once and stays in `inputs`. Losses and
        # energies are sums over rows, and so add up over the parts.
        for first, end in split_range(0, len(weight), max(1, ELEMENTS // columns)):
            rows = weight[first:end]
            solution = prune(rows, inputs, recipe, progress, processes=processes)
            assert solution.grid_parameters is not None
            quantised[first:end] = solution.weight
            parts.append(solution.grid_parameters)
            losses.append(solution.loss)
            energies.append(output_energy(rows, inputs.hessian))
    layer.write_(quantised)
    row = LayerReport.of(
        replace(solution, loss=math.fsum(losses)),
        recipe,
        name=layer.name,
        shape=weight.shape,
        energy=math.fsum(energies),
        tokens=calibrated.tokens,
        own_target=calibrated.own_target,
        **used,
    )
    return _result(row, recipe, GridParameters.concatenated(parts))


def _fraction(selected: Tensor) -> float:
    """Return the fraction of a bool tensor that is True."""
    return int(selected.sum()) / max(1, selected.numel())


@contextmanager
def measured(device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield a dict that gets `seconds` and, on a GPU, `peak_memory` (bytes) of the context.

    Both are set when the context ends without an error. The GPU's peak is reset at its start.
    """
    used: dict[str, Any] = {}
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    yield used
    if cuda:
        # Kernels only queue: without this the time of a layer would count for the next one.
        torch.cuda.synchronize(device)
        used["peak_memory"] = torch.cuda.max_memory_allocated(device)
    used["seconds"] = time.perf_counter() - start
