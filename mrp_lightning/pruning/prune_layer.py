"""Prune one layer of a model: solve, measure, write."""

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mrp_lightning.processes import ALONE, Processes
from mrp_lightning.records.report import LayerReport
from mrp_lightning.solver.hessian import InputHessian
from mrp_lightning.solver.problem import dense_target, output_energy
from mrp_lightning.solver.pruning import prune
from mrp_lightning.solver.quantisation import put_on_grid
from mrp_lightning.solver.recipe import Recipe
from mrp_lightning.targets.layers import Layer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Aim:
    """The outputs that a layer aims at, in a run whose target is the dense model."""

    target_weight: float  # α, above 0 and at most 1
    shift: Tensor | None = None  # of `InputShift`; None if the layer aims at its own outputs
    own: str | None = None  # why it does, for the report

    def target(self, weight: Tensor, inputs: InputHessian, recipe: Recipe) -> Tensor | None:
        """Return the weight to aim at, `None` for the layer's own."""
        if self.shift is None:
            return None
        return dense_target(weight, self.shift, inputs.damped(recipe.damping), self.target_weight)


@dataclass(frozen=True, eq=False)
class Calibrated:
    """The calibration statistics of an input that some layers share."""

    inputs: InputHessian
    tokens: int  # summed up in the Hessian
    shared: float | None = None  # of an expert: the fraction that is all experts' Hessian
    aim: Aim | None = None  # None without `target: dense`


def prune_layer(
    layer: Layer,
    calibrated: Calibrated,
    recipe: Recipe,
    progress: Callable[[str], None] = lambda _: None,
    processes: Processes = ALONE,
) -> LayerReport:
    """Prune a layer in place, and return its row of the report.

    The weight is written in one copy at the end. All processes, which share the rows, call this.
    `progress` is called with the state of a long solution, in words.

    Raises:
        HessianError: The Hessian is unusable.
    """
    inputs, aim = calibrated.inputs, calibrated.aim
    weight = layer.weight.contiguous()  # a copy of Conv1D's, whose rows are strided
    zeros = weight == 0
    already = recipe.pattern.sparsity > 0 and recipe.pattern.holds(zeros)
    if already:
        log.info("%s already has the pattern %s", layer.name, recipe.pattern)
    share = weight[processes.share(len(weight))]
    with measured(weight.device) as used:
        target = None if aim is None else aim.target(share, inputs, recipe)
        solution = prune(weight, inputs, recipe, progress, target=target, processes=processes)
    # The loss is relative to the energy of the layer's outputs, ½·tr(W H Wᵀ), of all rows.
    energies = processes.numbers(output_energy(share, inputs.hessian))
    energy = math.fsum(number for (number,) in energies)
    layer.write_(solution.weight)
    zeros_before = _fraction(zeros)
    return LayerReport(
        name=layer.name,
        shape=tuple(weight.shape),
        method=recipe.method.name,
        sparsity=float(solution.pruned.float().mean()),
        loss=solution.loss,
        relative_loss=solution.loss / energy if energy else 0.0,
        damping=solution.damping_used,
        iterations=solution.iterations,
        gap=solution.gap,
        tokens=calibrated.tokens,
        dead_inputs=solution.dead_inputs,
        already_pruned=already,
        zeros_before=zeros_before or None,
        zeros=_fraction((solution.weight == 0) & (solution.pruned | zeros))
        if zeros_before
        else None,
        shared_hessian=calibrated.shared,
        raised_damping=(
            solution.damping_ratio if solution.damping_ratio > recipe.damping else None
        ),
        target_loss=solution.target_loss,
        own_target=None if aim is None else aim.own,
        fallback_mask=solution.fallback_mask,
        bits=None if recipe.grid is None else recipe.grid.bits,
        zeros_loss=solution.zeros_loss,
        grid_loss=solution.grid_loss,
        **used,
    )


def put_layer_on_grid(
    layer: Layer,
    inputs: InputHessian,
    recipe: Recipe,
    row: LayerReport,
    progress: Callable[[str], None] = lambda _: None,
    processes: Processes = ALONE,
) -> LayerReport:
    """Put the weight of a pruned and tuned layer on the recipe's grid in place.

    Takes the Hessian with which the layer was pruned, and its `row`; returns the row with the loss
    of the grid added.
    """
    assert recipe.grid is not None
    assert row.loss is not None
    weight = layer.weight.contiguous()
    with measured(weight.device) as used:
        quantised, lost = put_on_grid(weight, inputs, recipe, progress, processes=processes)
    layer.write_(quantised)
    whole = row.loss + lost
    relative = (row.relative_loss or 0.0) * (whole / row.loss if row.loss else 1.0)
    return replace(
        row,
        loss=whole,
        relative_loss=relative,
        seconds=(row.seconds or 0.0) + used["seconds"],
        bits=recipe.grid.bits,
        target_loss=None if row.target_loss is None else row.target_loss + lost,
        zeros_loss=row.loss,
        grid_loss=lost,
    )


def _fraction(chosen: Tensor) -> float:
    """Return the fraction of a bool tensor that is True."""
    return int(chosen.sum()) / max(1, chosen.numel())


@contextmanager
def measured(device: torch.device) -> Iterator[dict[str, Any]]:
    """Measure the seconds, and the peak of GPU memory, of the block of code."""
    used: dict[str, Any] = {}
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    yield used
    if cuda:
        torch.cuda.synchronize(device)
        used["peak_memory"] = torch.cuda.max_memory_allocated(device)
    used["seconds"] = time.perf_counter() - start
