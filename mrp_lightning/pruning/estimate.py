"""Estimate the time and the memory of a pruning by a count of its products, before it starts.

Two speeds are measured on the machine. The counts are those of lab/results/whole-run.md and
docs/large.md.
"""

import time
from dataclasses import dataclass

import torch
from torch import nn

from mrp_lightning.pruning.job import Settings
from mrp_lightning.targets.layers import Layer
from mrp_lightning.targets.plan import Plan

_PASSES = 2  # through a block: for its Hessians, and once it is pruned for the next block
_DENSE_PASSES = 2  # those of the dense stream
_BACKWARD = 3  # passes that one step of tuning takes, forward and backward
_SOLVER = {"none": 0.5, "S": 2.0, "M": 50.0}
"""The number of products (rows, columns)·(columns, columns) of each compensation.

With these numbers, and those below, estimates were within a factor of 1.5 of the measured times on
a CPU, for layers of 256 to 1536 columns. `none` has the product of the loss alone.
"""
_JOINT = 90.0  # of the joint mask
_GRID = 20.0  # of the scales, the sweep and the descent on a grid
_INVERSE = 3.0  # (columns, columns)·(columns, columns), of factorising and inverting a Hessian
_PER_WEIGHT, _PER_SQUARE = 17.5, 9.1  # float32 numbers that the solver holds
_BUFFERS = 2**26
"""The bytes of buffers of products and of files, which are neither in the solver nor hidden states.

With them, estimates were within a factor of 1.5 of the growth of a process on a CPU during the
pruning, without that of tokenizing, for layers of 256 to 1536 columns, SM and the recipe `best`.
"""


@dataclass(frozen=True)
class Estimate:
    """A rough cost. Of a pruning, only matrix products are counted."""

    seconds: float  # of calibration and solution, without reading and writing files
    num_bytes: int  # in addition to the model and the libraries

    def after(self, earlier: "Estimate") -> "Estimate":
        """Return the cost of both, where this begins once the memory of `earlier` is free."""
        return Estimate(self.seconds + earlier.seconds, max(self.num_bytes, earlier.num_bytes))


def estimate(
    model: nn.Module,
    plan: Plan,
    settings: Settings,
    *,
    windows: int,
    length: int,
    tokens_per_second: float,
    products_per_second: float,
) -> Estimate:
    """Estimate a pruning on `windows` calibration windows of `length` tokens.

    Args:
        model: The model, with its weights or without.
        plan: Its blocks and layers.
        settings: How it is pruned.
        windows: The number of calibration windows.
        length: The number of tokens of each.
        tokens_per_second: The speed of the model's forward.
        products_per_second: The multiply-adds of float32 matrices a second.
    """
    layers = [layer for block in plan.layers.values() for layer in block] + plan.outside
    tokens, weights = windows * length, sum(p.numel() for p in model.parameters() if p.ndim > 1)
    forward = tokens / tokens_per_second / weights  # seconds a weight, all tokens once
    aims_at_dense = settings.target == "dense" or bool(settings.tuning)
    passes = float(_PASSES + _DENSE_PASSES * aims_at_dense)
    if settings.block_tuning:
        passes += _BACKWARD * settings.block_tuning.epochs
    inputs = {_input(layer): _columns(layer) for layer in layers}
    seconds = forward * passes * sum(layer.weight.numel() for layer in layers)
    seconds += forward * sum(columns**2 for columns in inputs.values())  # for the Hessians
    method = settings.recipe.method
    each = _SOLVER[method.compensation.name] + _JOINT * (method.mask.name == "J")
    each += _GRID * (settings.recipe.grid is not None)
    products = each * sum(layer.weight.numel() * _columns(layer) for layer in layers)
    products += _INVERSE * sum(columns**3 for columns in inputs.values())
    seconds += products / products_per_second
    size = next(model.parameters()).element_size()
    states = tokens * _columns(layers[0]) * size * (1 + aims_at_dense)  # the hidden states
    solver = max(
        4 * (_PER_WEIGHT * layer.weight.numel() + _PER_SQUARE * _columns(layer) ** 2)
        for layer in layers
    )
    return Estimate(seconds, round(states + solver) + _BUFFERS)


def products_per_second(device: torch.device, size: int | None = None) -> float:
    """Measure the multiply-adds of float32 matrices a second, in about a tenth of a second.

    A GPU takes a large product, of 0.8 GB: 1024² on it would measure the launch.
    """
    if size is None:
        size = 8192 if device.type == "cuda" else 1024
    a = torch.rand(size, size, device=device)
    (a @ a).sum().item()
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < 0.1:
        (a @ a).sum().item()  # waits for a device that works by itself
        count += 1
    return count * size**3 / (time.perf_counter() - start)


def _columns(layer: Layer) -> int:
    return layer.weight.shape[1]


def _input(layer: Layer) -> tuple[str, int]:
    """Return a key of the layer's input: layers of one parent and width share it (q, k and v)."""
    return layer.name.rpartition(".")[0], _columns(layer)
