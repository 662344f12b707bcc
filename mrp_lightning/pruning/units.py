"""Remove whole neurons, heads or experts of a block.

Neurons and heads are columns of the layers that read them. Experts are chosen by measured losses:
for a token with outputs O_e of the experts e and weights w_e of the router, the output is
y = Σ w_e O_e. Without some experts the router gives weights v, and the loss is
‖Σ (v_e − w_e) O_e − s‖², where s is the shift towards the dense model's output. With G = OOᵀ and
b = Os this is (v − w)ᵀG(v − w) − 2(v − w)ᵀb + ‖s‖², so that the loss of a set needs no forward of
the experts.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mrp_lightning.calibration.walks import hidden_input
from mrp_lightning.errors import TargetError
from mrp_lightning.narrowing.routing import Call, Routing
from mrp_lightning.narrowing.structure import Structure
from mrp_lightning.pruning.block import Remover, WalkedBlock, calibrated_inputs
from mrp_lightning.pruning.prune_layers import Calibrated, measured
from mrp_lightning.records.block_result import LayerResult
from mrp_lightning.records.rows import LayerReport
from mrp_lightning.solver.columns import ColumnSolution, remove_columns
from mrp_lightning.solver.problem import TARGET_WEIGHT, Quality, output_energy
from mrp_lightning.solver.recipe import Recipe
from mrp_lightning.targets.layers import Layer

_MOST_BYTES = 2**30
"""The most bytes of a block's stored tokens; of more tokens, every n-th is stored."""

_AT_ONCE = 2**24
"""The number of elements of all experts' outputs that are computed at a time."""

_TOLERANCE = 1e-3
"""The largest relative difference of a router's weights in the model and on stored tokens."""

Measure = Callable[[Sequence[tuple[int, ...]]], Sequence[float]]
"""A function that returns the losses of sets of units."""


class UnitRemover(Remover):
    """Set the columns of whole neurons or heads to zero in the layers that read them.

    The layers of a block that read the units share the removed set, and so are solved as one matrix
    with their rows stacked. The recipe has no grid.
    """

    def __init__(self, structure: Structure, recipe: Recipe) -> None:
        self._structure, self._recipe = structure, recipe

    def prune(self, block: WalkedBlock) -> list[LayerResult]:
        """Remove units from all layers of the block that read them."""
        parts = self._structure.blocks.get(block.name or "")
        if parts is None:
            return []
        results: list[LayerResult] = []
        for layers, calibrated in calibrated_inputs(block, results):
            if len(layers) != len(parts.consumers):
                raise TargetError(
                    f"`structure: {self._structure.kind}`: "
                    f"{', '.join(x.name for x in parts.consumers)} read the same "
                    f"{self._structure.kind}, but not the same input."
                )
            block.report_progress(layers[0].name)
            weights = [layer.weight for layer in layers]
            with measured(weights[0].device) as used:
                solution = self._solved(block, weights, parts.group, calibrated)
            new = solution.weight.split([len(weight) for weight in weights])
            changes = zip(layers, weights, new, strict=True)
            rows = [self._row(*change, solution, calibrated, used) for change in changes]
            # Written last, when nothing can fail any more: after an error all are untouched.
            for layer, weight in zip(layers, new, strict=True):
                layer.write_(weight)
            results += block.published(map(LayerResult, rows))
        return results

    def _solved(
        self, block: WalkedBlock, weights: Sequence[Tensor], group: int, calibrated: Calibrated
    ) -> ColumnSolution:
        """Remove the same columns of several weights."""
        weight, recipe = torch.cat(list(weights)), self._recipe
        solution = remove_columns(
            weight,
            calibrated.inputs,
            recipe.method,
            recipe.damping,
            self._structure.count,
            group,
            calibrated.target(weight, recipe),
        )
        # All processes have the same sums, but different machines may round the solution
        # differently.
        like_first_ = block.job.processes.like_first_
        return replace(
            solution,
            weight=like_first_(solution.weight.contiguous()),
            removed=like_first_(solution.removed.contiguous()),
        )

    def _row(
        self,
        layer: Layer,
        dense: Tensor,
        new: Tensor,
        solution: ColumnSolution,
        calibrated: Calibrated,
        used: Mapping[str, Any],
    ) -> LayerReport:
        """Return the report's row of one stacked layer, with the loss of this layer's own rows."""
        # The loss of the stack is of all its rows; ½·tr(ΔHΔᵀ) of the rows of one layer is its part.
        # In float32, since Δ is small against both weights, and bfloat16 has 8 bits.
        wide = torch.promote_types(dense.dtype, torch.float32)
        change = new.to(wide) - dense.to(wide)
        hessian = calibrated.inputs.hessian
        return LayerReport.of(
            replace(solution, loss=output_energy(change, hessian)),
            self._recipe,
            name=layer.name,
            shape=dense.shape,
            energy=output_energy(dense, hessian),
            tokens=calibrated.tokens,
            sparsity=self._structure.count / self._structure.units,
            zeros_before=int((dense == 0).sum()) / dense.numel() or None,
            own_target=calibrated.own_target,
            **used,
        )


class ExpertRemover(Remover):
    """Set the matrices W₂ of whole experts to zero, which then add nothing to the output."""

    def __init__(self, structure: Structure) -> None:
        self._structure = structure

    def prune(self, block: WalkedBlock) -> list[LayerResult]:
        """Remove experts of the block.

        Raises:
            TargetError: Experts are zero already, they do not get all tokens in one call,
                tokens are not routed one by one, or all are padding.
        """
        if not block.layers:
            return []
        block.remember(block.layers)
        start, job = time.perf_counter(), block.job
        (layer,) = block.layers
        units, count = self._structure.units, self._structure.count
        routing = Routing(block.module, self._structure.blocks[block.name or ""], self._structure)
        routing.require_all()
        tokens = _Tokens(block, routing)
        tokens.read()
        block.report_progress(f"{layer.name}, which to remove")
        removed, loss = measured_set(tokens.losses, units, count)
        own_loss = loss if block.dense_target is None else tokens.own_loss(removed)
        # All numbers are of stored tokens, so that the order of loss, energy and write is free.
        energy = tokens.energy()
        with torch.no_grad():
            layer.view[:, removed] = 0
        target_loss = None if block.dense_target is None else loss
        row = LayerReport.of(
            Quality(loss=own_loss, target_loss=target_loss),
            job.settings.recipe,
            name=layer.name,
            shape=layer.weight.shape,
            energy=energy,
            tokens=tokens.count,
            sparsity=count / units,
            seconds=time.perf_counter() - start,
        )
        return block.published([LayerResult(row)])


@dataclass(frozen=True, eq=False)
class _Batch:
    """The stored statistics of some tokens, in the notation of this module."""

    inputs: Tensor  # of the module that holds router and experts, (…, tokens, features)
    weights: Tensor  # w, (tokens, experts)
    products: Tensor  # G, (tokens, experts, experts)
    aims: Tensor | None  # b, (tokens, experts); None if s is zero
    shift: float  # Σ ‖s‖²

    def loss(self, weights: Tensor) -> float:
        """Return the loss with other weights of the router, summed over the tokens."""
        change = weights - self.weights
        loss = self._energy(change)
        if self.aims is not None:
            loss -= 2 * float((change * self.aims).sum(dtype=torch.float64))
        return loss + self.shift

    def own_loss(self, weights: Tensor) -> float:
        """Return the loss against the block's own outputs (s = 0), summed over the tokens."""
        return self._energy(weights - self.weights)

    @property
    def energy(self) -> float:
        """Return ‖y‖², summed over the tokens."""
        return self._energy(self.weights)

    def _energy(self, change: Tensor) -> float:
        # Products are made in float32. The sum over all tokens is in float64, since losses of two
        # sets may differ by little of their size.
        through = torch.bmm(change[:, None], self.products)[:, 0]
        return float((through * change).sum(dtype=torch.float64))


class _Tokens:
    """The tokens of a block's experts in this process."""

    def __init__(self, block: WalkedBlock, routing: Routing) -> None:
        self._block, self._routing = block, routing
        self._batches: list[_Batch] = []
        self.count = 0  # the number of stored tokens of all processes

    def read(self) -> None:
        """Run all batches, and store as many of their tokens as `_MOST_BYTES` allows."""
        block, dense = self._block, self._block.dense_target
        batches = len(block.walk.batches)
        for i in range(batches):
            run = self._run(i, block.walk.output)
            if run is None:
                continue
            call, inputs, rows = run
            shift = None
            if dense is not None:
                dense_run = self._run(i, dense.output)
                assert dense_run is not None
                dense_call = dense_run[0]
                assert dense_call.output is not None
                assert call.output is not None
                shift = TARGET_WEIGHT * (dense_call.output - call.output).float()
            # Every n-th token, not the first ones, so that all texts and positions take part. n is
            # rounded up, so that batches of one size stay within the limit in all.
            step = -(-self._bytes(inputs) * len(rows) * batches // _MOST_BYTES)
            for row_indices in rows[:: max(1, step)].split(self._at_once(call.tokens)):
                self._batches.append(self._stored(call, inputs, shift, row_indices))
            block.report_progress(f"{block.name}, inputs {i + 1}/{batches}")
        own_count = float(sum(len(batch.weights) for batch in self._batches))
        self.count = int(sum(count for (count,) in block.job.processes.numbers(own_count)))
        if not self.count:
            raise TargetError(f"`structure: experts`: {block.name} saw no tokens, only padding.")

    def losses(self, sets: Sequence[tuple[int, ...]]) -> list[float]:
        """Return the mean loss of a token without the experts of each set."""

        def of(batch: _Batch) -> list[float]:
            return [batch.loss(self._weights(batch, removed)) for removed in sets]

        return self._mean(of)

    def own_loss(self, removed: Sequence[int]) -> float:
        """Return the mean loss without some experts against the block's own outputs."""
        return self._mean(lambda batch: [batch.own_loss(self._weights(batch, removed))])[0]

    def energy(self) -> float:
        """Return the mean of ‖y‖²."""
        return self._mean(lambda batch: [batch.energy])[0]

    def _weights(self, batch: _Batch, removed: Sequence[int]) -> Tensor:
        """Return v, the router's weights without some experts."""
        return self._routing.weights(batch.inputs, torch.tensor(removed))

    def _mean(self, of: Callable[[_Batch], list[float]]) -> list[float]:
        """Return means over the tokens of all processes, given each batch's sums over tokens."""
        processes = self._block.job.processes
        sums = [of(batch) for batch in self._batches]
        # The mean is of all processes' tokens: all of them must choose the same experts.
        own_sums = [sum(column) for column in zip(*sums, strict=True)] if sums else None
        # A process without tokens lacks the number of means, and takes it from the others.
        lengths = processes.all(None if own_sums is None else len(own_sums))
        length = next(length for length in lengths if length is not None)
        gathered = processes.numbers(*(own_sums or [0.0] * length))
        return [sum(column) / self.count for column in zip(*gathered, strict=True)]

    def _run(self, i: int, output: Callable[[int, int], Any]) -> tuple[Call, Tensor, Tensor] | None:
        """Return the experts' call in batch i, their module's input, and the tokens' rows.

        The result is `None` if the batch does not reach the block.
        """
        calls, inputs = list[Call](), list[Tensor]()

        def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs.append(hidden_input(args, kwargs).detach())

        hook = self._routing.module.register_forward_pre_hook(record, with_kwargs=True)
        with hook, self._routing.recorded(calls.append):
            if output(self._block.k, i) is None:
                return None
        if len(calls) != 1 or inputs[0].shape[:-1].numel() != len(calls[0].tokens):
            raise TargetError(
                "`structure: experts` needs blocks whose experts get all tokens in one call; in "
                f"{self._block.name} they do not."
            )
        is_token = self._block.padding.rows(inputs[0], self._routing.module, "")
        count = len(calls[0].tokens)
        rows = torch.arange(count) if is_token is None else is_token.nonzero()[:, 0].cpu()
        return calls[0], inputs[0], rows.to(inputs[0].device)

    def _stored(self, call: Call, inputs: Tensor, shift: Tensor | None, rows: Tensor) -> _Batch:
        """Return the stored statistics of some rows (tokens) of a call."""
        outputs = self._routing.outputs(call.tokens[rows])
        shift = None if shift is None else shift[rows]
        around = inputs.reshape(len(call.tokens), -1)[rows]
        stored = _Batch(
            around[None] if inputs.ndim > 2 else around,
            call.weights[rows].to(outputs.dtype),
            torch.bmm(outputs, outputs.mT),
            None if shift is None else torch.bmm(outputs, shift[:, :, None])[:, :, 0],
            0.0 if shift is None else float(shift.square().sum(dtype=torch.float64)),
        )
        # The loss of a set of experts is computed by routing the stored tokens only. A router with
        # a capacity, or one that compares tokens, then gives other weights, and the loss would be
        # silently wrong.
        again = self._routing.weights(stored.inputs, torch.tensor([], dtype=torch.long))
        if not float((again - stored.weights).norm()) <= _TOLERANCE * float(stored.weights.norm()):
            raise TargetError(
                "`structure: experts` needs a router that sends each token by itself; that of "
                f"{self._block.name} sends some elsewhere without the others."
            )
        return stored

    def _bytes(self, inputs: Tensor) -> int:
        """Return the number of bytes that are stored for each token."""
        units = self._routing.structure.units
        # float32: G has units² numbers, w and b have units each; and the input as it is.
        return 4 * units * (units + 2) + inputs.shape[-1] * inputs.element_size()

    def _at_once(self, tokens: Tensor) -> int:
        return max(1, _AT_ONCE // (self._routing.structure.units * tokens.shape[-1]))


def measured_set(measure: Measure, units: int, count: int) -> tuple[list[int], float]:
    """Choose units to remove, one after another, each with the lowest measured loss.

    Measures at most units·count sets. Returns the sorted removed units, and their loss.
    """
    removed: list[int] = []
    loss = 0.0
    for _ in range(count):
        sets = [tuple(sorted([*removed, unit])) for unit in range(units) if unit not in removed]
        losses = measure(sets)
        best = min(range(len(sets)), key=losses.__getitem__)  # the first of equal ones
        removed, loss = [*sets[best]], float(losses[best])
    return removed, loss
