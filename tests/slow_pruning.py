"""Pruning a tiny model as the package does, and slowly: full forwards, all inputs kept."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from mrp_lightning import prune_weight
from mrp_lightning.journal.journal import Journal
from mrp_lightning.processes import ALONE, Processes
from mrp_lightning.pruning import sequential
from mrp_lightning.pruning.block import LayerSolver
from mrp_lightning.pruning.job import Job, Listener
from mrp_lightning.pruning.settings import Settings
from mrp_lightning.records.block_result import BlockResult
from mrp_lightning.records.report import PruningReport
from mrp_lightning.targets.layers import is_conv1d, is_linear
from mrp_lightning.targets.plan import make_plan

Batches = list[dict[str, Tensor]]
BLOCKS = {
    "llama": "model.layers",
    "gemma3_text": "model.layers",
    "opt": "model.decoder.layers",
    "bloom": "transformer.h",
    "gpt2": "transformer.h",
}


class Killed(BaseException):
    """Stands for the end of the process."""


@contextmanager
def killed_after(entries: int) -> Iterator[None]:
    """End the process after so many entries of its journal."""
    write, written = Journal.write, []

    def write_and_die(self: Journal, step: int, result: BlockResult) -> None:
        write(self, step, result)
        written.append(step)
        if len(written) == entries:
            raise Killed

    with mock.patch.object(Journal, "write", write_and_die), pytest.raises(Killed):
        yield


@contextmanager
def stopped_at(block: int, solver: Any = LayerSolver) -> Iterator[None]:
    """Let a pruning fail when it comes to a block."""
    prune = solver.prune

    def stop(self: Any, walked: Any) -> Any:
        if walked.k == block:
            raise RuntimeError("stopped here")
        return prune(self, walked)

    failing = pytest.raises(RuntimeError, match="stopped here")
    with mock.patch.object(solver, "prune", stop), failing:
        yield


class Dying(Journal):
    """Ends the process after two blocks."""

    def write(self, step: int, result: BlockResult) -> None:
        super().write(step, result)
        if step == 1:
            raise Killed


def prune_model(
    model: nn.Module,
    batches: Batches,
    *,
    pattern: str | None = "2:4",
    sparsity: float | None = None,
    method: str = "SM",
    tolerance: float = 1e-6,
    beyond: dict[str, Any] | None = None,
    offload: bool = False,
    say: Callable[[str], None] = lambda _: None,
    forward: Callable[[Any], Any] | None = None,
    processes: Processes = ALONE,
    journal: Journal | None = None,
    **choices: Any,
) -> PruningReport:
    settings = Settings(
        sparsity=sparsity,
        pattern=pattern,
        method=method,
        tolerance=tolerance,
        offload=offload,
        **beyond or {},
    )
    listener = Listener()
    listener.log = say
    job = Job(
        model=model,
        forward=forward or (lambda batch: model(**batch)),
        batches=batches,
        plan=make_plan(model, settings.recipe.pattern, **choices),
        settings=settings,
        listener=listener,
        processes=processes,
        journal=journal,
    )
    sequential.prune_model(job)
    return report_of(job)


def report_of(job: Job) -> PruningReport:
    """The report of what a job has pruned, as a run makes it."""
    listener = job.listener
    walk = {} if listener.walk is None else {"walk": listener.walk}
    return PruningReport.of(
        listener.results,
        {"method": job.settings.method, "pattern": job.settings.pattern, **walk},
        **asdict(listener.usage),
        resumed_blocks=listener.resumed_blocks,
    )


def inputs_of(model: nn.Module, layers: list[nn.Module], batches: Batches) -> list[Tensor]:
    """All tokens that layers see, in full forwards; padding cut by hand."""
    seen: list[list[Tensor]] = [[] for _ in layers]
    for batch in batches:
        kept = batch["attention_mask"].flatten().bool()
        handles = [
            layer.register_forward_pre_hook(
                lambda _, args, k=k, kept=kept: seen[k].append(
                    args[0].reshape(len(kept), -1)[kept].clone()
                )
            )
            for k, layer in enumerate(layers)
        ]
        model(**batch)
        for handle in handles:
            handle.remove()
    return [torch.cat(rows).double() for rows in seen]


# A certified relative loss of 1e-6 leaves a distance of 1e-3 between weights, in which the masks of
# later blocks can differ where two weights are almost equally dispensable. So could, on some
# machines, the 1e-4 of a loss of 1e-8.
TOLERANCE = 1e-10


def slow_prune(
    model: nn.Module, path: str, batches: Batches, dense: nn.Module | None = None, name: str = ""
) -> None:
    """Prune `model`; with `dense`, a copy of it, towards what the layers give in that."""
    blocks = model.get_submodule(path)
    dense_blocks = blocks if dense is None else dense.get_submodule(path)
    for block, dense_block in zip(blocks, dense_blocks, strict=True):
        layers, twins = linear_of(block, name), linear_of(dense_block, name)
        given = inputs_of(model, layers, batches)
        dense_given = given if dense is None else inputs_of(dense, twins, batches)
        for layer, x, x_d in zip(layers, given, dense_given, strict=True):
            hessian = 2 * x.T @ x / len(x)
            weight = layer.weight.T if is_conv1d(layer) else layer.weight
            if dense is not None:
                weight = aimed(weight, hessian, 2 * x_d.T @ x / len(x))
            solution = prune_weight(
                weight, hessian.float(), pattern="2:4", method="SM", tolerance=TOLERANCE
            )
            pruned = solution.weight.T if is_conv1d(layer) else solution.weight
            layer.weight.copy_(pruned)


def aimed(weight: Tensor, hessian: Tensor, cross: Tensor) -> Tensor:
    """W + ½W(C − H)(H + λI)⁻¹, solved in float64."""
    diagonal = hessian.diagonal()
    ridge = 0.01 * diagonal[diagonal > 0].mean() * torch.eye(len(hessian), dtype=torch.float64)
    missing = weight.double() @ (cross - hessian)
    change = torch.linalg.solve(hessian + ridge, missing, left=False)
    return (weight.double() + change / 2).float()


def linear_of(block: nn.Module, name: str) -> list[Any]:
    """The linear layers of a block whose names end so."""
    return [x for full, x in block.named_modules() if is_linear(x) and full.endswith(name)]


def assert_same_weights(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a == 0, b == 0), name
        assert (a - b).norm() <= 1e-3 * b.norm(), name
