"""Collecting the Hessians of layers while the model runs."""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from mrp_lightning.calibration.experts import one_by_one
from mrp_lightning.calibration.padding import Padding, taken
from mrp_lightning.calibration.products import Products
from mrp_lightning.solver.hessian import HessianAccumulator
from mrp_lightning.solver.target import InputShift
from mrp_lightning.targets.layers import Expert, Layer


@dataclass(eq=False)
class InputGroup:
    """Layers that are fed the very same tensor (q, k, v; gate, up), and so share a Hessian.

    Attributes:
        layers: The layers in the order of their calls. The input of the first one is accumulated.
        accumulator: The Hessian of that input so far.
        since: The number of the batch in which the group was first seen, from 0.
        calls: How often each layer was called in the current batch, by its id.
        shift: How far the input is from that of the dense model; `None` where that is not asked
            for, or where the rows of the two are not the same tokens.
    """

    layers: list[Layer]
    accumulator: HessianAccumulator
    since: int
    calls: dict[int, int] = field(default_factory=dict)
    shift: InputShift | None = None


class InputsDiffer(Exception):  # noqa: N818 (a message between two parts of the walk, not an error)
    """Layers that shared an input in one batch do not in another."""


class Calibration:
    """Accumulates 2·XᵀX over the tokens that each layer sees.

    Which layers share an input is found in the first batch and checked in all others. A weight that
    is used without calling its module (Mamba's `dt_proj.weight @ x`) is calibrated by the products
    that it takes part in.

    Args:
        layers: The layers to watch.
        padding: Tells tokens from padding.
        share: Whether layers with one input may share a Hessian.
        pooled: Experts that are not among the layers, whose inputs only count in `pools`.
        paired: Whether each batch is first run by the dense model, within `dense_run`, so that the
            groups get a `shift`.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        padding: Padding,
        *,
        share: bool = True,
        pooled: Sequence[Expert] = (),
        paired: bool = False,
    ) -> None:
        self.layers = list(layers)
        self.groups: list[InputGroup] = []
        self._padding = padding
        self._share = share
        self._paired = paired
        self._is_dense_run = False
        self._dense: dict[int, list[Tensor]] = {}  # by layer, its inputs in the dense run
        self._copies: dict[Hashable, tuple[Tensor, Tensor]] = {}
        self._group_of: dict[int, InputGroup] = {}
        self._seen: dict[Hashable, tuple[Tensor, InputGroup]] = {}
        self._inside: set[int] = set()
        self._pooled = list(pooled)
        self._mine = {layer.key: layer for layer in self.layers if isinstance(layer, Expert)}
        self._pools = {e.siblings: HessianAccumulator(e.columns, e.name) for e in self._pooled}
        self._rows: dict[Hashable, Tensor | None] = {}  # by expert, which are tokens
        self._batch = 0

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Watch the layers in this context."""
        with ExitStack() as stack:
            stack.callback(self._seen.clear)
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
            others = [*self._pooled, *(e.first for e in (*experts, *self._pooled))]
            for expert in others:
                if expert.key not in keys:
                    keys.add(expert.key)
                    given[id(expert)] = expert
            stack.enter_context(Products(list(given.values()), self._multiplied))
            yield

    @contextmanager
    def dense_run(self) -> Iterator[None]:
        """Take what the model runs in this context for what the dense model does on the batch."""
        self._is_dense_run = True
        try:
            yield
        finally:
            self._is_dense_run = False
            self._copies.clear()
            self._inside.clear()

    def end_batch(self) -> None:
        """Check the groups and forget the tensors of a batch.

        Raises:
            InputsDiffer: A group's layers were not called equally often.
        """
        self._seen.clear()
        self._rows.clear()
        self._inside.clear()
        self._batch += 1
        for group in self.groups:
            counts = {group.calls.get(id(layer), 0) for layer in group.layers}
            group.calls.clear()
            if len(counts) > 1:
                raise InputsDiffer
            if self._dense.get(id(group.layers[0])):
                group.shift = None  # the dense model called it more often
        self._dense.clear()

    @property
    def not_called(self) -> list[Layer]:
        """The layers that no batch reached."""
        return [layer for layer in self.layers if id(layer) not in self._group_of]

    def _enter(self, layer: Layer) -> Any:
        def pre(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._inside.add(id(layer))
            x = args[0] if args else kwargs[next(iter(kwargs))]
            # The version tells a tensor that was changed in place between two layers.
            key = (id(x), 0 if x.is_inference() else x._version, layer.reading)
            self._visit(layer, x, key)

        return pre

    def _leave(self, layer: Layer) -> Any:
        return lambda *_: self._inside.discard(id(layer))

    def _multiplied(self, layer: Layer, x: Tensor) -> None:
        if isinstance(layer, Expert):
            self._routed(layer, x)
        elif id(layer) not in self._inside:
            self._visit(layer, x, None)

    def _routed(self, expert: Expert, x: Tensor) -> None:
        """An expert's matrix was given rows; its second one gets those of the first, in order."""
        if self._is_dense_run:
            return  # they are other tokens
        of = (id(expert.module), expert.index)
        if expert.stack == expert.first.stack:
            self._rows[of] = self._padding.rows(x, expert.module, expert.name)
        rows = self._rows[of]
        tokens = x if rows is None else x.reshape(rows.numel(), -1)[rows]
        if not tokens.numel():
            return
        if expert.key in self._mine:
            self._count(self._mine[expert.key], tokens)
        elif expert.siblings in self._pools:
            self._pools[expert.siblings].update(tokens)

    def _count(self, expert: Expert, tokens: Tensor) -> None:
        if id(expert) not in self._group_of:
            self._join(expert, None)
        self._group_of[id(expert)].accumulator.update(tokens)

    def pools(self) -> dict[Hashable, HessianAccumulator]:
        """The Hessians of all experts' inputs by matrix, which help experts with few tokens."""
        pools = dict(self._pools)
        for group in self.groups:
            for expert in group.layers:
                if isinstance(expert, Expert):
                    pool = pools.get(expert.siblings)
                    if pool is None:
                        pool = HessianAccumulator(expert.columns, expert.name)
                        pools[expert.siblings] = pool
                    pool.merge(group.accumulator)
        return pools

    def _visit(self, layer: Layer, x: Tensor, key: Hashable) -> None:
        group = self._group_of.get(id(layer))
        if self._is_dense_run:
            if group is None or layer is group.layers[0]:
                self._dense.setdefault(id(layer), []).append(self._copy(x, key))
            return
        if group is None:
            group = self._join(layer, key)
        group.calls[id(layer)] = group.calls.get(id(layer), 0) + 1
        if layer is group.layers[0]:
            if key is not None:
                self._seen[key] = (x, group)
            inputs = layer.inputs(x)
            rows = self._padding.rows(inputs, layer.module, layer.name)
            tokens = taken(inputs, rows)
            if tokens.numel():
                group.accumulator.update(tokens)
            if group.shift is not None:
                dense = self._dense_like(layer, x)
                if dense is None:
                    group.shift = None
                elif tokens.numel():
                    group.shift.update(taken(layer.inputs(dense), rows), tokens)
        elif self._seen.get(key, (None, None))[1] is not group:
            raise InputsDiffer

    def _copy(self, x: Tensor, key: Hashable) -> Tensor:
        """A copy, as the model may change x in place; one for all layers that are given x."""
        if key is None:
            return x.clone()
        if key not in self._copies:
            self._copies[key] = x, x.clone()
        return self._copies[key][1]

    def _dense_like(self, layer: Layer, x: Tensor) -> Tensor | None:
        """What the dense run gave to the layer in this call, `None` if its rows do not pair."""
        calls = self._dense.get(id(layer))
        dense = calls.pop(0) if calls else None
        paired = dense is not None and dense.shape == x.shape
        return dense if paired and self._padding.in_order(x, layer.module) else None

    def _join(self, layer: Layer, key: Hashable) -> InputGroup:
        _, group = self._seen.get(key, (None, None))
        if group is None or not self._share or group.since != self._batch:
            group = InputGroup([], HessianAccumulator(layer.columns, layer.name), self._batch)
            if self._paired and not isinstance(layer, Expert):
                group.shift = InputShift(layer.columns, layer.name)
            self.groups.append(group)
        group.layers.append(layer)
        self._group_of[id(layer)] = group
        return group
