"""Tune the kept weights of pruned blocks towards the outputs of the dense model's blocks."""

import math
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mrp_lightning.calibration.padding import Padding
from mrp_lightning.calibration.walk_choice import trace
from mrp_lightning.calibration.walks import DenseStream, Walk, hidden_of
from mrp_lightning.devices import is_out_of_memory
from mrp_lightning.errors import DataError, TargetError
from mrp_lightning.pruning.job import Job
from mrp_lightning.records.rows import BlockReport
from mrp_lightning.solver.grid import Grid, GridParameters, decompose
from mrp_lightning.targets.layers import Layer

_SIZE = 0.1
"""The size of weights for which the learning rate is made: a step that would change a weight by d
changes a scale by d / `_SIZE`, relative to the scale."""


class _Windows(NamedTuple):
    """Some windows of a calibration batch."""

    batch: int
    chosen: slice

    @property
    def size(self) -> int:
        return self.chosen.stop - self.chosen.start


class BlockTuner:
    """Tunes one block after another towards the stored outputs of the dense stream.

    A step takes windows of each process. Weights that are on a grid stay on it.
    """

    def __init__(self, job: Job, walk: Walk, dense: DenseStream, padding: Padding) -> None:
        tuning, recipe = job.settings.block_tuning, job.settings.recipe
        assert tuning is not None
        self.job, self.walk, self.dense = job, walk, dense
        self.padding, self.tuning = padding, tuning
        self.grid = None if job.settings.grid_waits else recipe.grid
        self.processes = job.processes

    def check(self) -> None:
        """Check, before anything is pruned, that layers can be tuned, on two windows or more."""
        blocks = [layers for layers in self.job.plan.layers.values() if layers]
        narrow = [x.name for layers in blocks for x in layers if x.parameter.dtype == torch.float16]
        if narrow:
            raise TargetError(
                "`tuning` needs weights in bfloat16 or float32, since gradients underflow in "
                f"float16. Load the model in one of these. In float16 are: {', '.join(narrow)}."
            )
        block = self.walk.blocks[0]
        parameters = [p for p in block.module.parameters() if p.is_floating_point()]
        windows = 0
        if self.walk.batches:
            seen = trace(self.walk.forward, self.walk.batches[0], self.walk.blocks)
            if unknown := [self.walk.blocks[k].name for k in seen.order if k not in seen.outputs]:
                raise TargetError(
                    "`tuning` needs blocks that return their hidden state, as a tensor or first in "
                    "a tuple or list. Leave `tuning` out. Otherwise return: "
                    f"{', '.join(unknown)}."
                )
            with _only_these_train(self.job.model, parameters):
                hidden = self._outputs(0, 0)
                self._gradients(hidden.float().square().sum(), parameters, block.name)
            # Two windows suffice, and each further batch has at least one.
            windows = len(hidden) + len(self.walk.batches) - 1
        if sum(count for (count,) in self.processes.numbers(windows)) < 2:
            raise DataError(
                "`tuning` holds out some of the calibration windows: expected at least 2, got 1. "
                "Give it more data, or leave `tuning` out."
            )

    def tune(
        self,
        k: int,
        layers: Sequence[Layer],
        known: Mapping[str, GridParameters],
        row: BlockReport,
        progress: Callable[[str], None],
    ) -> tuple[BlockReport, dict[str, GridParameters]]:
        """Tune the pruned layers of block k in place.

        The dense stream has advanced past the block, the walk has not. `known` are the parameters
        of layers on the grid of an engine, by name. Returns the block's row of the report with the
        errors, which are `None` if there is nothing to tune, and the new parameters of the layers
        in `known`; empty if the untuned block is best.
        """
        start, name = time.perf_counter(), self.walk.blocks[k].name
        trained, held_out = self._split()
        if not layers or not (steps := self.tuning.epochs * len(self._steps(trained))):
            return row, {}
        # Off the grid, kept weights move; on it, codes stay, and only their scales do.
        weights = _KeptWeights(layers) if self.grid is None else _Scales(layers, self.grid, known)
        optimizer = torch.optim.Adam(weights.masters, lr=self.tuning.learning_rate)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
        # Seeded by the block's name, so that a resumed run draws the same order.
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        # The masters hold the untuned weights so far, and so do the best ones: an error at any time
        # leaves the block as it was pruned, or as its best epoch had it.
        with _only_these_train(self.job.model, weights.parameters), weights.best_at_the_end():
            untuned, energy = self._held_out(k, held_out)
            scale = energy * self.tuning.batch_size or 1.0
            best, best_epoch = untuned, 0
            # The loss of a step is ‖y − y_d‖² of its windows, in all processes, divided by the
            # energy ‖y_d‖² of an average batch, so that the learning rate has the same meaning for
            # every block.
            # Each process draws an order of its own windows, but all take the same number of steps,
            # some of them empty: the sum of gradients is collective. The schedule counts steps, and
            # reaches 0 with the last one.
            for epoch in range(1, self.tuning.epochs + 1):
                order = torch.randperm(len(trained), generator=generator).tolist()
                for parts in self._steps([trained[i] for i in order]):
                    optimizer.zero_grad(set_to_none=False)
                    self._add_gradients(k, parts, weights, scale)
                    optimizer.step()
                    schedule.step()
                    weights.write()
                error, _ = self._held_out(k, held_out)
                progress(f"{name}, tuning {epoch}/{self.tuning.epochs}: error {error:.3g}")
                # Strictly less: a tie keeps the earlier weights, and epoch 0 is the untuned block,
                # so that tuning never raises the error on the held-out windows.
                if error < best:
                    best, best_epoch = error, epoch
                    weights.keep()
        # Different GPUs may round the same sums differently: all processes take the first one's
        # bits.
        device = self.processes.device
        with torch.no_grad():
            for parameter in weights.parameters:
                self.processes.like_first_(parameter)
            grid = {
                layer: x.map(lambda y: self.processes.like_first_(y.to(device).contiguous()).cpu())
                for layer, x in weights.grid.items()
            }
        row = replace(row, error_before=untuned, error_after=best, epoch=best_epoch)
        return replace(row, seconds=time.perf_counter() - start), grid

    def _add_gradients(
        self, k: int, parts: Sequence[_Windows], weights: "_Tuned", scale: float
    ) -> None:
        """Add the gradients of a step: those of its error / `scale`, summed over all processes."""
        for part in parts:
            loss = self._errors(k, part)[0] / scale
            weights.add(self._gradients(loss, weights.parameters, self.walk.blocks[k].name))
        # Added, not averaged, since the divisor of the loss is of the whole step: the number of
        # processes changes nothing but rounding.
        for master in weights.masters:
            assert master.grad is not None
            self.processes.sum_(master.grad)

    def _split(self) -> tuple[list[_Windows], list[_Windows]]:
        """Split the windows into those to train on and the last ones, which are held out."""
        sizes = [0 if hidden is None else len(hidden) for hidden in self.dense.outputs]
        counts = [int(count) for (count,) in self.processes.numbers(sum(sizes))]
        # Processes take windows in turn, so the last windows of all processes are the last of the
        # data.
        windows = sorted((n, rank) for rank, count in enumerate(counts) for n in range(count))
        count = min(round(len(windows) * self.tuning.held_out), len(windows) - 1)
        last = windows[-max(1, count) :]
        rest = sum(sizes) - sum(rank == self.processes.rank for _, rank in last)
        trained, held_out = [], []
        # `rest` counts the windows to train on that are left in this process. A batch in which it
        # runs out is split in two.
        for i, size in enumerate(sizes):
            count = min(max(rest, 0), size)
            rest -= size
            trained += [_Windows(i, slice(0, count))] if count else []
            held_out += [_Windows(i, slice(count, size))] if count < size else []
        return trained, held_out

    def _steps(self, parts: Sequence[_Windows]) -> list[list[_Windows]]:
        """Group parts into steps, the same number in all processes; the last ones may be empty."""
        steps: list[list[_Windows]] = [[]]
        share = self.tuning.batch_size / self.processes.size
        for part in parts:
            steps[-1].append(part)
            if sum(part.size for part in steps[-1]) >= share:
                steps.append([])
        if not steps[-1]:
            steps.pop()
        num_steps = max(count for (count,) in self.processes.numbers(len(steps)))
        return steps + [[] for _ in range(int(num_steps) - len(steps))]

    def _held_out(self, k: int, parts: Sequence[_Windows]) -> tuple[float, float]:
        """Return ‖y − y_d‖² / ‖y_d‖² over the held-out windows, and the mean ‖y_d‖² of a window."""
        with torch.no_grad():
            sums = [(*map(float, self._errors(k, part)), part.size) for part in parts]
        share = map(math.fsum, zip(*sums, strict=True)) if sums else (0.0, 0.0, 0.0)
        totals = zip(*self.processes.numbers(*share), strict=True)
        # At least one window of some process is held out, so that `windows` is positive.
        error, energy, windows = map(math.fsum, totals)
        return error / energy if energy else 0.0, energy / windows

    def _errors(self, k: int, part: _Windows) -> tuple[Tensor, Tensor]:
        """Return the sums of ‖y − y_d‖² and ‖y_d‖² over the tokens of `part`.

        With a grid, both terms of a token are divided by its ‖y_d‖², so that all tokens weigh the
        same: the first token of a window may have 98% of all energy (in SmolLM2), and would alone
        decide the scales.
        """
        outputs, target = self._outputs(k, part.batch), self.dense.outputs[part.batch]
        assert target is not None
        block = self.walk.blocks[k]
        rows = self.padding.rows(outputs, block.module, block.name)
        target = target.to(outputs.device, outputs.dtype)
        # In float32: sums of squares in bfloat16, with 8 bits, would stop growing.
        hidden, dense = (x[part.chosen].float() for x in (outputs, target))
        if rows is not None:
            is_token = rows.view(len(outputs), -1)[part.chosen].flatten()
            hidden, dense = (x.reshape(len(is_token), -1)[is_token] for x in (hidden, dense))
        if self.grid is not None:
            sizes = torch.linalg.vector_norm(dense, dim=-1, keepdim=True)
            hidden, dense = (x / torch.where(sizes > 0, sizes, 1) for x in (hidden, dense))
        return (hidden - dense).square().sum(), dense.square().sum()

    def _outputs(self, k: int, i: int) -> Tensor:
        """Return block k's hidden state for batch i, with its graph if gradients are enabled."""
        output = self.walk.output(k, i)
        if output is None:
            raise TargetError(
                f"`tuning`: a batch does not reach {self.walk.blocks[k].name}, which another run "
                "of it did. Let `predict_step` do the same every time."
            )
        return hidden_of(output)

    def _gradients(self, loss: Tensor, parameters: Any, name: str) -> tuple[Tensor | None, ...]:
        try:
            # A parameter that these windows do not reach, such as an expert's, has no gradient.
            return torch.autograd.grad(loss, parameters, allow_unused=True)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise TargetError(
                f"`tuning` needs gradients, and none come through {name}: {error}. If "
                "`predict_step` runs under `torch.no_grad` or `inference_mode`, take that out; if "
                "the model's own forward has none, leave `tuning` out."
            ) from error


class _Tuned(ABC):
    """The weights of some layers while a block is tuned, as functions of `masters`.

    Attributes:
        parameters: The parameters of the layers.
        masters: The tensors that the optimizer changes, in float32 (or float64).
        grid: The parameters on their grid of the layers' best weights, by the names of layers;
            empty before `keep`, for free weights, and for grids whose values give them back.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        # The experts of a stack share one parameter, which the optimizer must have once.
        self.parameters = list(dict.fromkeys(layer.parameter for layer in layers))
        self.masters = self._make_masters(layers)
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        self._best = [p.detach().clone() for p in self.parameters]
        self.grid: dict[str, GridParameters] = {}

    @abstractmethod
    def _make_masters(self, layers: Sequence[Layer]) -> list[Tensor]:
        """Return the tensors to optimise, which determine the parameters of the layers."""

    @abstractmethod
    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add gradients of the parameters to the gradients of their masters."""

    @abstractmethod
    def write(self) -> None:
        """Compute the parameters from the masters, in place."""

    def keep(self) -> None:
        """Record the present parameters as the best."""
        for best, parameter in zip(self._best, self.parameters, strict=True):
            best.copy_(parameter.detach())

    @contextmanager
    def best_at_the_end(self) -> Iterator[None]:
        """Restore the best values of the parameters at the end, also after an error."""
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, best in zip(self.parameters, self._best, strict=True):
                    parameter.copy_(best)


class _KeptWeights(_Tuned):
    """The non-zero weights of some layers, with a float32 master copy."""

    def _make_masters(self, layers: Sequence[Layer]) -> list[Tensor]:
        # Elements of a parameter outside of the layers count as zeros, too. Adam leaves a master
        # whose gradients are all 0 as it is, so that both keep their values.
        zeros = {p: torch.ones_like(p, dtype=torch.bool) for p in self.parameters}
        for layer in layers:
            layer.arranged(zeros[layer.parameter]).copy_(layer.view == 0)
        self._zeros = list(zeros.values())
        # Adam's steps are below the resolution of bfloat16, so masters are float32 (or float64).
        return [
            p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True).requires_grad_()
            for p in self.parameters
        ]

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        for master, gradient, zero in zip(self.masters, gradients, self._zeros, strict=True):
            if gradient is not None and master.grad is not None:
                master.grad += gradient.masked_fill(zero, 0)

    @torch.no_grad()
    def write(self) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.copy_(master)


class _Scales(_Tuned):
    """The scales of weights that are on a grid; their codes do not change.

    A master is the relative change of the scales of a layer, times `_SIZE`, so that one learning
    rate serves weights and scales. Minima change in proportion to scales, so that whole groups
    shrink or grow. Both are rounded to those of the grid in every step, so that the epoch is chosen
    by weights that lie on it.
    """

    def __init__(
        self, layers: Sequence[Layer], grid: Grid, known: Mapping[str, GridParameters]
    ) -> None:
        self._grid, self._known, self._written = grid, known, dict[str, GridParameters]()
        super().__init__(layers)

    def _make_masters(self, layers: Sequence[Layer]) -> list[Tensor]:
        self._layers = []
        for layer in layers:
            known = self._known.get(layer.name)
            codes, scales = decompose(self._grid, layer.weight, known)
            minima = None if known is None or known.minima is None else known.minima.to(scales)
            self._layers.append((layer, codes, scales, minima))
        self._units = [
            (self._grid.units(scales), None if minima is None else self._grid.units(minima))
            for _, _, scales, minima in self._layers
        ]
        return [torch.zeros_like(scales, requires_grad=True) for _, _, scales, _ in self._layers]

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        of_parameter = dict(zip(self.parameters, gradients, strict=True))
        for (layer, codes, scales, minima), master in zip(self._layers, self.masters, strict=True):
            gradient = of_parameter[layer.parameter]
            if gradient is not None and master.grad is not None:
                # A weight is (1 + m/σ)(s·q − o), with master m, σ = `_SIZE`, scale s, code q and
                # minimum o. So ∂L/∂m = Σ g·(s·q − o) / σ over the group, with g = ∂L/∂w.
                of_weights = layer.arranged(gradient).flatten(1)
                master.grad += self._grid.grouped(of_weights * codes).sum(2) * scales / _SIZE
                if minima is not None:
                    master.grad -= self._grid.grouped(of_weights).sum(2) * minima / _SIZE

    @torch.no_grad()
    def write(self) -> None:
        for (layer, codes, scales, minima), (units, minimum_units), master in zip(
            self._layers, self._units, self.masters, strict=True
        ):
            # From the scales at the start, not from the last ones, so that rounding does not add up
            # over the steps.
            factor = 1 + master / _SIZE
            changed = GridParameters(self._grid.round_scales(scales * factor, units))
            if minima is not None:
                rounded = self._grid.round_minima(minima * factor, minimum_units)
                changed = replace(changed, minima=rounded)
            layer.write_(self._grid.values(codes, changed))
            if layer.name in self._known:
                self._written[layer.name] = changed

    def keep(self) -> None:
        super().keep()
        # Kept with the weights: parameters of another epoch would not reproduce them.
        self.grid = dict(self._written)


@contextmanager
def _only_these_train(model: nn.Module, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Enable gradients, of some parameters and no others of the model, in this context."""
    required = {name: p.requires_grad for name, p in model.named_parameters()}
    try:
        model.requires_grad_(False)
        for p in parameters:
            p.requires_grad_()
        with torch.enable_grad():
            yield
    finally:
        for name, p in model.named_parameters():
            p.requires_grad_(required[name])
