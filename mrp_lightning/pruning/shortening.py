"""Choose the blocks of a model that its output needs least, and make up for them by least squares.

The choice is measured: each candidate set of blocks is skipped, and the output compared with that
of the dense model, by KL(dense ‖ shortened) for a language model. Candidates are all runs of
consecutive blocks, and the sets of a greedy search for single blocks. The idea to fit the last
layer before a gap is that of ReplaceMe (Shopkhoev et al., 2025, arXiv:2505.02819), which fits one
linear map behind that layer and multiplies it in; here all weights of the layer are free.
"""

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mrp_lightning.calibration.offload import CPU
from mrp_lightning.calibration.padding import Padding, taken
from mrp_lightning.calibration.walk_choice import choose_walk
from mrp_lightning.calibration.walks import Inject, hidden_of
from mrp_lightning.errors import TargetError, counted
from mrp_lightning.narrowing.blocks import ShorteningPlan, remove_blocks
from mrp_lightning.pruning.job import Job
from mrp_lightning.pruning.output_change import OutputChange, first_output
from mrp_lightning.pruning.sequential import started
from mrp_lightning.solver.hessian import HessianAccumulator, InputHessian
from mrp_lightning.solver.problem import require_in_range
from mrp_lightning.targets.layers import Conv1D, Layer, Linear

log = logging.getLogger(__name__)

HELD_OUT = 4
"""One in so many calibration batches, the last ones, is compared; the others are for the fit."""
_ROUNDING = 4
"""The distance of equal outputs that counts as rounding, in units of the precision and norm."""
_NOT_LINEAR = 0.05
"""The distance of a block's change from a multiple of its layer's, relative to the multiple, above
which the block is not linear in the layer. Rounding in bfloat16 gives about 0.01."""


@dataclass(frozen=True)
class Removal:
    """A choice of blocks. A change is that of the output, as `OutputChange` defines it."""

    blocks: tuple[int, ...]  # the numbers of the blocks to remove, in ascending order
    change: float  # without these blocks
    run_change: float  # without the best run of consecutive blocks
    greedy_change: float = math.nan  # without the greedy search's; NaN if that found none better

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "Removal":
        """Read the result of `tensors`."""
        return cls(tuple(tensors["blocks"].tolist()), *tensors["changes"].tolist())

    def tensors(self) -> dict[str, Tensor]:
        """Return the choice as tensors, for a journal."""
        changes = torch.tensor(
            [self.change, self.run_change, self.greedy_change], dtype=torch.double
        )
        return {"blocks": torch.tensor(self.blocks), "changes": changes}

    @property
    def gaps(self) -> list[range]:
        """The runs of consecutive removed blocks."""
        starts = [k for k in self.blocks if k - 1 not in self.blocks]
        ends = [k + 1 for k in self.blocks if k + 1 not in self.blocks]
        return [range(*bounds) for bounds in zip(starts, ends, strict=True)]


@dataclass(frozen=True)
class Repair:
    """The new weights of the last layers before the gaps."""

    weights: Mapping[str, Tensor]  # (rows, columns), by the name of their layer
    change: float  # of the output, with these weights

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "Repair":
        """Read the result of `tensors`."""
        weights = {name: weight for name, weight in tensors.items() if name != "change"}
        return cls(weights, float(tensors["change"]))

    def tensors(self) -> dict[str, Tensor]:
        """Return the repair as tensors, for a journal."""
        return {**self.weights, "change": torch.tensor(self.change, dtype=torch.float64)}


def shorten_model(job: Job) -> tuple[Removal, Repair]:
    """Choose the blocks to remove, and repair the blocks before the gaps that they leave.

    The plan of the job is a `ShorteningPlan`. The removed blocks stay in the model: `remove_blocks`
    removes them. The weights of the repair are in the model. Both changes of the output are on
    windows that the repair did not see.

    For n blocks of which m are removed, the choice costs at most about n/2 forwards of the compared
    windows for the runs, n/2 for the first step of the greedy search, and m for each of its others:
    a forward starts at the first block that is skipped, on stored hidden states, and ends where the
    set is known to be worse than the best so far. The repair runs each of the other windows twice.

    Raises:
        TargetError: Blocks cannot run on stored hidden states, or not in the order of their list;
            the model without a block computes something else than the model that skips it; or its
            output is not finite.
        HessianError: The inputs of a layer are not finite.
        OutOfMemoryError: There is not enough memory.
        SaveError: The journal cannot be written.
    """
    with started(job) as (padding, _):
        walk = _walk(job, padding)
        job.listener.started(walk.name)
        _check_removal(walk, job)
        fitted = len(walk.batches) - max(1, len(walk.batches) // HELD_OUT)
        skipped = _Skipped(job, walk.twin(walk.batches[max(0, fitted) :]), padding)
        removal = Removal.of(_kept(job, "choice", lambda: choose_blocks(skipped).tensors()))
        repairer = _Repairer(skipped, walk.twin(walk.batches[: max(0, fitted)]), removal)
        repair = Repair.of(_kept(job, "repair", lambda: repairer.repair().tensors()))
        for layer in repairer.layers:
            if layer.name in repair.weights:
                layer.write_(repair.weights[layer.name])
        return removal, repair


def _kept(job: Job, name: str, compute: Callable[[], Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
    return compute() if job.journal is None else job.journal.kept(name, compute)


def _walk(job: Job, padding: Padding) -> Inject:
    """Return a walk over the dense model that runs each block on stored hidden states."""

    def forward(item: Any) -> Any:
        padding.start_batch(job.batch_of(item))
        return job.forward(item)

    walk = choose_walk(
        forward,
        job.batches,
        job.plan.blocks,
        store=CPU if job.settings.offload else None,
        processes=job.processes,
    )
    if not isinstance(walk, Inject):
        raise TargetError(
            "`structure: blocks`: the blocks of this model hand on more than a hidden state, such "
            "as keys and values that later blocks share, so that none can be left out."
        )
    if [block.name for block in walk.blocks] != [block.name for block in job.plan.blocks]:
        order = ", ".join(block.name for block in walk.blocks)
        raise TargetError(
            "`structure: blocks`: the model calls its blocks in another order than that of their "
            f"list: {order}."
        )
    return walk


def _check_removal(walk: Inject, job: Job) -> None:
    """Check, on the first batch, that removing a block is skipping it.

    The block is the first one, without which all others have new numbers.
    """
    plan = job.plan
    assert isinstance(plan, ShorteningPlan)
    if not walk.batches:
        return
    with walk.skipping([0]):
        expected = first_output(walk.finish(0, 0))
    with remove_blocks(plan, [0]):
        output = first_output(walk.finish(0, 0))
    if expected is None or output is None:
        return  # `OutputChange` raises, and names what the model returns
    allowed = _ROUNDING * torch.finfo(expected.dtype).eps * float(expected.float().norm())
    if not float((output.float() - expected.float()).norm()) <= allowed:
        raise TargetError(
            f"`structure: blocks`: a {type(plan.model).__name__} computes something else in its "
            "blocks when they are numbered anew, so that none can be removed. Use another "
            "`structure`, or `sparsity` or `pattern` without one."
        )


class _Skipped:
    """The model without some blocks, compared with the dense model on the batches of a walk.

    The model of the job is dense when `start` is first called.
    """

    def __init__(self, job: Job, walk: Inject, padding: Padding) -> None:
        assert isinstance(job.plan, ShorteningPlan)
        self.job, self.walk, self.padding = job, walk, padding
        self.blocks, self.count = walk.blocks, job.plan.count
        self._output: OutputChange | None = None

    def start(self) -> None:
        """Begin at the first block, for the first time with a run of the dense model."""
        self.walk = self.walk.twin()
        if self._output is None:
            self._output = OutputChange(self.job, self.walk, self.padding, "structure: blocks")
        self._output.walk = self.walk

    def change(self, blocks: Sequence[int], start: int = 0, limit: float = math.inf) -> float:
        """Return the change of the output without some blocks; see `OutputChange.of`.

        The walk must have advanced to the block `start` without those of `blocks` before it.
        """
        assert self._output is not None
        with self.walk.skipping(blocks):
            return self._output.of(start, limit)

    def advance(self, k: int, blocks: Sequence[int] = ()) -> None:
        """Advance the walk past block k of the model without some blocks."""
        with self.walk.skipping(blocks):
            for _ in self.walk.advance(k):
                pass


def choose_blocks(model: _Skipped) -> Removal:
    """Return the best run of consecutive blocks, or a greedy search's blocks if they are better.

    Raises:
        TargetError: The output without any run of blocks is not finite.
    """
    count, number = model.count, len(model.blocks)
    model.start()
    run, run_change = range(0), math.inf
    for start in range(number - count + 1):
        blocks = range(start, start + count)
        name = model.blocks[start].name
        model.job.progress(start, f"{name}, output without {counted(count, 'block')} from here")
        change = model.change(blocks, start, run_change)
        if change < run_change:  # NaN is not
            run, run_change = blocks, change
        if start < number - count:
            model.advance(start)
    if not run:
        raise TargetError(
            f"`structure: blocks`: without any {counted(count, 'consecutive block')} the output is "
            "not finite. Load the model in bfloat16 or float32."
        )
    greedy, change = _greedy(model, run_change) if count > 1 else ([], math.nan)
    if change < run_change:
        return Removal(tuple(sorted(greedy)), change, run_change, change)
    return Removal(tuple(run), run_change, run_change, change)


def _greedy(model: _Skipped, limit: float) -> tuple[list[int], float]:
    """Remove one block after another, each time the one whose removal changes the output least.

    After the first, only the 2m blocks are tried whose removal alone changes it least. Returns the
    blocks, and the change of the output; NaN once no block leaves the change below the limit.
    """
    removed: list[int] = []
    tried: Collection[int] = range(len(model.blocks))
    while len(removed) < model.count:
        model.start()
        changes: dict[int, float] = {}
        for k in range(max(tried) + 1):
            if k in tried:
                others = counted(len(removed), "other block")
                model.job.progress(k, f"{model.blocks[k].name}, output without it and {others}")
                # All changes below the limit count in the first step, and later the least alone.
                bound = min(changes.values(), default=limit) if removed else limit
                changes[k] = model.change([*removed, k], k, bound)
            if k < max(tried):
                model.advance(k, removed)
        # A block may give NaN, which is below no limit.
        changes = {k: change for k, change in changes.items() if change < limit}
        if not changes:
            return [], math.nan
        best = min(changes, key=changes.__getitem__)
        removed.append(best)
        if len(removed) == 1:
            tried = sorted(changes, key=changes.__getitem__)[: 2 * model.count]
        tried = [k for k in tried if k != best]
        if not tried and len(removed) < model.count:
            return [], math.nan
    return removed, changes[best]


class _Repairer:
    """Fits the last layer before each gap to the hidden states of the dense model behind the gap.

    For the inputs x of the layer W in the shortened model, the output y of its block there, and
    the hidden state h of the dense model behind the gap, W + Δ is the layer with

        minimal mean over tokens of ‖h − y − c·Δx‖² + λ‖Δ‖²,

    c being the scale by which the block adds the output of the layer to its own, 1 in most
    families. The solution is Δ = G(H + λI)⁻¹ for H = 2·XᵀX / tokens and G = 2·EᵀX / tokens with
    the rows (h − y)/c of E. The walk, at its start, is over the windows of the fit, and the model
    is compared on others.
    """

    def __init__(self, model: _Skipped, walk: Inject, removal: Removal) -> None:
        self._model, self._job, self._removal = model, model.job, removal
        # Of the dense model and the shortened one, each with the number of the next block.
        self._dense, self._short = walk.twin(), walk.twin()
        self._at = {id(self._dense): 0, id(self._short): 0}

    @property
    def layers(self) -> list[Layer]:
        """All layers in the blocks."""
        return [layer for layers in self._job.plan.layers.values() for layer in layers]

    def repair(self) -> Repair:
        """Fit the layer before each gap in turn; keep its new weight if that lowers the change."""
        self._model.start()  # runs the dense model, if the choice is of an interrupted run
        change, weights = self._removal.change, dict[str, Tensor]()
        for gap in self._removal.gaps:
            name = self._job.plan.blocks[gap.start].name
            result = self._fitted(gap)
            if isinstance(result, str):
                log.info("No repair before %s: %s.", name, result)
                continue
            layer, weight = result
            former, repaired = layer.weight.clone(), math.nan
            layer.write_(weight)
            self._model.start()
            try:
                repaired = self._model.change(self._removal.blocks)
            finally:  # the weight stays as it was after an error, too
                if not repaired < change:
                    layer.write_(former)
            if repaired < change:
                change, weights[layer.name] = repaired, layer.weight.clone()
            else:
                log.info("No repair before %s: it does not lower the change on other text.", name)
        return Repair(weights, change)

    def _fitted(self, gap: range) -> tuple[Layer, Tensor] | str:
        """Return the layer before a gap with its new weight, or why there is none."""
        before = gap.start - 1
        if before < 0:
            return "no block is before it"
        self._advance(self._dense, gap.stop, ())
        self._advance(self._short, before, self._removal.blocks)
        # The first process that has windows decides, so that all fit the same layer.
        known = [*filter(None, self._job.processes.all(self._linear_layer(before)))]
        if not known:
            return "the block before it is linear in no layer's output, or there is no text to fit"
        name, scale = known[0]
        layer = next(layer for layer in self.layers if layer.name == name)
        return self._solved(layer, scale, before, gap.stop - 1)

    def _advance(self, walk: Inject, stop: int, skipped: Sequence[int]) -> None:
        """Advance a walk up to the block `stop`, whose inputs are stored then."""
        with walk.skipping(skipped):
            for k in range(self._at[id(walk)], stop):
                self._job.progress(k, f"{walk.blocks[k].name}, hidden states for the repair")
                for _ in walk.advance(k):
                    pass
        self._at[id(walk)] = stop

    def _linear_layer(self, before: int) -> tuple[str, float] | None:
        """Find the widest layer in whose output its block is linear, by noise on that output.

        Returns the name of the layer, which is called once, and the scale c: if its output moves by
        δ, that of the block moves by c·δ. `None` without windows to fit.
        """
        walk, block = self._short, self._short.blocks[before]
        if not walk.batches or (output := self._output(before, 0)) is None:
            return None
        layers = [
            layer
            for layer in self._job.plan.layers[block.name]
            if isinstance(layer, Linear | Conv1D) and len(layer.weight) == output.shape[-1]
        ]
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(output.shape, generator=generator).to(output) * output.std()
        for layer in sorted(layers, key=lambda layer: -layer.columns):
            calls: list[Tensor] = []

            def add(_: nn.Module, __: Any, output: Tensor, calls: list[Tensor] = calls) -> Tensor:
                calls.append(output)
                return output + noise.reshape(output.shape).to(output)

            with layer.module.register_forward_hook(add):
                moved = self._output(before, 0)
            assert moved is not None
            change = moved - output
            scale = float((change * noise).sum() / noise.square().sum())
            error = float((change - scale * noise).norm() / noise.norm())
            if len(calls) == 1 and scale and error <= _NOT_LINEAR * abs(scale):
                return layer.name, scale
        return None

    def _output(self, k: int, i: int) -> Tensor | None:
        """Return the output of block k of the shortened model for batch i, in float32."""
        with self._short.skipping(self._removal.blocks):
            output = self._short.output(k, i)
        return None if output is None else hidden_of(output).float()

    def _solved(
        self, layer: Layer, scale: float, before: int, behind: int
    ) -> tuple[Layer, Tensor] | str:
        """Return the layer with its new weight, in the dtype of the layer, or why there is none.

        `before` is the number of its block, `behind` that of the last block of the gap, whose dense
        outputs are stored.
        """
        processes = self._job.processes
        hessian = HessianAccumulator(layer.columns, layer.name)
        weight = layer.weight.float()
        cross = torch.zeros_like(weight)  # the sum of EᵀX
        for i in range(len(self._short.batches)):
            self._job.progress(before, f"{layer.name}, inputs {i + 1}")
            inputs: list[tuple[Tensor, Tensor | None]] = []

            def note(module: nn.Module, args: tuple[Any, ...]) -> None:
                rows = self._model.padding.rows(args[0], module, layer.name)
                inputs.append((args[0].detach(), rows))  # noqa: B023 (called in this turn alone)

            with layer.module.register_forward_pre_hook(note):
                output = self._output(before, i)
            aims = self._dense.hidden[i].get(behind)
            if output is None or aims is None:
                continue
            ((x, rows),) = inputs
            errors = (aims.to(output.device).float() - output) / scale
            x, errors = (taken(t.reshape(-1, t.shape[-1])[:, None], rows) for t in (x, errors))
            hessian.update(x)
            cross.addmm_(errors.flatten(0, 1).T, x.flatten(0, 1).float())
        tokens = round(sum(count for (count,) in processes.numbers(hessian.num_tokens)))
        hessian.sum_over(processes, tokens)
        processes.sum_(cross)
        if not tokens:
            return "no tokens reach it"
        matrix = InputHessian(hessian.hessian(), name=layer.name)
        inverse = matrix.damped(self._job.settings.damping).double.inverse
        solution = weight.double() + 2 / tokens * cross.double() @ inverse
        new = solution.to(layer.weight.dtype)
        require_in_range(new, f"layer `{layer.name}`")
        return layer, processes.like_first_(new.contiguous())
