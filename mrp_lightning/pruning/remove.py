"""Remove whole units of a block: measure what each set costs, choose, solve, write."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mrp_lightning.calibration.padding import Padding
from mrp_lightning.calibration.walks import DenseStream, Walk, hidden_input
from mrp_lightning.errors import TargetError
from mrp_lightning.narrowing.columns import measured_set, remove_columns
from mrp_lightning.narrowing.narrow import Call, Routing
from mrp_lightning.processes import Processes
from mrp_lightning.pruning.prune_layer import Calibrated, measured
from mrp_lightning.records.report import LayerReport
from mrp_lightning.solver.problem import output_energy
from mrp_lightning.solver.recipe import Recipe
from mrp_lightning.targets.layers import Layer
from mrp_lightning.targets.structure import Structure


def remove_units(
    layers: list[Layer],
    calibrated: Calibrated,
    structure: Structure,
    recipe: Recipe,
    processes: Processes,
) -> list[LayerReport]:
    """Set the columns of some units to zero in the layers that read them, and say what was done.

    The layers are pruned in place. They share the set, and so are solved as one, their rows below
    each other.

    Args:
        layers: The consumers of a block, which read the same input.
        calibrated: The Hessian of the input, and the target.
        structure: What is removed whole, and how much of it.
        recipe: The method, and the damping.
        processes: The processes that prune the model together; each solves all of it.

    Raises:
        TargetError: Other consumers of the units read another input.
        HessianError: The Hessian is unusable.
    """
    inputs, aim = calibrated.inputs, calibrated.aim
    parts = next(parts for parts in structure.blocks.values() if layers[0] in parts.consumers)
    if len(layers) != len(parts.consumers):
        raise TargetError(
            f"`structure: {structure.kind}`: {', '.join(x.name for x in parts.consumers)} read the "
            f"same {structure.kind}, but not the same input."
        )
    weights = [layer.weight for layer in layers]
    weight = torch.cat(weights)
    zeros = [int((weight == 0).sum()) / weight.numel() for weight in weights]
    with measured(weight.device) as used:
        solution = remove_columns(
            weight,
            inputs,
            structure.count,
            group=parts.group,
            method=recipe.method.name,
            damping=recipe.damping,
            target=None if aim is None else aim.target(weight, inputs, recipe),
        )
        # All processes have the same sums, and yet another machine might round otherwise.
        pruned = processes.like_first_(solution.weight.contiguous())
    rows = []
    for layer, dense, new, before in zip(
        layers, weights, pruned.split([len(w) for w in weights]), zeros, strict=True
    ):
        wide = torch.promote_types(dense.dtype, torch.float32)
        change = new.to(wide) - dense.to(wide)
        loss, energy = (output_energy(x, inputs.hessian) for x in (change, dense))
        rows.append(
            LayerReport(
                name=layer.name,
                shape=tuple(dense.shape),
                method=recipe.method.name,
                sparsity=structure.count / structure.units,
                loss=loss,
                relative_loss=loss / energy if energy else 0.0,
                damping=solution.damping_used,
                gap=solution.gap,
                tokens=calibrated.tokens,
                dead_inputs=solution.dead_inputs,
                zeros_before=before or None,
                raised_damping=(
                    solution.damping_ratio if solution.damping_ratio > recipe.damping else None
                ),
                target_loss=solution.target_loss,
                own_target=None if aim is None else aim.own,
                swaps=solution.swaps,
                **used,
            )
        )
    for layer, new in zip(layers, pruned.split([len(w) for w in weights]), strict=True):
        layer.write_(new)
    return rows


MOST_BYTES = 2**30
"""The bytes that are kept of the tokens of a block. Of more tokens, every n-th is taken."""

_AT_ONCE = 2**24
"""The numbers that the outputs of all experts take at a time."""

_TOLERANCE = 1e-3
"""The relative difference between what the router gave in the model and gives for stored tokens."""


@dataclass(frozen=True, eq=False)
class _Batch:
    """What is kept of some tokens: in the notation above, by token."""

    inputs: Tensor  # of the module around router and experts, (…, tokens, features)
    weights: Tensor  # w
    products: Tensor  # G
    aims: Tensor | None  # b
    rest: float  # Σ ‖s‖²

    def lost(self, weights: Tensor) -> float:
        """What is lost with other weights, summed over the tokens."""
        change = weights - self.weights
        lost = float((self._through(change) * change).sum(dtype=torch.float64))
        if self.aims is not None:
            lost -= 2 * float((change * self.aims).sum(dtype=torch.float64))
        return lost + self.rest

    @property
    def energy(self) -> float:
        """‖y‖², summed over the tokens."""
        return float((self._through(self.weights) * self.weights).sum(dtype=torch.float64))

    def _through(self, change: Tensor) -> Tensor:
        return torch.bmm(change[:, None], self.products)[:, 0]


def remove_experts(
    routing: Routing,
    walk: Walk,
    k: int,
    padding: Padding,
    recipe: Recipe,
    *,
    dense: DenseStream | None,
    target_weight: float | None,
    processes: Processes,
    tell: Callable[[str], None],
) -> LayerReport:
    """Set the second matrices of some experts of block k to zero, and say what was done.

    Args:
        routing: The experts of the block.
        walk: Runs the block.
        k: The number of the block in the walk.
        padding: What tells tokens from padding.
        recipe: The method: SM measures sets; wanda ranks by Σ ‖w_e O_e‖², magnitude by the weights.
        dense: What the dense model computes, where it is aimed at.
        target_weight: α, `None` where the block's own outputs are the target.
        processes: The processes that prune the model together.
        tell: Called with what is being done.

    Raises:
        TargetError: Experts are zero before, or tokens are not routed one by one.
    """
    start = time.perf_counter()
    (layer,) = routing.parts.consumers
    units, count = routing.structure.units, routing.structure.count
    routing.require_all()
    tokens = _Tokens(routing, walk, k, padding, dense if target_weight else None, processes)
    tokens.read(target_weight or 0.0, tell)

    def measure(sets: Sequence[tuple[int, ...]]) -> list[float]:
        return tokens.mean(lambda batch: [tokens.lost(batch, torch.tensor(each)) for each in sets])

    tell(f"{layer.name}, which to remove")
    if recipe.method.mask.needs_inverse:
        removed, loss, swaps = measured_set(measure, units, count)
    else:
        removed = _lowest(routing, tokens, recipe.method.mask.name)[:count]
        (loss,), swaps = measure([tuple(removed)]), None
    own = loss
    if target_weight:
        (own,) = tokens.mean(lambda batch: [tokens.own(batch, torch.tensor(removed))])
    (energy,) = tokens.mean(lambda batch: [batch.energy])
    with torch.no_grad():
        layer.view[:, removed] = 0
    return LayerReport(
        name=layer.name,
        shape=tuple(layer.weight.shape),
        method=recipe.method.name,
        sparsity=count / units,
        loss=own,
        relative_loss=own / energy if energy else 0.0,
        target_loss=loss if target_weight else None,
        tokens=tokens.count,
        swaps=swaps,
        seconds=time.perf_counter() - start,
    )


class _Tokens:
    """The tokens of a block's experts, those of this process."""

    def __init__(
        self,
        routing: Routing,
        walk: Walk,
        k: int,
        padding: Padding,
        dense: DenseStream | None,
        processes: Processes,
    ) -> None:
        self._routing, self._walk, self._k, self._padding = routing, walk, k, padding
        self._dense, self._processes = dense, processes
        self._batches: list[_Batch] = []
        self.count = 0

    def read(self, target_weight: float, tell: Callable[[str], None]) -> None:
        """Run all batches, and keep of their tokens as many as there is place for."""
        name, batches = self._walk.blocks[self._k].name, len(self._walk.batches)
        for i in range(batches):
            call, inputs, rows = self._run(i, self._walk.output)
            aimed = None
            if self._dense is not None:
                theirs, _, _ = self._run(i, self._dense.output)
                assert theirs.output is not None
                assert call.output is not None
                aimed = target_weight * (theirs.output - call.output).float()
            step = -(-self._bytes(inputs) * len(rows) * batches // MOST_BYTES)
            for some in rows[:: max(1, step)].split(self._at_once(call.tokens)):
                self._batches.append(self._kept(call, inputs, aimed, some))
            tell(f"{name}, inputs {i + 1}/{batches}")
        mine = float(sum(len(batch.weights) for batch in self._batches))
        self.count = int(sum(count for (count,) in self._processes.numbers(mine)))
        if not self.count:
            raise TargetError(f"`structure: experts`: {name} saw no tokens, only padding.")

    def lost(self, batch: _Batch, removed: Tensor) -> float:
        """What is lost of a batch without some experts, against the target."""
        return batch.lost(self._routing.weights(batch.inputs, removed))

    def own(self, batch: _Batch, removed: Tensor) -> float:
        """What is lost of a batch without some experts, against what they gave."""
        change = self._routing.weights(batch.inputs, removed) - batch.weights
        return _Batch(batch.inputs, change, batch.products, None, 0.0).energy

    def mean(self, find: Callable[[_Batch], list[float]]) -> list[float]:
        """The mean over the tokens of all processes of what is found of each batch."""
        found = [find(batch) for batch in self._batches]
        mine = [sum(column) for column in zip(*found, strict=True)] if found else None
        sizes = self._processes.all(None if mine is None else len(mine))
        length = next(size for size in sizes if size is not None)
        sums = self._processes.numbers(*(mine or [0.0] * length))
        return [sum(column) / self.count for column in zip(*sums, strict=True)]

    def _run(self, i: int, output: Callable[[int, int], Any]) -> tuple[Call, Tensor, Tensor]:
        """The call of the experts in batch i, the input around them, and which rows are tokens."""
        calls: list[Call] = []
        inputs: list[Tensor] = []

        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs.append(hidden_input(args, kwargs).detach())

        hook = self._routing.module.register_forward_pre_hook(note, with_kwargs=True)
        try:
            with self._routing.recorded(calls.append):
                output(self._k, i)
        finally:
            hook.remove()
        if len(calls) != 1 or inputs[0].shape[:-1].numel() != len(calls[0].tokens):
            raise TargetError(
                "`structure: experts` needs blocks whose experts get all tokens in one call; in "
                f"{self._walk.blocks[self._k].name} they do not."
            )
        rows = self._padding.rows(inputs[0], self._routing.module, "")
        count = len(calls[0].tokens)
        places = torch.arange(count) if rows is None else rows.nonzero()[:, 0].cpu()
        return calls[0], inputs[0], places.to(inputs[0].device)

    def _kept(self, call: Call, inputs: Tensor, aimed: Tensor | None, rows: Tensor) -> _Batch:
        outputs = self._routing.outputs(call.tokens[rows])
        shift = None if aimed is None else aimed[rows]
        around = inputs.reshape(len(call.tokens), -1)[rows]
        kept = _Batch(
            around[None] if inputs.ndim > 2 else around,
            call.weights[rows].to(outputs.dtype),
            torch.bmm(outputs, outputs.mT),
            None if shift is None else torch.bmm(outputs, shift[:, :, None])[:, :, 0],
            0.0 if shift is None else float(shift.square().sum(dtype=torch.float64)),
        )
        again = self._routing.weights(kept.inputs, torch.tensor([], dtype=torch.long))
        if not float((again - kept.weights).norm()) <= _TOLERANCE * float(kept.weights.norm()):
            raise TargetError(
                "`structure: experts` needs a router that sends each token by itself; that of "
                f"{self._walk.blocks[self._k].name} sends some elsewhere without the others."
            )
        return kept

    def _bytes(self, inputs: Tensor) -> int:
        """The bytes that are kept of a token."""
        units = self._routing.structure.units
        return 4 * units * (units + 2) + inputs.shape[-1] * inputs.element_size()

    def _at_once(self, tokens: Tensor) -> int:
        return max(1, _AT_ONCE // (self._routing.structure.units * tokens.shape[-1]))

    def energies(self) -> list[float]:
        """By expert, Σ ‖w_e O_e‖² over the tokens, their mean."""

        def of(batch: _Batch) -> list[float]:
            own = batch.products.diagonal(dim1=1, dim2=2)
            return (batch.weights.square() * own).sum(0, dtype=torch.float64).tolist()

        return self.mean(of)


def _lowest(routing: Routing, tokens: _Tokens, mask: str) -> list[int]:
    """The experts from the lowest score on, ties by position."""
    if mask == "wanda":
        scores = torch.tensor(tokens.energies())
    else:
        mine = [cut for cut in routing.parts.cuts if cut.module is routing.experts]
        squares = [cut.tensor.detach().float().square().flatten(1).sum(1) for cut in mine]
        scores = torch.stack(squares).sum(0)
    return [int(e) for e in scores.sort(stable=True).indices]
