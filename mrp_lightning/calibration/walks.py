"""Run the blocks of a model one at a time, each on the outputs of those before it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mrp_lightning.targets.blocks import Block
from mrp_lightning.targets.layers import Layer


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of one object, usually a method of its class, in this context.

    Replacements nest. A module keeps its hooks.
    """
    attributes = vars(owner)
    replaced = {name: attributes[name]} if name in attributes else {}
    attributes[name] = value
    try:
        yield
    finally:
        attributes.pop(name, None)
        attributes.update(replaced)


@contextmanager
def every_layer_called() -> Iterator[None]:
    """Switch off the fused path of torch's own encoders and attention, in which no hook fires."""
    was_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_enabled)


class StopForward(BaseException):
    """Ends a forward early. It is no `Exception`, so that models do not catch it."""


class Walk(ABC):
    """A way to run one block on all calibration batches.

    `forward` runs the model on an item of `batches`. The blocks are in the order in which the model
    calls them. Hidden states are stored on the device `store`; `None` leaves them where they are
    computed.
    """

    name: str  # in the report

    def __init__(
        self,
        forward: Callable[[Any], Any],
        batches: Sequence[Any],
        blocks: Sequence[Block],
        store: torch.device | None = None,
    ) -> None:
        self.forward, self.batches, self.blocks = forward, batches, list(blocks)
        self.store = store

    def twin(self) -> "Walk":
        """Return another walk over the same model and batches, at its start."""
        return type(self)(self.forward, self.batches, self.blocks, self.store)

    def runs_after(self, k: int) -> Sequence[Block]:
        """Return the blocks that the walk still runs after block k."""
        return self.blocks[k + 1 :]

    def advance(self, k: int) -> Iterator[int]:  # noqa: ARG002
        """Make the present outputs of block k the inputs of the next; yield each finished batch."""
        yield from ()

    def keep(self, k: int, i: int, hidden: Tensor | None) -> None:
        """Store the hidden state that block k returned for batch i, an input of the next block."""
        del k, i, hidden  # only `Inject` stores hidden states

    def stored(self, output: Any) -> Tensor | None:
        """Return the hidden state in an output, detached and on `store`; `None` for no output."""
        if output is None:
            return None
        hidden = hidden_of(output).detach()
        return hidden if self.store is None else hidden.to(self.store)

    def finish(self, k: int, i: int) -> Any:  # noqa: ARG002
        """Run batch i from block k, on the outputs of the blocks before it, to the model's end."""
        with every_layer_called():
            return self.forward(self.batches[i])

    @abstractmethod
    def output(self, k: int, i: int) -> Any:
        """Run block k on batch i, on the outputs of the blocks before it as they are now.

        Returns the block's output; `None` if the batch does not reach the block.
        """

    def _run_to(self, k: int, i: int) -> Any:
        """Run the forward on batch i up to block k, and return that block's output."""
        outputs: list[Any] = []

        def post(_: nn.Module, __: Any, output: Any) -> None:
            outputs.append(output)
            raise StopForward

        with (
            self.blocks[k].module.register_forward_hook(post),
            suppress(StopForward),
            every_layer_called(),
        ):
            self.forward(self.batches[i])
        return outputs[0] if outputs else None


class WholeModel(Walk):
    """A walk of one step, the whole forward, for models and layers without blocks."""

    name = "whole model"

    def output(self, k: int, i: int) -> Any:
        """Run batch i through the whole model, and return its output."""
        return self.finish(k, i)


class ToHead(Walk):
    """A walk of one step, from the outputs of k walked blocks to the inputs of the output head."""

    name = "to the head"

    def __init__(self, walk: Walk, k: int, head: nn.Module) -> None:
        super().__init__(walk.forward, walk.batches, [Block("", head, "")])
        self._walk, self._first = walk, k

    def output(self, k: int, i: int) -> None:
        """Run batch i up to the call of the head, which has no output then."""

        def stop(*_: Any) -> None:
            raise StopForward

        # The hooks that observe the head's inputs were added earlier, and so are called earlier.
        with self.blocks[k].module.register_forward_pre_hook(stop), suppress(StopForward):
            self._walk.finish(self._first, i)


class Rerun(Walk):
    """Run the model up to block k: correct for every model, but a forward for each block."""

    name = "rerun"

    def runs_after(self, k: int) -> Sequence[Block]:  # noqa: ARG002
        """Return all blocks, since every forward starts with the first."""
        return self.blocks

    def output(self, k: int, i: int) -> Any:
        """Run batch i from the start, and return the output of block k."""
        return self._run_to(k, i)


class Inject(Walk):
    """Run the model's forward with stubs for the blocks before k, which return stored outputs.

    For each batch and each chain of blocks that was begun (such as the encoder's, when the
    decoder is walked), the output of the last block that the batch reached is stored. The stub of
    that block returns it, and all other stubs return their input. Between the last stub and block k
    the model's own code runs, which may add to the hidden state.

    Args:
        containers: The form in which each block returns its hidden state, by the number of the
            block; `None` for a bare tensor.
    """

    name = "inject"

    def __init__(
        self,
        forward: Callable[[Any], Any],
        batches: Sequence[Any],
        blocks: Sequence[Block],
        containers: Sequence["Container | None"],
        store: torch.device | None = None,
    ) -> None:
        super().__init__(forward, batches, blocks, store)
        self.containers = containers
        self.hidden: list[dict[int, Tensor]] = [{} for _ in batches]  # of each batch, by block

    def twin(self, batches: Sequence[Any] | None = None) -> "Inject":
        """Return another walk over the same model, at its start, on the same or other batches."""
        batches = self.batches if batches is None else batches
        return Inject(self.forward, batches, self.blocks, self.containers, self.store)

    @contextmanager
    def skipping(self, removed: Iterable[int]) -> Iterator[None]:
        """Replace blocks by the identity in this context, in every forward of the model."""
        with ExitStack() as stack:
            for k in removed:
                stub = _stub(self.containers[k], None)
                stack.enter_context(replaced(self.blocks[k].module, "forward", stub))
            yield

    def advance(self, k: int) -> Iterator[int]:
        """Store the outputs of block k in place of its inputs."""
        # 1. Before: `hidden[i]` holds the inputs of block k. After: its outputs, with the weights
        #    that the block has now, which are the pruned ones.
        # 2. In place, batch by batch: output(k, i) reads `hidden[i]` alone, so that one hidden
        #    state a batch suffices, where two would double the largest store of a run.
        for i in range(len(self.batches)):
            self.keep(k, i, self.stored(self.output(k, i)))
            yield i

    def keep(self, k: int, i: int, hidden: Tensor | None) -> None:
        """Store the hidden state, if there is one, in place of the chain's last one."""
        if hidden is not None:
            chain = self.blocks[k].chain
            # One hidden state for each chain: a decoder's blocks still need the encoder's last.
            other_chains = {
                j: x for j, x in self.hidden[i].items() if self.blocks[j].chain != chain
            }
            self.hidden[i] = {**other_chains, k: hidden}

    def output(self, k: int, i: int) -> Any:
        """Run batch i up to block k with stubs that return stored outputs."""
        with self._stubs(k, i):
            return self._run_to(k, i)

    def finish(self, k: int, i: int) -> Any:
        """Run batch i to the model's end with stubs that return stored outputs."""
        with self._stubs(k, i):
            return super().finish(k, i)

    @contextmanager
    def _stubs(self, k: int, i: int) -> Iterator[None]:
        """Replace the blocks before k by stubs that return the stored outputs of batch i."""
        with ExitStack() as stack:
            # Only the last block of each chain has a stored output; the stubs before it pass on
            # their input, whatever it is, since the next stored output replaces it. So a forward
            # costs the embeddings, block k, and the model's own code between blocks: nothing of it
            # is imitated here.
            for j, block in enumerate(self.blocks[:k]):
                stub = _stub(self.containers[j], self.hidden[i].get(j))
                stack.enter_context(replaced(block.module, "forward", stub))
            yield


@dataclass(frozen=True)
class Container:
    """The tuple or list in which a block returns its hidden state, as the first item."""

    kind: type
    length: int


def _stub(container: Container | None, stored: Tensor | None) -> Callable[..., Any]:
    """Return a `forward` that returns the stored output, or its hidden input if there is none."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden = hidden_input(args, kwargs)
        if stored is not None:
            # A copy, since the model and its blocks may modify it in place.
            hidden = stored.to(hidden.device, copy=True)
        if container is None:
            return hidden
        return container.kind([hidden, *[None] * (container.length - 1)])

    return forward


def hidden_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the hidden state among a block's arguments; raise a TypeError if there is none."""
    if args and isinstance(args[0], Tensor):
        return args[0]
    if isinstance(kwargs.get("hidden_states"), Tensor):
        return kwargs["hidden_states"]
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    raise TypeError("the block is given no tensor")


def hidden_of(output: Any) -> Tensor:
    """Return the hidden state in a block's output; raise a TypeError if there is none."""
    hidden = output[0] if isinstance(output, tuple | list) else output
    if not isinstance(hidden, Tensor):
        raise TypeError(f"the block returns a {type(output).__name__}")
    return hidden


class DenseStream:
    """A second walk, over the dense model, without a second copy of the model.

    It advances with the `walk` over the model that is being pruned. The dense weights of the
    present block's pruned layers are copied and swapped back in for each of its forwards, so the
    weights of one block are in memory twice; those of all pruned layers are if the walk runs all
    blocks in every forward (`Rerun`). `keeps_outputs` stores `outputs` even if the walk needs none.
    """

    def __init__(self, walk: Walk, *, keeps_outputs: bool = False) -> None:
        # By batch: the dense output of the last advanced block, on the walk's store; `None` if the
        # batch does not reach that block, or outputs are not kept.
        self.outputs: list[Tensor | None] = [None] * len(walk.batches)
        self._walk = walk.twin()
        self._keeps_outputs = keeps_outputs or isinstance(self._walk, Inject)
        # By the name of the parameter, since a move may replace a module's parameter objects.
        self._dense: dict[str, tuple[Layer, Tensor]] = {}

    def remember(self, layer: Layer) -> None:
        """Copy a layer's dense weight, before the layer is pruned."""
        if layer.parameter_name not in self._dense:
            dense = layer.parameter.detach().to(self._walk.store, copy=True)
            self._dense[layer.parameter_name] = layer, dense

    def output(self, k: int, i: int) -> Any:
        """Run block k of the dense model on batch i; see `Walk.output`."""
        # In place, since tied modules and the optimizer of the tuning hold the same tensors. Both
        # models exist at any time: one in the module, the other in the copies.
        self._exchange()
        try:
            return self._walk.output(k, i)
        finally:
            self._exchange()

    def advance(self, k: int) -> Iterator[int]:
        """Make the dense outputs of block k the inputs of the next; drop unneeded copies."""
        # `Inject` reads the stored outputs in block k + 1; `Rerun` starts from the batch each time.
        for i in range(len(self._walk.batches) if self._keeps_outputs else 0):
            self.outputs[i] = self._walk.stored(self.output(k, i))
            self._walk.keep(k, i, self.outputs[i])
            yield i
        # A dense copy is needed as long as some forward runs its layer: with `Inject` until its
        # block is left, with `Rerun` to the end. Tied weights stay until their last block.
        later = {id(p) for block in self._walk.runs_after(k) for p in block.module.parameters()}
        self._dense = {
            key: (layer, dense)
            for key, (layer, dense) in self._dense.items()
            if id(layer.parameter) in later
        }

    def _exchange(self) -> None:
        """Swap the values of pruned weights and their dense copies, in place."""
        # An involution: the same call restores the pruned weights, without a third copy of more
        # than one weight at a time. In place, as optimizers, hooks and ties refer to the
        # parameters.
        with torch.no_grad():
            for layer, dense in self._dense.values():
                weights = layer.parameter.detach().clone()
                layer.parameter.copy_(dense)
                dense.copy_(weights)
