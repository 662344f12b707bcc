"""Pruning one layer of a model: solve, measure, write."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mrp_lightning.pruning.report import LayerReport
from mrp_lightning.solver.damping import DampedHessian
from mrp_lightning.solver.methods import Method
from mrp_lightning.solver.patterns import SemiStructured, Unstructured
from mrp_lightning.solver.pruning import prune
from mrp_lightning.targets.layers import Layer

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How layers are pruned.

    Attributes:
        pattern: What to.
        method: Mask and compensation.
        block_size: Columns at a time, `None` for all.
        damping: Fraction of the mean of the Hessian's diagonal that is added to it.
        tolerance: Relative distance to the optimum at which the exact compensation stops.
        true_sequential: Whether layers of one block see the pruned layers before them.
    """

    pattern: Unstructured | SemiStructured
    method: Method
    block_size: int | None = 128
    damping: float = 0.01
    tolerance: float = 1e-6
    true_sequential: bool = False


def prune_layer(
    layer: Layer,
    prepared: DampedHessian,
    recipe: Recipe,
    tokens: int,
    shared: float | None = None,
) -> LayerReport:
    """Prune a layer in place, in one copy at the end.

    Args:
        layer: The layer.
        prepared: The damped Hessian of its inputs.
        recipe: How it is pruned.
        tokens: How many inputs the Hessian was summed over.
        shared: The part of the Hessian that is that of all experts.

    Returns:
        What was done.

    Raises:
        HessianError: The Hessian is unusable.
    """
    weight = layer.weight.contiguous()  # a copy of Conv1D's, whose rows are strided
    already = recipe.pattern.holds(weight == 0)
    if already:
        log.info("%s already has the pattern %s", layer.name, recipe.pattern)
    with _measure(weight.device) as used:
        solution = prune(
            weight,
            prepared,
            recipe.pattern,
            recipe.method,
            block_size=recipe.block_size,
            tolerance=recipe.tolerance,
        )
    energy = _energy(weight, prepared.hessian)
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
        tokens=tokens,
        dead_inputs=solution.dead_inputs,
        already_pruned=already,
        shared_hessian=shared,
        raised_damping=prepared.ratio_used if prepared.ratio_used > recipe.damping else None,
        **used,
    )


def _energy(weight: Tensor, hessian: Tensor) -> float:
    """½·tr(W H Wᵀ), the mean over tokens of ‖Wx‖²."""
    dense = weight.to(hessian.dtype)
    return 0.5 * float(((dense @ hessian) * dense).sum())


@contextmanager
def _measure(device: torch.device) -> Iterator[dict[str, Any]]:
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
