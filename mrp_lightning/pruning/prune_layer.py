"""Pruning one layer of a model: solve, measure, write."""

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
    """The outputs that a layer aims at, in a run whose target is the dense model.

    Attributes:
        target_weight: α, above 0 and at most 1.
        shift: How far the layer's inputs are from those of the dense model; `None` where these are
            not known, and the layer aims at its own outputs.
        own: Why it does.
    """

    target_weight: float
    shift: Tensor | None = None
    own: str | None = None

    def target(self, weight: Tensor, inputs: InputHessian, recipe: Recipe) -> Tensor | None:
        """The weight to aim at, `None` for the layer's own."""
        if self.shift is None:
            return None
        return dense_target(weight, self.shift, inputs.damped(recipe.damping), self.target_weight)


@dataclass(frozen=True, eq=False)
class Calibrated:
    """The statistics of an input that some layers share, as calibration found them.

    Attributes:
        inputs: The Hessian of the input.
        tokens: The number of inputs that it was summed over.
        shared: The part of it, from 0 to 1, that is that of all experts; `None` for other layers.
        aim: What is aimed at in place of the layer's own outputs, where that is asked for.
    """

    inputs: InputHessian
    tokens: int
    shared: float | None = None
    aim: Aim | None = None


def prune_layer(
    layer: Layer,
    calibrated: Calibrated,
    recipe: Recipe,
    progress: Callable[[str], None] = lambda _: None,
    processes: Processes = ALONE,
) -> LayerReport:
    """Prune a layer in place, in one copy at the end, and say what was done.

    Args:
        layer: The layer.
        calibrated: The Hessian of its inputs, and its target.
        recipe: How it is pruned.
        progress: Called with where the solution is, in words.
        processes: The processes that share the rows; all of them prune the layer.

    Raises:
        HessianError: The Hessian is unusable.
    """
    inputs, aim = calibrated.inputs, calibrated.aim
    weight = layer.weight.contiguous()  # a copy of Conv1D's, whose rows are strided
    zeros = weight == 0
    already = recipe.pattern.sparsity > 0 and recipe.pattern.holds(zeros)
    if already:
        log.info("%s already has the pattern %s", layer.name, recipe.pattern)
    mine = weight[processes.share(len(weight))]
    with measured(weight.device) as used:
        target = None if aim is None else aim.target(mine, inputs, recipe)
        solution = prune(weight, inputs, recipe, progress, target=target, processes=processes)
    energies = processes.numbers(output_energy(mine, inputs.hessian))
    energy = math.fsum(found for (found,) in energies)
    layer.write_(solution.weight)
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
        zeros_before=int(zeros.sum()) / max(1, zeros.numel()) or None,
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
    """Put the weight of a layer, which was pruned and tuned, on the recipe's grid in place.

    Args:
        layer: The layer.
        inputs: The Hessian of its inputs, as when it was pruned.
        recipe: How it is pruned, with a grid.
        row: What was said of it when it was pruned.
        progress: Called with where the solution is, in words.
        processes: The processes that share the rows; all of them do this.

    Returns:
        The row, with what the grid loses.
    """
    assert recipe.grid is not None
    assert row.loss is not None
    weight = layer.weight.contiguous()
    with measured(weight.device) as used:
        found, lost = put_on_grid(weight, inputs, recipe, progress, processes=processes)
    layer.write_(found)
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


@contextmanager
def measured(device: torch.device) -> Iterator[dict[str, Any]]:
    """Seconds, and the peak of GPU memory, of the block of code."""
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
