"""Choosing the walk that is right for a model, by trying it on one batch."""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mrp_lightning.calibration.walks import Container, Inject, Rerun, Walk, hidden_input, hidden_of
from mrp_lightning.errors import TargetError
from mrp_lightning.targets.blocks import Block

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Trace:
    """One forward of the untouched model, block by block, in the order of the calls."""

    order: list[int]
    calls: list[int]
    inputs: dict[int, Tensor]
    outputs: dict[int, Any]
    error: str | None = None


def trace(
    run: Callable[[Any], Any], batch: Any, blocks: Sequence[Block], store: torch.device | None
) -> Trace:
    """Run one batch and note what every block is given and gives."""
    seen = Trace([], [0] * len(blocks), {}, {})

    def keep(value: Tensor) -> Tensor:
        return value.detach().to(store or value.device, copy=True)

    def note_input(k: int) -> Any:
        def pre(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.calls[k] += 1
            if seen.calls[k] > 1:
                return
            seen.order.append(k)
            try:
                seen.inputs[k] = keep(hidden_input(args, kwargs)[1])
            except TypeError as error:
                seen.error = str(error)

        return pre

    def note_output(k: int) -> Any:
        def post(_: nn.Module, __: Any, output: Any) -> None:
            if seen.calls[k] > 1:
                return
            try:
                hidden = keep(hidden_of(output))
                packed = isinstance(output, tuple | list)
                container = Container(type(output), len(output)) if packed else None
                seen.outputs[k] = (container, hidden)
            except TypeError as error:
                seen.error = str(error)

        return post

    with ExitStack() as stack:
        for k, block in enumerate(blocks):
            hooks = block.module.register_forward_pre_hook(note_input(k), with_kwargs=True)
            stack.callback(hooks.remove)
            stack.callback(block.module.register_forward_hook(note_output(k)).remove)
        run(batch)
    return seen


def choose_walk(
    run: Callable[[Any], Any],
    batches: Sequence[Any],
    blocks: Sequence[Block],
    *,
    store: torch.device | None = None,
) -> Walk:
    """`Inject` where it reproduces the model's own forward on the first batch, else `Rerun`.

    Args:
        run: Runs the model's forward on one batch.
        batches: The calibration batches.
        blocks: In any order.
        store: Where hidden states are kept; `None` leaves them where they are made.

    Raises:
        TargetError: A block is called more than once in a forward. The runs of the walk raise it,
            too, for a batch that runs other blocks than the first one, or in another order.
    """
    real = trace(run, batches[0], blocks, store)
    repeated = [f"{blocks[k].name} ({n} times)" for k, n in enumerate(real.calls) if n > 1]
    if repeated:
        raise TargetError(
            f"Blocks that one forward calls more than once: {', '.join(repeated)}. Their weights "
            "are shared between depths (or `predict_step` runs the model several times), so there "
            "is no block-by-block order. Let `predict_step` run the model once, or name other "
            "blocks in `blocks`."
        )
    if not real.order:
        raise TargetError(
            f"`predict_step` called none of the {len(blocks)} blocks, {blocks[0].name} and so on. "
            "Let it run the model, or name the blocks that it runs in `blocks`."
        )
    order = real.order + [k for k in range(len(blocks)) if k not in real.order]
    ordered = [blocks[k] for k in order]
    problem = real.error or _self_test(run, batches[0], ordered[: len(real.order)], real, store)
    run = in_order(run, ordered, len(real.order))
    if problem is None:
        containers = [real.outputs[k][0] if k in real.outputs else None for k in order]
        return Inject(run, batches, ordered, containers, store)
    log.warning(
        "Running blocks on stored inputs does not reproduce this model's forward (%s). "
        "Falling back to full re-runs: right, but with a forward up to each block.",
        problem,
    )
    return Rerun(run, batches, ordered)


def in_order(
    run: Callable[[Any], Any], ordered: Sequence[Block], num_reached: int
) -> Callable[[Any], Any]:
    """Let no batch run the blocks otherwise than the first one did; leaving some out is allowed.

    The walk stops each forward at the block that it runs, so what comes after the last is not seen.

    Args:
        run: Runs the model's forward on one batch.
        ordered: The blocks in the order of the first batch.
        num_reached: How many of them it ran; the others come after those.
    """

    def guarded(batch: Any) -> Any:
        called: list[int] = []

        def note(position: int) -> Any:
            def pre(_: nn.Module, __: Any) -> None:
                if position >= num_reached:
                    raise TargetError(
                        f"Some batches run {ordered[position].name}, which the first batch does "
                        "not. Let the first batch be one that runs all blocks, or name those to "
                        "walk in `blocks`."
                    )
                if called and position <= called[-1]:
                    raise TargetError(
                        f"A batch runs {ordered[position].name} after {ordered[called[-1]].name}, "
                        "other than the first batch: there is no block-by-block order for all. "
                        "Name blocks that always run once and in one order in `blocks`."
                    )
                called.append(position)

            return pre

        with ExitStack() as stack:
            for position, block in enumerate(ordered):
                handle = block.module.register_forward_pre_hook(note(position))
                stack.callback(handle.remove)
            return run(batch)

    return guarded


SELF_TEST_TOLERANCE = 1e-3


def _self_test(
    run: Callable[[Any], Any],
    batch: Any,
    ordered: Sequence[Block],
    real: Trace,
    store: torch.device | None,
) -> str | None:
    """What is wrong with `Inject` on this batch, `None` if nothing is."""
    containers = [real.outputs[k][0] for k in real.order]
    walk = Inject(run, [batch], ordered, containers, store)
    for position, k in enumerate(real.order):
        try:
            for _ in walk.advance(position):
                pass
        except Exception as problem:  # whatever a stubbed model stumbles over
            return f"{ordered[position].name}: {type(problem).__name__}: {problem}"
        ended = walk.ends.get(position)
        hidden = (ended or walk.hidden)[0]
        if hidden is None:
            return f"{ordered[position].name} was not called"
        error = relative_error(hidden, real.outputs[k][1], real.inputs[k])
        if not error <= SELF_TEST_TOLERANCE:
            return f"{ordered[position].name}: relative error {error:.1e}"
    return None


def relative_error(output: Tensor, expected: Tensor, given: Tensor) -> float:
    """‖output − expected‖ relative to ‖expected − given‖, the block's own update.

    Relative to the output itself, a walk that leaves a block's work out would look right: most of
    the output is the residual stream.
    """
    if output.shape != expected.shape:
        return float("inf")
    output, expected, given = (t.double().nan_to_num() for t in (output, expected, given))
    update = expected - given if given.shape == expected.shape else expected
    scale = float(update.norm()) or float(expected.norm()) or 1.0
    return float((output - expected).norm()) / scale
