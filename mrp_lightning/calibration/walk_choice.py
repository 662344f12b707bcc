"""Choose the walk that is right for a model, by trying it on one batch of each kind."""

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mrp_lightning.calibration.walks import (
    Container,
    Inject,
    Rerun,
    Walk,
    every_layer_called,
    hidden_input,
    hidden_of,
)
from mrp_lightning.environment import is_out_of_memory
from mrp_lightning.errors import TargetError
from mrp_lightning.processes import ALONE, Processes
from mrp_lightning.targets.blocks import Block

DIRECTIONS = 32
"""The number of directions that rows are projected onto. A distance is then known to 12% of it
(1/√(2·DIRECTIONS)) where two tensors differ alike in all columns, and better elsewhere."""

_ROWS = 2048  # projected at a time


@dataclass(frozen=True, eq=False)
class Sketch:
    """The random projection of a tensor."""

    shape: torch.Size  # that of the tensor
    projection: Tensor
    """P·X of the rows X (rows, columns) of the tensor, float64 (DIRECTIONS, columns) on the CPU,
    with entries ±1/√DIRECTIONS of P that are drawn at random, but alike for all tensors."""


def sketch(tensor: Tensor) -> Sketch:
    """Project the rows of a tensor onto a few random directions.

    The mean of ‖P·A − P·B‖² over P is ‖A − B‖², wherever the two differ. NaN counts as 0 and an
    infinity as ±1e30, so that tensors that have them in the same places can be compared.
    """
    rows = torch.atleast_2d(tensor.detach()).flatten(0, -2)
    # A forward may run in half precision, by autocast or by default.
    exact = {"device": rows.device, "dtype": torch.float32}
    generator = torch.Generator().manual_seed(0)
    projection = torch.zeros(DIRECTIONS, rows.shape[1], **exact)
    with torch.autocast(rows.device.type, enabled=False):
        for chunk in rows.split(_ROWS):
            signs = torch.randint(2, (DIRECTIONS, len(chunk)), generator=generator, device="cpu")
            finite = chunk.float().nan_to_num(0.0, 1e30, -1e30)
            projection += signs.mul_(2).sub_(1).to(**exact) @ finite
    return Sketch(tensor.shape, projection.cpu().double() / DIRECTIONS**0.5)


def relative_error(output: Sketch, expected: Sketch, received: Sketch) -> float:
    """‖output − expected‖ relative to ‖expected − given‖, the block's own update.

    Relative to the output itself, a walk that leaves a block's work out would look right: most of
    the output is the residual stream.
    """
    if output.shape != expected.shape:
        return float("inf")
    same = received.shape == expected.shape
    update = expected.projection - received.projection if same else expected.projection
    scale = float(update.norm()) or float(expected.projection.norm()) or 1.0
    return float((output.projection - expected.projection).norm()) / scale


log = logging.getLogger(__name__)

_MOST_KINDS = 8
"""Most kinds that are tried: keys that name samples would make every batch a kind of its own."""


@dataclass(eq=False)
class Trace:
    """One forward of the untouched model; hidden states are by block, at its first call."""

    order: list[int] = field(default_factory=list)  # of the first calls
    calls: Counter[int] = field(default_factory=Counter)  # how often each was called
    inputs: dict[int, Sketch] = field(default_factory=dict)  # of the hidden state that it was given
    outputs: dict[int, Sketch] = field(default_factory=dict)  # of the one that it returned
    containers: dict[int, Container | None] = field(default_factory=dict)  # how it returned that
    error: str | None = None  # why a hidden state could not be found


def trace(forward: Callable[[Any], Any], batch: Any, blocks: Sequence[Block]) -> Trace:
    """Run one batch and note what every block is given and gives; no hidden state is kept."""
    seen = Trace()

    def note_input(k: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.calls[k] += 1
        if seen.calls[k] > 1:
            return
        seen.order.append(k)
        try:
            seen.inputs[k] = sketch(hidden_input(args, kwargs))
        except TypeError as error:
            seen.error = f"{blocks[k].name}: {error}"

    def note_output(k: int, _: nn.Module, __: Any, output: Any) -> None:
        if seen.calls[k] > 1:
            return
        try:
            seen.outputs[k] = sketch(hidden_of(output))
            packed = isinstance(output, tuple | list)
            seen.containers[k] = Container(type(output), len(output)) if packed else None
        except TypeError as error:
            seen.error = f"{blocks[k].name}: {error}"

    with ExitStack() as stack:
        for k, block in enumerate(blocks):
            module, note = block.module, partial(note_input, k)
            stack.enter_context(module.register_forward_pre_hook(note, with_kwargs=True))
            stack.enter_context(module.register_forward_hook(partial(note_output, k)))
        stack.enter_context(every_layer_called())
        forward(batch)
    return seen


def choose_walk(
    forward: Callable[[Any], Any],
    batches: Sequence[Any],
    blocks: Sequence[Block],
    *,
    store: torch.device | None = None,
    processes: Processes = ALONE,
) -> Walk:
    """`Inject` where it reproduces the model's own forward on a batch of each kind, else `Rerun`.

    For each kind, it takes one whole forward, and then one per block that runs this block alone and
    stops behind it. One forward for all of them would be less strict: what a block hands to later
    ones beside the hidden state, as Gemma 3n hands over keys and values, would be there, and in the
    walk not. Of the whole forward only sketches are kept, of the others one hidden state at a time.

    The blocks may be in any order. Each process tries its own batches (none if another has some),
    and all of them walk in the same way.

    Raises:
        TargetError: A block is called more than once in a forward, or none is called, or the first
            batches of two processes call other blocks, or a batch of another kind runs other blocks
            than the first one, or in another order. The forwards of the walk raise that, too.
    """
    real, problem = _tried(forward, batches, blocks, store) if batches else (Trace(), None)
    gathered = processes.all((real.order, problem) if batches else None)
    orders = [order for order, _ in filter(None, gathered)]
    if any(order != orders[0] for order in orders):
        raise TargetError(
            "The first batches of the processes run other blocks, or in another order: there is no "
            "block-by-block order for all. Name blocks that always run once and in one order in "
            "`blocks`."
        )
    order = orders[0] + [k for k in range(len(blocks)) if k not in orders[0]]
    ordered = [blocks[k] for k in order]
    forward = in_order(forward, ordered, len(orders[0]))
    problems = [problem for _, problem in filter(None, gathered) if problem is not None]
    if not problems:
        containers = [real.containers.get(k) for k in order]
        return Inject(forward, batches, ordered, containers, store)
    log.warning(
        "Running blocks on stored inputs does not reproduce this model's forward (%s). "
        "Falling back to full re-runs: right, but with a forward up to each block.",
        problems[0],
    )
    return Rerun(forward, batches, ordered, store)


def _tried(
    forward: Callable[[Any], Any],
    batches: Sequence[Any],
    blocks: Sequence[Block],
    store: torch.device | None,
) -> tuple[Trace, str | None]:
    """The trace of the first batch, and the fault of `Inject` on a batch of any kind, if any."""
    first, *others = one_of_each_kind(batches)
    real = _traced(forward, first, blocks)
    problem = real.error or _self_test(forward, first, blocks, real, real.containers, store)
    rest = [block for k, block in enumerate(blocks) if k not in real.order]
    ordered = [*(blocks[k] for k in real.order), *rest]
    for batch in others:
        seen = trace(in_order(forward, ordered, len(real.order)), batch, blocks)
        problem = problem or seen.error
        problem = problem or _self_test(forward, batch, blocks, seen, real.containers, store)
    return real, problem


def _traced(forward: Callable[[Any], Any], batch: Any, blocks: Sequence[Block]) -> Trace:
    """Return the trace of a batch that runs some of the blocks, each once."""
    real = trace(forward, batch, blocks)
    repeated = [f"{blocks[k].name} ({n} times)" for k, n in sorted(real.calls.items()) if n > 1]
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
    return real


def in_order(
    forward: Callable[[Any], Any], ordered: Sequence[Block], num_reached: int
) -> Callable[[Any], Any]:
    """Let no batch run the blocks otherwise than the first one did; leaving some out is allowed.

    The walk stops each forward at the block that it runs, so what comes after the last is not seen.
    The first batch ran the first `num_reached` of the ordered blocks, in this order.
    """

    def guarded(batch: Any) -> Any:
        called: list[int] = []

        def note(position: int, _: nn.Module, __: Any) -> None:
            if position >= num_reached:
                raise TargetError(
                    f"Some batches run {ordered[position].name}, which the first batch does not. "
                    "Let the first batch be one that runs all blocks, or name those to walk in "
                    "`blocks`."
                )
            if called and position <= called[-1]:
                raise TargetError(
                    f"A batch runs {ordered[position].name} after {ordered[called[-1]].name}, "
                    "other than the first batch: there is no block-by-block order for all. Name "
                    "blocks that always run once and in one order in `blocks`."
                )
            called.append(position)

        with ExitStack() as stack:
            for position, block in enumerate(ordered):
                hook = block.module.register_forward_pre_hook(partial(note, position))
                stack.enter_context(hook)
            return forward(batch)

    return guarded


SELF_TEST_TOLERANCE = 1e-3


def _self_test(
    forward: Callable[[Any], Any],
    batch: Any,
    blocks: Sequence[Block],
    real: Trace,
    containers: Mapping[int, Container | None],
    store: torch.device | None,
) -> str | None:
    """Find the fault of `Inject` on this batch, `None` if it has none."""
    order = [blocks[k] for k in real.order]
    walk = Inject(forward, [batch], order, [containers[k] for k in real.order], store)
    for position, k in enumerate(real.order):
        name = walk.blocks[position].name
        try:
            output = walk.output(position, 0)
            if output is None:
                return f"{name} was not called"
            ours = sketch(hidden_of(output))
            walk.keep(position, 0, walk.stored(output))
        except Exception as problem:  # whatever a stubbed model stumbles over
            if is_out_of_memory(problem):
                raise
            return f"{name}: {type(problem).__name__}: {problem}"
        error = relative_error(ours, real.outputs[k], real.inputs[k])
        if not error <= SELF_TEST_TOLERANCE:
            return f"{name}: relative error {error:.1e}"
    return None


def one_of_each_kind(batches: Sequence[Any]) -> list[Any]:
    """Return the first batch of each kind, of eight at most, in the order of the batches."""
    by_kind: dict[Hashable, Any] = {}
    for batch in batches:
        by_kind.setdefault(kind(batch), batch)
    return list(by_kind.values())[:_MOST_KINDS]


def kind(data: Any) -> Hashable:
    """The kind of a batch: its keys, where it has `None`, the dtypes and ranks of its tensors.

    The lengths of tensors and of lists, and numbers and texts, do not tell kinds apart; whether an
    `attention_mask` leaves anything out does.
    """
    if isinstance(data, Tensor):
        return data.dtype, data.ndim
    if isinstance(data, Mapping):
        return frozenset((key, _is_padded(key, value), kind(value)) for key, value in data.items())
    if isinstance(data, tuple):
        return tuple(map(kind, data))
    if isinstance(data, list):
        return frozenset(map(kind, data))
    if is_dataclass(data) and not isinstance(data, type):
        return type(data), tuple(kind(getattr(data, field.name)) for field in fields(data))
    return (type(data),)


def _is_padded(key: Any, value: Any) -> bool:
    return key == "attention_mask" and isinstance(value, Tensor) and not bool(value.all())
