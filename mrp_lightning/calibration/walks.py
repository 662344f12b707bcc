"""Run the blocks of a model one at a time, each on the outputs of those before it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mrp_lightning.targets.blocks import Block
from mrp_lightning.targets.layers import Layer


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Let an attribute of this one object, as a rule a method, stand in for that of its class.

    Replacements nest: the last one counts, and what it replaced comes back after it. A module keeps
    its hooks and all else.
    """
    own = vars(owner)
    replaced = {name: own[name]} if name in own else {}
    own[name] = value
    try:
        yield
    finally:
        own.pop(name, None)
        own.update(replaced)


@contextmanager
def every_layer_called() -> Iterator[None]:
    """Let torch's own encoders and attention call their layers; fused, no hook sees these.

    Fused, an encoder with padding passes nested tensors, which have no shape, between its blocks.
    """
    was_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_enabled)


class StopForward(BaseException):
    """Ends a forward early. Not an Exception, so that models do not catch it."""


class Walk(ABC):
    """A way to run one block on all calibration batches.

    The blocks are in the order in which the model calls them. Hidden states are kept on the device
    `store`; `None` leaves them where they are made.
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
        """Another walk over the same model and batches, at its start."""
        return type(self)(self.forward, self.batches, self.blocks, self.store)

    def runs_after(self, k: int) -> Sequence[Block]:
        """Return the blocks that are still run once block k is done."""
        return self.blocks[k + 1 :]

    def advance(self, k: int) -> Iterator[int]:  # noqa: ARG002
        """Make the outputs of block k, as it is now, the inputs of the next."""
        yield from ()

    def keep(self, k: int, i: int, hidden: Tensor | None) -> None:
        """Take the hidden state that block k returned for batch i as the input of the next."""
        del k, i, hidden  # most walks store none

    def stored(self, output: Any) -> Tensor | None:
        """Return the hidden state in what a block returned, where such are stored."""
        if output is None:
            return None
        hidden = hidden_of(output).detach()
        return hidden if self.store is None else hidden.to(self.store)

    def finish(self, k: int, i: int) -> Any:  # noqa: ARG002
        """Run the model on batch i from block k, on the outputs of those before it, to its end."""
        with every_layer_called():
            return self.forward(self.batches[i])

    @abstractmethod
    def output(self, k: int, i: int) -> Any:
        """Run block k on batch i, on the outputs of the blocks before it as they are now.

        Returns what the block returns; `None` if the batch does not reach it.
        """

    def _run_to(self, k: int, i: int) -> Any:
        """Run the forward on batch i up to block k, and return what that returns."""
        out: list[Any] = []

        def post(_: nn.Module, __: Any, output: Any) -> None:
            out.append(output)
            raise StopForward

        with (
            self.blocks[k].module.register_forward_hook(post),
            suppress(StopForward),
            every_layer_called(),
        ):
            self.forward(self.batches[i])
        return out[0] if out else None


class WholeModel(Walk):
    """One step: the whole forward. For models and layers without blocks."""

    name = "whole model"

    def output(self, k: int, i: int) -> Any:
        """Run one batch to the end."""
        return self.finish(k, i)


class Rerun(Walk):
    """Run the model up to block k. Right for every model, at the price of a forward a block."""

    name = "rerun"

    def runs_after(self, k: int) -> Sequence[Block]:  # noqa: ARG002
        """All blocks: every forward starts with the first."""
        return self.blocks

    def output(self, k: int, i: int) -> Any:
        """Run batch i from the start, and return what block k returns."""
        return self._run_to(k, i)


class Inject(Walk):
    """Run the model's forward with stubs for the blocks before k, which return stored outputs.

    What is stored of a batch is the output of the last block that it reached, in each chain that
    was begun (an encoder's, when the decoder is walked). The stub of such a block returns it, and
    all others what they are given. Between the last stub and block k the model itself goes on: it
    may add something there, to some batches only.

    `containers` say how each block returns its hidden state: `None` for a bare tensor.
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
        self.hidden: list[dict[int, Tensor]] = [{} for _ in batches]  # of each, by block

    def twin(self) -> "Inject":
        """Another walk over the same model and batches, with hidden states of its own."""
        return Inject(self.forward, self.batches, self.blocks, self.containers, self.store)

    def advance(self, k: int) -> Iterator[int]:
        """Store the outputs of block k in place of its inputs."""
        for i in range(len(self.batches)):
            self.keep(k, i, self.stored(self.output(k, i)))
            yield i

    def keep(self, k: int, i: int, hidden: Tensor | None) -> None:
        """Store it, if the batch reached the block, in place of what its chain had before."""
        if hidden is not None:
            chain = self.blocks[k].chain
            others = {j: x for j, x in self.hidden[i].items() if self.blocks[j].chain != chain}
            self.hidden[i] = {**others, k: hidden}

    def output(self, k: int, i: int) -> Any:
        """Run block k on what the model makes of the stored outputs of batch i."""
        with self._stubs(k, i):
            return self._run_to(k, i)

    def finish(self, k: int, i: int) -> Any:
        """Run what comes after the stored outputs of batch i."""
        with self._stubs(k, i):
            return super().finish(k, i)

    @contextmanager
    def _stubs(self, k: int, i: int) -> Iterator[None]:
        """Let stubs of the blocks before k return what is stored of batch i."""
        with ExitStack() as stack:
            for j, block in enumerate(self.blocks[:k]):
                stub = _stub(self.containers[j], self.hidden[i].get(j))
                stack.enter_context(replaced(block.module, "forward", stub))
            yield


@dataclass(frozen=True)
class Container:
    """A tuple or list that a block returns, with the hidden state first."""

    kind: type
    length: int


def _stub(container: Container | None, stored: Tensor | None) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden = hidden_input(args, kwargs)
        if stored is not None:
            # A copy: the model and its blocks may add to it in place.
            hidden = stored.to(hidden.device, copy=True)
        if container is None:
            return hidden
        return container.kind([hidden, *[None] * (container.length - 1)])

    return forward


def hidden_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Find the hidden state that a block is given."""
    if args and isinstance(args[0], Tensor):
        return args[0]
    if isinstance(kwargs.get("hidden_states"), Tensor):
        return kwargs["hidden_states"]
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    raise TypeError("the block is given no tensor")


def hidden_of(output: Any) -> Tensor:
    """Find the hidden state in what a block returns."""
    hidden = output[0] if isinstance(output, tuple | list) else output
    if not isinstance(hidden, Tensor):
        raise TypeError(f"the block returns a {type(output).__name__}")
    return hidden


class DenseStream:
    """A second walk, over the dense model, which needs no second copy of the model.

    It begins with the walk over the model that is being pruned, and runs a block while it is still
    dense; what is pruned in it meanwhile is put back for the time of a forward. So the weights of
    one block are kept twice. Only where the walk runs all blocks in every forward (`Rerun`) are
    those of all pruned layers. With `keeps_outputs` it has `outputs` also where the walk itself
    needs none.
    """

    def __init__(self, walk: Walk, *, keeps_outputs: bool = False) -> None:
        # By batch, the hidden state that the block last left behind returned: on the walk's store,
        # `None` where the batch does not reach the block.
        self.outputs: list[Tensor | None] = [None] * len(walk.batches)
        self._walk = walk.twin()
        self._keeps_outputs = keeps_outputs or isinstance(self._walk, Inject)
        # By the name of the parameter: modules may get new ones where they are moved.
        self._dense: dict[str, tuple[Layer, Tensor]] = {}

    def remember(self, layer: Layer) -> None:
        """Keep a copy of a layer's dense weight, before it is pruned."""
        if layer.parameter_name not in self._dense:
            dense = layer.parameter.detach().to(self._walk.store, copy=True)
            self._dense[layer.parameter_name] = layer, dense

    def output(self, k: int, i: int) -> Any:
        """Run block k of the dense model on batch i; see `Walk.output`."""
        self._exchange()
        try:
            return self._walk.output(k, i)
        finally:
            self._exchange()

    def advance(self, k: int) -> Iterator[int]:
        """Make the dense outputs of block k the inputs of the next."""
        for i in range(len(self._walk.batches) if self._keeps_outputs else 0):
            self.outputs[i] = self._walk.stored(self.output(k, i))
            self._walk.keep(k, i, self.outputs[i])
            yield i
        later = {id(p) for block in self._walk.runs_after(k) for p in block.module.parameters()}
        self._dense = {
            key: (layer, dense)
            for key, (layer, dense) in self._dense.items()
            if id(layer.parameter) in later
        }

    def _exchange(self) -> None:
        """Let the model's weights and those that are kept change places. No weight moves."""
        with torch.no_grad():
            for layer, dense in self._dense.values():
                weights = layer.parameter.detach().clone()
                layer.parameter.copy_(dense)
                dense.copy_(weights)
