"""An estimate of the time and the memory that a pruning takes, by a count of its products.

It is made before the pruning, from two speeds that were measured on the machine. The counts are
those of docs/benchmarks/whole-run.md and docs/streaming.md.
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
"""Products (rows, columns)·(columns, columns) of each compensation; for `none`, the loss alone.

With those of M, of the joint mask and of the grid, estimates were within a factor of 1.5 of what
was measured on a CPU, of layers of 256 to 1536 columns.
"""
_JOINT = 90.0  # those of the joint mask
_GRID = 20.0  # those of the scales, the sweep and the descent on a grid
_INVERSE = 3.0  # (columns, columns)·(columns, columns), of factorising and inverting a Hessian
_PER_WEIGHT, _PER_SQUARE = 17.5, 9.1  # float32 numbers that the solver holds
_BESIDES = 2**26
"""Bytes of all that is neither in the solver nor a hidden state: buffers of products and of files.

With them, estimates were within a factor of 1.5 of the growth of a process on a CPU, from the
estimate to the end of the pruning but for what tokenizing took in between: of layers of 256 to 1536
columns, by SM and by the recipe `best`.
"""


@dataclass(frozen=True)
class Estimate:
    """What work may take, roughly: of a pruning, what is no product of matrices is not counted.

    Attributes:
        seconds: The time of calibrating and solving; reading and writing files is not in it.
        num_bytes: The memory beside the model and the libraries.
    """

    seconds: float
    num_bytes: int

    def after(self, earlier: "Estimate") -> "Estimate":
        """This work and what is done before it, whose memory is free again by then."""
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
    """Estimate a pruning.

    Args:
        model: The model, with its weights or without.
        plan: The blocks and layers of it.
        settings: How it is pruned.
        windows: The number of calibration windows.
        length: The tokens of each.
        tokens_per_second: The speed of the model's forward.
        products_per_second: The multiplications of float32 matrices a second, each with its sum.
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
    return Estimate(seconds, round(states + solver) + _BESIDES)


def products_per_second(device: torch.device, size: int = 1024) -> float:
    """The speed of products of float32 matrices, measured in about a tenth of a second."""
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
    """Layers of one parent and as many columns read one input, as a rule: q, k and v."""
    return layer.name.rpartition(".")[0], _columns(layer)
