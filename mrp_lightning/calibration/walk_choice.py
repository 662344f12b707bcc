"""Choose a correct walk for a model, by a test on one batch of each kind."""

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
from mrp_lightning.devices import is_out_of_memory
from mrp_lightning.errors import TargetError
from mrp_lightning.processes import ALONE, Processes
from mrp_lightning.targets.blocks import Block

DIRECTIONS = 32
"""The number of directions onto which rows are projected.

The relative error of a distance is then 12% (1/√(2·DIRECTIONS)) if two tensors differ alike in all
columns, and less otherwise."""

_ROWS = 2048  # rows that are projected at a time


@dataclass(frozen=True, eq=False)
class Sketch:
    """The random projection of a tensor."""

    shape: torch.Size  # of the tensor
    projection: Tensor
    """P·X for the rows X (rows, columns) of the tensor: float64 (DIRECTIONS, columns) on the CPU.
    The entries ±1/√DIRECTIONS of P are random, and the same for all tensors."""


def sketch(tensor: Tensor) -> Sketch:
    """Project the rows of a tensor onto a few random directions.

    The mean of ‖P·A − P·B‖² over P is ‖A − B‖², wherever the two differ. NaN counts as 0 and an
    infinity as ±1e30, so that tensors that have them in the same places can be compared.
    """
    rows = torch.atleast_2d(tensor.detach()).flatten(0, -2)
    # The context of the forward may be half precision, by autocast or by default.
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
    """Return ‖output − expected‖ relative to ‖expected − received‖, the block's own update.

    Relative to ‖expected‖, even a walk that skips a block would look correct, since most of the
    output is the residual stream; this is used only if the update is zero, or `received` has
    another shape. The result is infinite if the output has another shape.
    """
    if output.shape != expected.shape:
        return float("inf")
    same = received.shape == expected.shape
    update = expected.projection - received.projection if same else expected.projection
    scale = float(update.norm()) or float(expected.projection.norm()) or 1.0
    return float((output.projection - expected.projection).norm()) / scale


log = logging.getLogger(__name__)

_MOST_KINDS = 8
"""The most kinds of batches in the test: keys that name samples would make each batch a kind."""


@dataclass(eq=False)
class Trace:
    """One forward of the unchanged model: sketches of the hidden states of each first call."""

    order: list[int] = field(default_factory=list)  # the blocks by their first calls
    calls: Counter[int] = field(default_factory=Counter)  # number of calls, by block
    inputs: dict[int, Sketch] = field(default_factory=dict)  # received, by block
    outputs: dict[int, Sketch] = field(default_factory=dict)  # returned, by block
    containers: dict[int, Container | None] = field(default_factory=dict)  # of outputs
    error: str | None = None  # why a block has no hidden state


def trace(forward: Callable[[Any], Any], batch: Any, blocks: Sequence[Block]) -> Trace:
    """Run one batch, and record sketches of the inputs and outputs of all blocks."""
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
    """Return `Inject` if it reproduces the model's forward on a batch of each kind, else `Rerun`.

    The test of a kind takes one whole forward, and then one forward for each block, which runs
    that block alone and stops after it. A single forward for all blocks would be less strict: in
    it, a block could still pass values to later blocks beside the hidden state (Gemma 3n shares
    keys and values), which the walk does not store.

    Args:
        forward: Runs the model on one batch.
        batches: The calibration batches of this process; some process must have one.
        blocks: The blocks, in any order.
        store: The device that stores hidden states; `None` leaves them where they are computed.
        processes: All processes; they test their own batches, and choose the same walk.

    Raises:
        TargetError: A forward calls a block more than once, or no block; the first batches of two
            processes call different blocks; or a batch calls blocks that the first batch does not,
            or in another order. The forwards of the walk raise the last error, too.
    """
    whole_trace, problem = Trace(), None
    if batches:
        whole_trace, problem = _tried(forward, batches, blocks, store)
    gathered = processes.all((whole_trace.order, problem) if batches else None)
    orders = [order for order, _ in filter(None, gathered)]
    if any(order != orders[0] for order in orders):
        raise TargetError(
            "The first batches of the processes run other blocks, or in another order: there is no "
            "block-by-block order for all. Name blocks that always run once and in one order in "
            "`blocks`."
        )
    # Blocks that the first batch does not reach come last, in their own order.
    order = orders[0] + [k for k in range(len(blocks)) if k not in orders[0]]
    ordered = [blocks[k] for k in order]
    forward = in_order(forward, ordered, len(orders[0]))
    problems = [problem for _, problem in filter(None, gathered) if problem is not None]
    if not problems:
        containers = [whole_trace.containers.get(k) for k in order]
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
    """Return the trace of the first batch, and the fault of `Inject` on some batch, if any."""
    first_batch, *other_batches = one_of_each_kind(batches)
    whole_trace = _traced(forward, first_batch, blocks)

    def fault(batch: Any, seen: Trace) -> str | None:
        order = [blocks[k] for k in seen.order]
        containers = [whole_trace.containers.get(k) for k in seen.order]
        return seen.error or _self_test(Inject(forward, [batch], order, containers, store), seen)

    problem = fault(first_batch, whole_trace)
    unreached_blocks = [block for k, block in enumerate(blocks) if k not in whole_trace.order]
    ordered = [*(blocks[k] for k in whole_trace.order), *unreached_blocks]
    # Each kind of batch can take another path through the model. All are traced even after a fault,
    # since only a trace detects a different order of blocks, which no walk supports.
    for batch in other_batches:
        seen = trace(in_order(forward, ordered, len(whole_trace.order)), batch, blocks)
        problem = problem or fault(batch, seen)
    return whole_trace, problem


def _traced(forward: Callable[[Any], Any], batch: Any, blocks: Sequence[Block]) -> Trace:
    """Return the trace of a batch; raise a TargetError if a block is called twice, or none is."""
    whole_trace = trace(forward, batch, blocks)
    repeated = [k for k, n in sorted(whole_trace.calls.items()) if n > 1]
    if repeated:
        listed = ", ".join(f"{blocks[k].name} ({whole_trace.calls[k]} times)" for k in repeated)
        raise TargetError(
            f"Blocks that one forward calls more than once: {listed}. Their weights are shared "
            "between depths (or `predict_step` runs the model several times), so there is no "
            "block-by-block order. Name in `blocks` a module around them that one forward calls "
            "once, on hidden states."
        )
    if not whole_trace.order:
        raise TargetError(
            f"`predict_step` called none of the {len(blocks)} blocks, {blocks[0].name} and so on. "
            "Let it run the model, or name the blocks that it runs in `blocks`."
        )
    return whole_trace


def in_order(
    forward: Callable[[Any], Any], ordered: Sequence[Block], num_reached: int
) -> Callable[[Any], Any]:
    """Wrap a forward to raise a TargetError if a batch's order of blocks is not that of the first.

    A batch may leave blocks out. The first batch called the first `num_reached` of the `ordered`
    blocks, in this order.
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
"""The largest `relative_error` of a block with which `Inject` passes the test."""


def _self_test(walk: Inject, whole_trace: Trace) -> str | None:
    """Return the fault of a walk over one batch, `None` if it reproduces the traced forward."""
    # By induction over the blocks: the input of block k is what the walk computed for the blocks
    # before it, each within the tolerance of the whole forward. The first block that differs is the
    # one to name; errors of later ones follow from it.
    for position, k in enumerate(whole_trace.order):
        name = walk.blocks[position].name
        try:
            output = walk.output(position, 0)
            if output is None:
                return f"{name} was not called"
            walk_sketch = sketch(hidden_of(output))
            # The walk's own output, not the model's, is the next block's input, so that errors
            # add up as they will when the blocks are pruned.
            walk.keep(position, 0, walk.stored(output))
        except Exception as problem:  # of any type: the model's own code runs on stubs
            if is_out_of_memory(problem):
                raise  # `Rerun` needs as much
            return f"{name}: {type(problem).__name__}: {problem}"
        error = relative_error(walk_sketch, whole_trace.outputs[k], whole_trace.inputs[k])
        if not error <= SELF_TEST_TOLERANCE:
            return f"{name}: relative error {error:.1e}"
    return None


def one_of_each_kind(batches: Sequence[Any]) -> list[Any]:
    """Return the first batch of each kind, at most eight, in the order of the batches."""
    # One of each kind suffices: models branch on which arguments are there, not on their values.
    by_kind: dict[Hashable, Any] = {}
    for batch in batches:
        by_kind.setdefault(kind(batch), batch)
    return list(by_kind.values())[:_MOST_KINDS]


def kind(data: Any) -> Hashable:
    """Return the kind of a batch: its keys, its `None` entries, its tensors' dtypes and ranks.

    Lengths of tensors and lists, numbers and strings do not count; whether an `attention_mask` has
    zeros does.
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
