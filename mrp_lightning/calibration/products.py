"""Seeing the products that a weight takes part in, whoever computes them.

Mamba multiplies by `dt_proj.weight` itself, stacked experts by slices of a parameter: no module is
called that a hook could watch.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from mrp_lightning.targets.layers import Layer

_MATMULS = {torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__}


class Products(TorchFunctionMode):
    """Calls `note(layer, x)` for every product Wx of a layer's weight, x as (..., columns).

    Seen are `@`, `matmul`, `mm` and `functional.linear` with W on either side, as it is stored or
    transposed. A product with Wᵀ, such as that of an embedding and the head tied to it, is none.
    A weight is known by its place in memory: it must not move within the context.

    Args:
        layers: The layers to watch.
        note: Called before the product is computed.
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
