"""Seeing what layers are given while the model runs."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from mrp_lightning.calibration.experts import one_by_one
from mrp_lightning.calibration.padding import Padding
from mrp_lightning.calibration.products import Products
from mrp_lightning.targets.layers import Expert, Layer
from mrp_lightning.upstream import times_changed


class Watch(ABC):
    """Calls `note` for each input of a layer, and `note_expert` for each of a stacked expert.

    A weight that is used without calling its module (Mamba's `dt_proj.weight @ x`) is seen by the
    products that it takes part in.

    Args:
        layers: The layers to watch.
        padding: Tells tokens from padding.
        others: Experts that are not among the layers, and are watched like them.
    """

    def __init__(
        self, layers: Sequence[Layer], padding: Padding, others: Sequence[Expert] = ()
    ) -> None:
        self.layers = list(layers)
        self._padding = padding
        self._others = list(others)
        self._inside: set[int] = set()
        self._rows: dict[Hashable, Tensor | None] = {}  # by expert, which are tokens

    @abstractmethod
    def note(self, layer: Layer, x: Tensor, key: Hashable) -> None:
        """A layer is given x; the key tells this tensor from others, `None` if nothing does."""

    @abstractmethod
    def note_expert(self, expert: Expert, tokens: Tensor) -> None:
        """A matrix of an expert is given tokens, (tokens, columns)."""

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Watch the layers in this context."""
        with ExitStack() as stack:
            experts = [layer for layer in self.layers if isinstance(layer, Expert)]
            for layer in self.layers:
                if isinstance(layer, Expert):
                    continue
                module = layer.module
                before = module.register_forward_pre_hook(self._enter(layer), with_kwargs=True)
                stack.callback(before.remove)
                after = module.register_forward_hook(self._leave(layer), always_call=True)
                stack.callback(after.remove)
            stack.enter_context(self._padding.follow([layer.module for layer in self.layers]))
            stack.enter_context(one_by_one(experts))
            # Which rows of an expert are tokens is seen at its first matrix, pruned or not.
            given = {id(layer): layer for layer in self.layers}
            keys = {layer.key for layer in self.layers}
            for expert in [*self._others, *(e.first for e in (*experts, *self._others))]:
                if expert.key not in keys:
                    keys.add(expert.key)
                    given[id(expert)] = expert
            stack.enter_context(Products(list(given.values()), self._multiplied))
            yield

    def end_batch(self) -> None:
        """Forget the tensors of a batch."""
        self._rows.clear()
        self._inside.clear()

    def _enter(self, layer: Layer) -> Any:
        def pre(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._inside.add(id(layer))
            x = args[0] if args else kwargs[next(iter(kwargs))]
            # The version tells a tensor that was changed in place between two layers.
            key = (id(x), times_changed(x), layer.reading)
            self.note(layer, x, key)

        return pre

    def _leave(self, layer: Layer) -> Any:
        return lambda *_: self._inside.discard(id(layer))

    def _multiplied(self, layer: Layer, x: Tensor) -> None:
        if isinstance(layer, Expert):
            self._routed(layer, x)
        elif id(layer) not in self._inside:
            self.note(layer, x, None)

    def _routed(self, expert: Expert, x: Tensor) -> None:
        """An expert's matrix was given rows; its second one gets those of the first, in order."""
        of = (id(expert.module), expert.index)
        if expert.stack == expert.first.stack:
            self._rows[of] = self._padding.rows(x, expert.module, expert.name)
        rows = self._rows[of]
        tokens = x if rows is None else x.reshape(rows.numel(), -1)[rows]
        if tokens.numel():
            self.note_expert(expert, tokens)
