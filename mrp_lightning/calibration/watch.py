"""The inputs of layers, seen while the model runs: of modules that are called, and of products."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from mrp_lightning.calibration.experts import one_by_one
from mrp_lightning.calibration.padding import Padding
from mrp_lightning.targets.layers import Expert, Layer
from mrp_lightning.upstream.torch_names import times_changed


class Watch(ABC):
    """Calls `note` for each input of a layer, and `note_expert` for each of a stacked expert.

    A weight that is used without calling its module (Mamba's `dt_proj.weight @ x`) is seen by the
    products that it takes part in. `others` are experts that are not among the layers, and are
    watched like them.
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
                enter, leave = partial(self._enter, layer), partial(self._leave, layer)
                stack.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True))
                stack.enter_context(module.register_forward_hook(leave, always_call=True))
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

    def _enter(
        self, layer: Layer, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._inside.add(id(layer))
        x = args[0] if args else kwargs[next(iter(kwargs))]
        # The version tells a tensor that was changed in place between two layers.
        self.note(layer, x, (id(x), times_changed(x), layer.reading))

    def _leave(self, layer: Layer, *_: Any) -> None:
        self._inside.discard(id(layer))

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


_MATMULS = {torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__}


class Products(TorchFunctionMode):
    """Calls `note(layer, x)` before every product Wx of a layer's weight, x as (..., columns).

    Mamba multiplies by `dt_proj.weight` itself, stacked experts by slices of a parameter: no module
    is called that a hook could watch. Seen are `@`, `matmul`, `mm` and `functional.linear` with W
    on either side, as it is stored or transposed. A product with Wᵀ, such as that of an embedding
    and the head tied to it, is none. A weight is known by its place in memory: it must not move
    within the context.
    """

    def __init__(self, layers: Sequence[Layer], note: Callable[[Layer, Tensor], None]) -> None:
        super().__init__()
        self._note = note
        self._weights: dict[Hashable, Layer] = {}
        self._transposed: dict[Hashable, Layer] = {}
        for layer in layers:
            view = layer.view
            if view.ndim == 2:
                self._weights[_place(view)] = layer
                self._transposed[_place(view.T)] = layer
        self._shapes = {place[1] for place in (*self._weights, *self._transposed)}  # type: ignore[index]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Look at the operands of a product, then compute it."""
        kwargs = kwargs or {}
        is_linear = func is functional.linear
        if is_linear or func in _MATMULS:
            left, right = (*args, *kwargs.values())[:2]
            self._look(left, right.mT if is_linear and right.ndim > 1 else right)
        return func(*args, **kwargs)

    def _look(self, left: Tensor, right: Tensor) -> None:
        """Look at left @ right."""
        if left.shape in self._shapes:
            layer = self._weights.get(_place(left))
            if layer is not None:
                self._note(layer, right.mT if right.ndim > 1 else right)
        if right.shape in self._shapes:
            layer = self._transposed.get(_place(right))
            if layer is not None:
                self._note(layer, left)


def _place(tensor: Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()
