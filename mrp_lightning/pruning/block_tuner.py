"""Tune the kept weights of pruned blocks towards the outputs of the dense model's blocks."""

import math
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mrp_lightning.calibration.padding import Padding
from mrp_lightning.calibration.walk_choice import trace
from mrp_lightning.calibration.walks import DenseStream, Walk, hidden_of
from mrp_lightning.environment import is_out_of_memory
from mrp_lightning.errors import DataError, TargetError
from mrp_lightning.pruning.job import Job
from mrp_lightning.records.report import BlockReport
from mrp_lightning.solver.patterns import Dense
from mrp_lightning.solver.recipe import Recipe
from mrp_lightning.targets.layers import Layer
from mrp_sparse.formats.grid import Grid

_TIMED_STEPS = 3


class _Windows(NamedTuple):
    """Some windows of a calibration batch."""

    batch: int
    chosen: slice

    @property
    def size(self) -> int:
        return self.chosen.stop - self.chosen.start


class BlockTuner:
    """Tunes one block after another towards the stored outputs of the dense stream.

    Padding has no effect. A step takes windows of each process. Weights that are on a grid stay on
    it.
    """

    def __init__(self, job: Job, walk: Walk, dense: DenseStream, padding: Padding) -> None:
        tuning, recipe = job.settings.block_tuning, job.settings.recipe
        assert tuning is not None
        self.job, self.walk, self.dense, self.padding, self.tuning = (
            job,
            walk,
            dense,
            padding,
            tuning,
        )
        self.recipe = replace(recipe, grid=None) if job.settings.grid_waits else recipe
        self.processes = job.processes
        self._num_blocks: int | None = None  # set until the time is estimated

    def check(self) -> None:
        """Check, before anything is pruned, that the layers can be tuned.

        Raises:
            TargetError: Weights are float16, the hidden state is not the first or only output of a
                block, or gradients do not reach the weights.
            DataError: There is only one window.
        """
        blocks = [layers for layers in self.job.plan.layers.values() if layers]
        self._num_blocks = len(blocks)
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
            self._refuse_unknown_outputs()
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

    def _refuse_unknown_outputs(self) -> None:
        """Raise a `TargetError` if a block's output is not its hidden state."""
        seen = trace(self.walk.forward, self.walk.batches[0], self.walk.blocks)
        if unknown := [self.walk.blocks[k].name for k in seen.order if k not in seen.outputs]:
            raise TargetError(
                "`tuning` needs blocks that return their hidden state, as a tensor or first in a "
                f"tuple or list. Leave `tuning` out. Otherwise return: {', '.join(unknown)}."
            )

    def tune(
        self, k: int, layers: Sequence[Layer], report: BlockReport, progress: Callable[[str], None]
    ) -> BlockReport:
        """Tune the pruned layers of block k in place, and return its report with the errors.

        The dense stream has advanced past the block, the walk has not. The errors are `None` if
        there is nothing to tune.
        """
        start, name = time.perf_counter(), self.walk.blocks[k].name
        trained, held_out = self._split()
        if not layers or not (steps := self.tuning.epochs * len(self._steps(trained))):
            return report
        weights = _KeptWeights(layers, self.recipe)
        optimizer = torch.optim.Adam(weights.masters, lr=self.tuning.learning_rate)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
        # Seeded by the block's name, so that a resumed run draws the same order.
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        with _only_these_train(self.job.model, weights.parameters), weights.best_at_the_end():
            untuned, energy = self._held_out(k, held_out)
            scale = energy * self.tuning.batch_size or 1.0
            best, best_epoch, done = untuned, 0, 0
            # The loss of a step is ‖y − y_d‖² of its windows, in all processes, divided by the
            # energy ‖y_d‖² of an average batch, so that the learning rate has the same meaning for
            # every block.
            for epoch in range(1, self.tuning.epochs + 1):
                order = torch.randperm(len(trained), generator=generator).tolist()
                for parts in self._steps([trained[i] for i in order]):
                    for part in parts:
                        loss = self._errors(k, part)[0] / scale
                        weights.add(self._gradients(loss, weights.parameters, name))
                    for gradient in weights.gradients:
                        self.processes.sum_(gradient)
                    optimizer.step()
                    schedule.step()
                    weights.write()
                    done += 1
                    if done == min(_TIMED_STEPS, steps):
                        self._estimate((time.perf_counter() - start) / done * steps)
                error, _ = self._held_out(k, held_out)
                progress(f"{name}, tuning {epoch}/{self.tuning.epochs}: error {error:.3g}")
                if error < best:
                    best, best_epoch = error, epoch
                    weights.keep()
        # Different GPUs may round the same sums differently: all processes take the first one's
        # bits.
        with torch.no_grad():
            for parameter in weights.parameters:
                self.processes.like_first_(parameter)
        return replace(
            report,
            error_before=untuned,
            error_after=best,
            epoch=best_epoch,
            seconds=time.perf_counter() - start,
        )

    def _split(self) -> tuple[list[_Windows], list[_Windows]]:
        """Split the windows into those to train on and the last ones, which are held out."""
        sizes = [0 if hidden is None else len(hidden) for hidden in self.dense.outputs]
        counts = [int(count) for (count,) in self.processes.numbers(sum(sizes))]
        # Processes take windows in turn, so the last windows of all processes are the last of the
        # data.
        windows = sorted((n, rank) for rank, count in enumerate(counts) for n in range(count))
        last = windows[-max(1, round(len(windows) * self.tuning.held_out)) :]
        rest = sum(sizes) - sum(rank == self.processes.rank for _, rank in last)
        trained, held_out = [], []
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
        most = max(count for (count,) in self.processes.numbers(len(steps)))
        return steps + [[] for _ in range(int(most) - len(steps))]

    def _held_out(self, k: int, parts: Sequence[_Windows]) -> tuple[float, float]:
        """Return ‖y − y_d‖² / ‖y_d‖² over the held-out windows, and the mean ‖y_d‖² of a window."""
        with torch.no_grad():
            sums = [(*map(float, self._errors(k, part)), part.size) for part in parts]
        share = map(math.fsum, zip(*sums, strict=True)) if sums else (0.0, 0.0, 0.0)
        totals = zip(*self.processes.numbers(*share), strict=True)
        error, energy, windows = map(math.fsum, totals)
        return error / energy if energy else 0.0, energy / windows

    def _errors(self, k: int, part: _Windows) -> tuple[Tensor, Tensor]:
        """Return ‖y − y_d‖² and ‖y_d‖² over the tokens of some windows."""
        outputs, target = self._outputs(k, part.batch), self.dense.outputs[part.batch]
        assert target is not None
        block = self.walk.blocks[k]
        rows = self.padding.rows(outputs, block.module, block.name)
        target = target.to(outputs.device, outputs.dtype)
        ours, theirs = (x[part.chosen].float() for x in (outputs, target))
        if rows is not None:
            is_token = rows.view(len(outputs), -1)[part.chosen].flatten()
            ours, theirs = (x.reshape(len(is_token), -1)[is_token] for x in (ours, theirs))
        return (ours - theirs).square().sum(), theirs.square().sum()

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
            return torch.autograd.grad(loss, parameters, allow_unused=True)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise TargetError(
                f"`tuning` needs gradients, and none come through {name}: {error}. If "
                "`predict_step` runs under `torch.no_grad` or `inference_mode`, take that out; if "
                "the model's own forward has none, leave `tuning` out."
            ) from error

    def _estimate(self, seconds: float) -> None:
        """Log, once, the estimated time of the whole tuning, from that of the first block."""
        if self._num_blocks is not None:
            total = seconds * self._num_blocks
            self.job.listener.log(
                f"Tuning {self._num_blocks} blocks takes about {total:.0f} s in all."
            )
        self._num_blocks = None


@dataclass(frozen=True, eq=False)
class Codes:
    """The grid of a weight, and its scale for each weight: (rows, columns)."""

    grid: Grid
    scales: Tensor

    @classmethod
    def of(cls, weight: Tensor, grid: Grid) -> "Codes":
        """Read the scales off a weight (rows, columns) that lies on the grid."""
        _, scales = grid.decompose(weight)
        return cls(grid, grid.spread(scales, weight.shape[1]))

    def nearest(self, weight: Tensor) -> Tensor:
        """Return the values of the grid that are nearest to a weight (rows, columns)."""
        return self.grid.nearest(weight / self.scales).mul_(self.scales)


class _KeptWeights:
    """The non-zero weights of some layers, with a float32 master copy.

    In quantisation alone the weights lie on a grid: the parameters are the grid values nearest to
    the masters, and gradients pass as if there were no rounding (the straight-through estimator of
    Bengio et al., 2013). Scales do not change.

    Args:
        layers: The layers, which are pruned.
        recipe: The recipe of quantised weights, `None` for weights without a grid.
    """

    def __init__(self, layers: Sequence[Layer], recipe: Recipe | None = None) -> None:
        self.parameters = list(dict.fromkeys(layer.parameter for layer in layers))
        fixed = {p: torch.ones_like(p, dtype=torch.bool) for p in self.parameters}
        removes = recipe is None or not isinstance(recipe.pattern, Dense)
        for layer in layers:
            is_fixed = layer.arranged(fixed[layer.parameter])
            is_fixed.copy_(layer.view == 0 if removes else torch.zeros_like(is_fixed))
        self._fixed = list(fixed.values())
        # Adam's steps are below the resolution of bfloat16, so masters are float32 (or float64).
        self.masters = [
            p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True).requires_grad_()
            for p in self.parameters
        ]
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        self._best = [p.detach().clone() for p in self.parameters]
        self._rounded: list[tuple[Layer, Tensor, Codes]] = []
        if recipe is not None and recipe.grid is not None:
            assert not removes, "with zeros, weights are put on their grid after tuning"
            masters = dict(zip(self.parameters, self.masters, strict=True))
            for layer in layers:
                codes = Codes.of(layer.weight, recipe.grid)
                self._rounded.append((layer, masters[layer.parameter], codes))

    @property
    def gradients(self) -> list[Tensor]:
        """The gradients of the masters so far."""
        return [master.grad for master in self.masters if master.grad is not None]

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add gradients of the parameters to the gradients of their masters."""
        for master, gradient, fixed in zip(self.masters, gradients, self._fixed, strict=True):
            if gradient is not None and master.grad is not None:
                master.grad += gradient.masked_fill(fixed, 0)

    def write(self) -> None:
        """Round the masters into the parameters, after a step, and reset the gradients."""
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                parameter.copy_(master)
                assert master.grad is not None
                master.grad.zero_()
            for layer, master, codes in self._rounded:
                layer.write_(codes.nearest(layer.arranged(master).flatten(1)))

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


@contextmanager
def _only_these_train(model: nn.Module, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Require gradients of some parameters, and of no others of the model."""
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
