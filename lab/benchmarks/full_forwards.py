"""Prune a tiny model, comparing every block that the walk runs with a full forward."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from families import batches, build, runner
from torch import Tensor, nn

from mrp_lightning.pruning.job import Job, Listener
from mrp_lightning.pruning.sequential import prune_model
from mrp_lightning.pruning.settings import Settings
from mrp_lightning.records.rows import LayerReport
from mrp_lightning.targets.plan import Plan, make_plan


@dataclass(eq=False)
class CheckedRun:
    """A pruned model, and the errors of its walk relative to full forwards.

    Attributes:
        model: The pruned model.
        plan: The blocks and layers of the model.
        listener: The listener of the pruning, which has its results.
        errors: By block, the largest error of a run of it: the distance of its output, or of its
            input, from those in a full forward of the model as it was at that moment, relative to
            ‖output − input‖ of the block, what it adds to the residual stream (to ‖output‖, where
            the two differ in shape).
    """

    model: nn.Module
    plan: Plan
    listener: Listener
    errors: dict[str, float] = field(default_factory=dict)

    @property
    def rows(self) -> list[LayerReport]:
        """The rows of all layers, those that stayed dense included."""
        return [row for result in self.listener.results for row in result.rows]

    @property
    def error(self) -> float:
        """The largest of all blocks."""
        return max(self.errors.values())


def prune_and_compare(
    family: str, *, padding: bool = True, use_cache: bool | None = None, pattern: str = "2:4"
) -> CheckedRun:
    """Prune the tiny model of a family; compare each run of a block with a full forward.

    The full forward is that of a second model, to which the weights of the first are copied every
    time: it shares neither hooks nor stubs with the walk.
    """
    model, twin = build(family), build(family)
    settings = Settings(pattern=pattern, method="SM")
    plan = make_plan(model, settings.recipe.pattern)
    done = CheckedRun(model, plan, Listener())
    names = [block.name for block in plan.blocks]
    run, run_twin = (runner(m, use_cache=use_cache) for m in (model, twin))

    with ExitStack() as stack:
        seen = stack.enter_context(recorded(model, names))
        expected = stack.enter_context(recorded(twin, names))

        def run_and_compare(batch: Any) -> Any:
            seen.clear()
            try:
                return run(batch)
            except BaseException:
                # The walk stopped the forward after the block that it runs. Before it has said
                # which walk it takes, it only tries.
                if seen and done.listener.walk is not None:
                    compare(batch)
                raise

        def compare(batch: Any) -> None:
            name = list(seen)[-1]
            expected.clear()
            twin.load_state_dict(model.state_dict())
            with torch.no_grad():
                run_twin(batch)
            error = distance(seen[name], expected[name])
            done.errors[name] = max(error, done.errors.get(name, 0.0))

        job = Job(
            model=model,
            forward=run_and_compare,
            batches=batches(family, padding=padding),
            plan=plan,
            settings=settings,
            listener=done.listener,
        )
        prune_model(job)
    return done


@contextmanager
def recorded(model: nn.Module, names: list[str]) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Record the input and output of each block, in the order of their calls."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def note(name: str) -> Callable[..., None]:
        def post(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            given = args[0] if args else kwargs["hidden_states"]
            seen[name] = given.clone(), (output if torch.is_tensor(output) else output[0]).clone()

        return post

    blocks = [model.get_submodule(name) for name in names]
    handles = [
        block.register_forward_hook(note(name), with_kwargs=True)
        for name, block in zip(names, blocks, strict=True)
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def distance(walked: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> float:
    """Of inputs and outputs, relative to the block's own update."""
    for ours, theirs in zip(walked, expected, strict=True):
        if ours.shape != theirs.shape or not torch.equal(ours.isnan(), theirs.isnan()):
            return float("inf")
    pairs = list(zip(walked, expected, strict=True))
    given, output = (theirs.nan_to_num() for theirs in expected)
    added = output - given if output.shape == given.shape else output  # of a stage of Swin
    return max(float((a.nan_to_num() - b.nan_to_num()).norm() / added.norm()) for a, b in pairs)
