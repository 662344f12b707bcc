"""Collecting the Hessians of layers while the model runs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from mrp_lightning.solver.hessian import HessianAccumulator
from mrp_lightning.walk.layers import Layer
from mrp_lightning.walk.padding import Padding


@dataclass(eq=False)
class InputGroup:
    """Layers that are fed the very same tensor (q, k, v; gate, up), and so share a Hessian.

    Attributes:
        layers: In the order in which they are called. The first one's input is accumulated.
        accumulator: Of that input.
        since: Number of the batch in which the group was first seen.
        calls: How often each layer was called in the current batch.
    """

    layers: list[Layer]
    accumulator: HessianAccumulator
    since: int
    calls: dict[int, int] = field(default_factory=dict)


class InputsDiffer(Exception):  # noqa: N818 (a message between two parts of the walk, not an error)
    """Layers that shared an input in one batch do not in another."""


class Calibration:
    """Accumulates 2·XᵀX over the tokens that each layer sees.

    Which layers share an input is found in the first batch and checked in all others.

    Args:
        layers: The layers to watch.
        padding: What tells tokens from padding.
        share: Whether layers with one input may share a Hessian.
    """

    def __init__(self, layers: Sequence[Layer], padding: Padding, *, share: bool = True) -> None:
        self.layers = list(layers)
        self.groups: list[InputGroup] = []
        self._padding = padding
        self._share = share
        self._group_of: dict[int, InputGroup] = {}
        self._seen: dict[tuple[int, int], tuple[Tensor, InputGroup]] = {}
        self._batch = 0

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Watch the layers in this context."""
        handles = [
            layer.module.register_forward_pre_hook(self._hook(layer), with_kwargs=True)
            for layer in self.layers
        ]
        try:
            with self._padding.follow([layer.module for layer in self.layers]):
                yield
        finally:
            for handle in handles:
                handle.remove()
            self._seen.clear()

    def end_batch(self) -> None:
        """Check the groups and forget the tensors of a batch.

        Raises:
            InputsDiffer: A group's layers were not called equally often.
        """
        self._seen.clear()
        self._batch += 1
        for group in self.groups:
            counts = {group.calls.get(id(layer), 0) for layer in group.layers}
            group.calls.clear()
            if len(counts) > 1:
                raise InputsDiffer

    @property
    def not_called(self) -> list[Layer]:
        """Layers that no batch reached."""
        return [layer for layer in self.layers if id(layer) not in self._group_of]

    def _hook(self, layer: Layer) -> Any:
        def pre(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else kwargs[next(iter(kwargs))]
            self._visit(layer, x)

        return pre

    def _visit(self, layer: Layer, x: Tensor) -> None:
        # The version tells a tensor that was changed in place between two layers.
        key = (id(x), 0 if x.is_inference() else x._version)
        group = self._group_of.get(id(layer))
        if group is None:
            group = self._join(layer, key)
        group.calls[id(layer)] = group.calls.get(id(layer), 0) + 1
        if layer is group.layers[0]:
            self._seen[key] = (x, group)
            tokens = self._padding.tokens(x, layer.module, layer.name)
            if tokens.numel():
                group.accumulator.update(tokens)
        elif self._seen.get(key, (None, None))[1] is not group:
            raise InputsDiffer

    def _join(self, layer: Layer, key: tuple[int, int]) -> InputGroup:
        _, group = self._seen.get(key, (None, None))
        if group is None or not self._share or group.since != self._batch:
            group = InputGroup([], HessianAccumulator(layer.columns, layer.name), self._batch)
            self.groups.append(group)
        group.layers.append(layer)
        self._group_of[id(layer)] = group
        return group
