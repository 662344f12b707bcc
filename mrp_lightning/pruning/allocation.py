"""Allocate a sparsity to each block, with the requested total, by trial prunings of each alone."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mrp_lightning.calibration.padding import Padding
from mrp_lightning.calibration.walks import Walk
from mrp_lightning.errors import TargetError
from mrp_lightning.pruning.block import LayerSolver, WalkedBlock
from mrp_lightning.pruning.job import Job
from mrp_lightning.solver.patterns import Unstructured
from mrp_lightning.targets.layers import Layer

TOKENS = 4096
"""The number of output rows that are compared, or all if there are fewer."""
_CHUNK = 128  # rows that are compared at a time, in float32


class _OutputChange:
    """Compares the output of a model, row by row, with that of the dense model.

    If rows are logits over the vocabulary of a transformers language model, the change of a row is
    the divergence KL(p_d ‖ p) of its distributions, in nats. For any other output y it is ‖y −
    y_d‖² / ‖y_d‖².

    The first `TOKENS` rows without padding are compared, whatever the size of the batches. Each
    process compares its share. The dense model's output of these rows stays in memory.
    """

    def __init__(self, job: Job, walk: Walk, padding: Padding) -> None:
        self._walk, self._padding, self._processes = walk, padding, job.processes
        self._vocabularies = _vocabularies(job.model)
        self._dense: list[Tensor] = []
        # The shares are of one size, rounded up, so that no process waits for the counts of others,
        # and at least `TOKENS` rows are compared in all if every process has its share of them.
        missing = math.ceil(TOKENS / job.processes.size)
        while missing > 0 and len(self._dense) < len(walk.batches):
            # A clone, since a slice would keep the logits of the whole batch in memory.
            self._dense.append(self._rows(0, len(self._dense))[:missing].clone())
            missing -= len(self._dense[-1])

    def of(self, k: int) -> float:
        """Return the mean change, over all processes' rows, if the model runs from block k."""
        total = 0.0
        for i, dense in enumerate(self._dense):
            change = _divergence if dense.shape[1] in self._vocabularies else _relative_error
            rows = self._rows(k, i)[: len(dense)].split(_CHUNK)
            for now, expected in zip(rows, dense.split(_CHUNK), strict=True):
                total += float(change(now.float(), expected.float()).sum())
        # Sums and counts are added apart, in one order in all processes: a mean of means would
        # weigh processes with few rows too much, and all of them have to allocate by the same bits.
        totals = self._processes.numbers(total, sum(map(len, self._dense)))
        changes, count = map(math.fsum, zip(*totals, strict=True))
        return changes / count

    def _rows(self, k: int, i: int) -> Tensor:
        """Return the rows (tokens, columns) of the model's output for batch i."""
        returned = self._walk.finish(k, i)
        output = _first_output(returned)
        if output is None:
            raise TargetError(
                "`allocation: output` compares what `predict_step` returns, with and without each "
                "block pruned: expected a tensor of floating point numbers, or a mapping, tuple or "
                f"list that holds one; got {type(returned).__name__}. Let it return the logits, "
                "or leave `allocation` out."
            )
        is_token = self._padding.rows_of_output(output)
        rows = output.reshape(-1, output.shape[-1] if output.ndim else 1)
        return rows if is_token is None else rows[is_token]


def _first_output(returned: Any) -> Tensor | None:
    """Return the logits, else the first floating-point tensor, of an output; `None` without one."""
    if isinstance(returned, Tensor):
        return returned if returned.is_floating_point() else None
    if isinstance(returned, Mapping):
        logits = _first_output(returned.get("logits"))
        return _first_output(list(returned.values())) if logits is None else logits
    if isinstance(returned, Sequence) and not isinstance(returned, str):
        return next((x for x in map(_first_output, returned) if x is not None), None)
    return None


def _divergence(now: Tensor, dense: Tensor) -> Tensor:
    """Return KL(p ‖ q) of each row, as Σ p·(eᵘ − 1 − u) with u = ln q − ln p.

    p and q are the softmax of the logits `dense` and `now`, (rows, vocabulary). The sum is
    Σ p·ln(p/q), since Σ p·eᵘ = Σ p = 1, but no term is negative: in Σ p·ln(p/q) the terms cancel,
    and the float32 rounding of the logarithms is 1e-3 of a divergence of 1e-5.
    """
    log_p, log_q = dense.log_softmax(1), now.log_softmax(1)
    p, q, u = log_p.exp(), log_q.exp(), log_q - log_p
    # For large u, q − p stands for p·(eᵘ − 1), which may overflow. Logits of -inf, which models use
    # to exclude tokens, make u infinite or nan, and 0 · u would be nan.
    far = q - p - torch.where(p > 0, p * u, 0.0)
    return torch.where(u.abs() < 1, p * (u.expm1() - u), far).sum(1)


def _relative_error(now: Tensor, dense: Tensor) -> Tensor:
    # A row of zeros has no energy to divide by; all others have far more than this bound.
    energy = dense.square().sum(1).clamp_min(torch.finfo(dense.dtype).tiny)
    return (now - dense).square().sum(1) / energy


def _vocabularies(model: nn.Module) -> set[int]:
    """Return the sizes of the vocabularies of the language models in a module."""
    getters = (getattr(module, "get_output_embeddings", None) for module in model.modules())
    heads = [get() for get in getters if callable(get)]
    return {len(head.weight) for head in heads if hasattr(head, "weight")}


@dataclass(frozen=True)
class Change:
    """The effect of pruning one block alone: the mean change of the model's output."""

    of_output: float
    layers: list[Layer]  # the block's layers that are called, and so will be pruned


class OutputStudy:
    """Prunes each block of the dense model alone, and compares the model's output.

    Args:
        job: The job, whose model is dense.
        walk: A walk over the model, at its start.
        padding: Separates tokens from padding.

    Raises:
        TargetError: The model returns no floating-point tensor, or NaN or Inf.
    """

    def __init__(self, job: Job, walk: Walk, padding: Padding) -> None:
        self._output = _OutputChange(job, walk, padding)
        self._recipe = job.settings.recipe
        self._changes: dict[str, Change] = {}

    def visit(self, block: WalkedBlock) -> None:
        """Measure the change by the pruning of a block, and restore the block's weights."""
        name = block.name or ""
        # The output is computed before the weights are restored: all other blocks are dense then,
        # so that the change is that of this block alone, which the model of `allocate` assumes.
        with _put_back(block.layers):
            results = LayerSolver(self._recipe).prune(block)
            pruned = {result.name for result in results if result.is_pruned}
            block.report_progress(f"{name}, the model's output")
            change = self._output.of(block.k) if pruned else 0.0
        if not math.isfinite(change):
            raise TargetError(
                f"`allocation: output`: with {name} pruned the output differs by {change}. "
                "Expected a finite number: load the model in bfloat16 or float32, or leave "
                "`allocation` out."
            )
        if pruned:  # a block of which no layer is called takes no part
            self._changes[name] = Change(change, [x for x in block.layers if x.name in pruned])

    def conclusions(self) -> dict[str, Tensor]:
        """Return the sparsities of blocks and layers, as `Sparsities.of` reads them."""
        if not self._changes:
            return {}
        blocks = allocate(self._recipe.pattern.sparsity, self._changes)
        return Sparsities(blocks, patterns_of_layers(blocks, self._changes)).tensors()


@contextmanager
def _put_back(layers: Sequence[Layer]) -> Iterator[None]:
    """Restore the weights of layers at the end of this context, also after an error."""
    weights = [layer.weight.clone() for layer in layers]
    try:
        yield
    finally:
        for layer, weight in zip(layers, weights, strict=True):
            layer.write_(weight)


_SPREAD = 0.15
"""The largest difference of a block's sparsity from the mean."""
_STEEPNESS = 7.0
"""The growth of the logarithm of a block's change with its sparsity, κ, by measurement."""
STEP = 0.2
"""The step to which these logarithms are rounded. Another CPU, batch size or number of processes
sums in another order, which decides between weights of nearly equal scores, and so changes a
block's measurement by up to 3e-4 of it in float32, or 6e-3 in bfloat16. After rounding, the
sparsities are equal, unless a logarithm is that near to the middle of two steps: then its block's
sparsity moves by STEP / _STEEPNESS. No step excludes that; a coarse one makes it rare, and costs
the embedded model at most 0.014 of perplexity.
"""


_OF_BLOCK, _OF_LAYER = "sparsity of block ", "sparsity of layer "


@dataclass(frozen=True)
class Sparsities:
    """The sparsities of blocks and the patterns of layers, by name, where they are allocated."""

    blocks: Mapping[str, float] = field(default_factory=dict)
    layers: Mapping[str, Unstructured] = field(default_factory=dict)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "Sparsities":
        """Read the sparsities from the result of `tensors`; tensors of other names are ignored."""
        layers = _numbers(tensors, _OF_LAYER)
        patterns = {name: Unstructured(sparsity) for name, sparsity in layers.items()}
        return cls(_numbers(tensors, _OF_BLOCK), patterns)

    def tensors(self) -> dict[str, Tensor]:
        """Return the sparsities in float64, which holds every bit of them."""
        layers = {name: pattern.sparsity for name, pattern in self.layers.items()}
        named = [(_OF_BLOCK, self.blocks), (_OF_LAYER, layers)]
        return {
            prefix + name: torch.tensor(sparsity, dtype=torch.float64)
            for prefix, sparsities in named
            for name, sparsity in sparsities.items()
        }


def _numbers(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, float]:
    return {
        name.removeprefix(prefix): float(tensor)
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def allocate(sparsity: float, changes: Mapping[str, Change]) -> dict[str, float]:
    """Return sparsities of blocks, by name, whose mean over all weights is `sparsity`, s.

    Model: if pruning block b alone to s changes the output by E_b, pruning it to s_b changes it by
    E_b·exp(κ(s_b − s)), with κ = `_STEEPNESS`, and changes add up. For blocks of one size, the sum
    is least where all summands are equal: s_b = s + (μ − ln E_b)/κ. The distance of s_b from s is
    at most `_SPREAD`, s/2 and (1 − s)/2, and μ sets the mean. ln E_b is rounded to a multiple of
    `STEP`, so that the rounding of float sums moves no sparsity.
    """
    # A change of 0 has no logarithm. 1e-30 is so low that its block gets the highest sparsity
    # within `reach`, unless all blocks are as low.
    logs = {
        name: STEP * round(math.log(max(change.of_output, 1e-30)) / STEP)
        for name, change in changes.items()
    }
    sizes = {name: sum(map(_size, change.layers)) for name, change in changes.items()}
    reach = min(_SPREAD, sparsity / 2, (1 - sparsity) / 2)

    def spread(level: float) -> dict[str, float]:
        return {
            name: min(max((level - log) / _STEEPNESS, -reach), reach) for name, log in logs.items()
        }

    # The total is monotonic in μ, so that bisection finds μ to the last bit.
    # At the ends all shifts are clipped, to −reach and to reach, so that the total changes its sign
    # between them. The upper end keeps a total ≥ 0.
    low, high = min(logs.values()) - _STEEPNESS, max(logs.values()) + _STEEPNESS
    for _ in range(100):
        level = (low + high) / 2
        total = math.fsum(shift * sizes[name] for name, shift in spread(level).items())
        low, high = (level, high) if total < 0 else (low, level)
    return {name: sparsity + shift for name, shift in spread(high).items()}


def patterns_of_layers(
    sparsities: Mapping[str, float], changes: Mapping[str, Change]
) -> dict[str, Unstructured]:
    """Return the pattern of each layer, by name, from the sparsities of the blocks.

    The number of weights to remove is rounded cumulatively: the layers up to any one remove their
    exact total, within one half.
    """
    patterns: dict[str, Unstructured] = {}
    total, removed = 0.0, 0
    for name, sparsity in sparsities.items():
        for layer in changes[name].layers:
            total += sparsity * _size(layer)
            # At least one weight goes and one stays, since a sparsity lies in (0, 1). A later layer
            # makes up for it: the difference is that of the totals so far, not of this layer.
            count = min(max(math.floor(total + 0.5) - removed, 1), _size(layer) - 1)
            removed += count
            patterns[layer.name] = Unstructured(count / _size(layer))
    return patterns


def _size(layer: Layer) -> int:
    return layer.weight.numel()
