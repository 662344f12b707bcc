"""Estimate the time and the memory of a pruning before it starts, by counting matrix products.

Two speeds are measured on the machine. lab/results/whole-run.md and docs/large.md explain the
counts.
"""

import time
from dataclasses import dataclass

import torch
from torch import nn

from mrp_lightning.narrowing.blocks import ShorteningPlan
from mrp_lightning.pruning.output_change import TOKENS
from mrp_lightning.pruning.settings import Settings
from mrp_lightning.pruning.shortening import HELD_OUT
from mrp_lightning.solver.arithmetic import ELEMENTS
from mrp_lightning.targets.layers import Layer
from mrp_lightning.targets.plan import Plan

_PASSES = 2  # forwards of a block: for its Hessians, and for the next block
_DENSE_PASSES = 2  # forwards of the dense stream
_BACKWARD = 3  # forwards that a forward and backward of tuning cost
_SOLVER = {"none": 0.5, "S": 2.0, "M": 50.0}
"""The number of products (rows, columns)·(columns, columns) of each compensation; `none` has only
that of the loss. With these numbers, and those below, estimates were within a factor of 1.5 of
measured times on a CPU, for layers of 256 to 1536 columns.
"""
_JOINT = 90.0  # products of the joint mask
_GRID = 20.0  # products of scales, sweep and descent on a grid
_INVERSE = 3.0  # (columns, columns)·(columns, columns), to factorise and invert a Hessian
_PER_WEIGHT, _PER_SQUARE = 17.5, 9.1  # float32 numbers in the solver's memory
_BUFFERS = 2**26
"""The bytes of buffers of products and files, besides the solver's memory and hidden states. With
them, estimates were within a factor of 1.5 of the growth of a process on a CPU during the pruning
(not the tokenizing), for layers of 256 to 1536 columns, SM and the recipe `best`.
"""


@dataclass(frozen=True)
class Estimate:
    """A rough cost. For a pruning, only matrix products are counted."""

    seconds: float  # of calibration and solution, without reading and writing files
    num_bytes: int  # in addition to the model and the libraries

    def after(self, earlier: "Estimate") -> "Estimate":
        """Return the cost of `earlier` and then this, which begins when its memory is free."""
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

    The model may be without its weights. The speeds are those of its forward, and of float32 matrix
    products in multiply-adds a second.
    """
    head = [] if plan.head is None else [plan.head]
    if isinstance(plan, ShorteningPlan):
        return _of_blocks(model, plan, windows, length, tokens_per_second)
    layers = [layer for block in plan.layers.values() for layer in block] + plan.outside
    tokens, weights = windows * length, sum(p.numel() for p in model.parameters() if p.ndim > 1)
    # A forward takes one multiply-add for each weight and token, so that its time is shared out by
    # the number of weights.
    forward = tokens / tokens_per_second / weights  # seconds per weight, for all tokens
    aims_at_dense = settings.target == "dense" or bool(settings.tuning)
    passes = float(_PASSES + _DENSE_PASSES * aims_at_dense)
    if settings.balance:
        passes += _PASSES
    if settings.block_tuning:
        passes += _BACKWARD * settings.block_tuning.epochs
    # By input, not by layer: q, k and v share a Hessian, its sum and its inverse.
    inputs = {_input(layer): layer.columns for layer in [*layers, *head]}
    seconds = forward * passes * sum(layer.weight.numel() for layer in layers)
    seconds += forward * weights * settings.recipe.is_of_head_alone
    times = 1 + settings.balance  # that Hessians are summed and factorised
    seconds += forward * times * sum(columns**2 for columns in inputs.values())
    method = settings.recipe.method
    each = _SOLVER[method.compensation.name] + _JOINT * (method.mask.name == "J")
    each += _GRID * (settings.recipe.grid is not None)
    products = each * sum(layer.weight.numel() * layer.columns for layer in layers)
    products += _GRID * sum(layer.weight.numel() * layer.columns for layer in head)
    products += _INVERSE * times * sum(columns**3 for columns in inputs.values())
    seconds += products / products_per_second
    size = next(model.parameters()).element_size()
    hidden_states = tokens * [*layers, *head][0].columns * size * (1 + aims_at_dense)
    # The rows of a head are solved in parts.
    solved = [(layer.weight.numel(), layer.columns) for layer in layers]
    solved += [(min(layer.weight.numel(), ELEMENTS), layer.columns) for layer in head]
    # Layers are solved one after another, so that the largest one decides; 4 bytes a float32.
    solver = max(4 * (_PER_WEIGHT * count + _PER_SQUARE * columns**2) for count, columns in solved)
    solver += sum(layer.weight.nbytes for layer in head)
    return Estimate(seconds, round(hidden_states + solver) + _BUFFERS)


def _of_blocks(
    model: nn.Module, plan: ShorteningPlan, windows: int, length: int, tokens_per_second: float
) -> Estimate:
    """Estimate a choice of blocks and its repair; see `shorten_model` for the forwards."""
    number, compared = len(plan.blocks), max(1, windows // HELD_OUT)
    rows = min(compared * length, TOKENS)
    forwards = number / 2
    if plan.count > 1:
        forwards += number / 2 + (plan.count - 1) * min(plan.count, number / 2)
    seconds = (rows * forwards + 2 * (windows - compared) * length) / tokens_per_second
    config = plan.model.config.get_text_config()
    size = next(model.parameters()).element_size()
    outputs = rows * getattr(config, "vocab_size", 0) * size
    return Estimate(seconds, 2 * windows * length * config.hidden_size * size + outputs + _BUFFERS)


def products_per_second(device: torch.device) -> float:
    """Measure the speed of float32 matrix products in multiply-adds a second; takes about 0.1 s.

    Factors are 1024², and on a GPU 8192², 0.8 GB with the product, since there a product of 1024²
    would measure the launch.
    """
    size = 8192 if device.type == "cuda" else 1024
    a = torch.rand(size, size, device=device)
    (a @ a).sum().item()
    # The product above is not timed: the first one also pays for the start of the library.
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < 0.1:
        (a @ a).sum().item()  # synchronises with the device
        count += 1
    return count * size**3 / (time.perf_counter() - start)


def _input(layer: Layer) -> tuple[str, int]:
    """Return a key of a layer's input, its parent and width: q, k, v share it, and o if as wide."""
    return layer.name.rpartition(".")[0], layer.columns
