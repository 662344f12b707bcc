"""Collect the Hessians of layers while the model runs."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from mrp_lightning.calibration.padding import Padding, taken
from mrp_lightning.processes import Processes
from mrp_lightning.solver.hessian import HessianAccumulator
from mrp_lightning.solver.problem import InputShift
from mrp_lightning.targets.layers import Expert, Layer
from mrp_lightning.upstream.other_names import EXPERTS
from mrp_lightning.upstream.torch_names import times_changed

TOKENS_PER_COLUMN = 1.0
"""The number of tokens per input feature with which an expert is pruned by its own Hessian alone.
With fewer than one, that Hessian is singular up to the damping."""

HESSIAN_BYTES = 16 * 2**30
"""The most bytes of experts' Hessians in memory at a time."""


@contextmanager
def _one_by_one(experts: Sequence[Expert]) -> Iterator[None]:
    """Run stacked experts by their class's own loop over experts, whose products can be observed.

    By default transformers replaces that loop by grouped products, which differ by rounding.
    """
    configs: dict[int, Any] = {id(e.module): e.module.config for e in experts}
    with ExitStack() as stack:
        for config in {id(config): config for config in configs.values()}.values():
            stack.callback(setattr, config, EXPERTS, getattr(config, EXPERTS))
            setattr(config, EXPERTS, "eager")
        yield


def blend(expert: HessianAccumulator, pool: HessianAccumulator) -> tuple[Tensor, float]:
    """Blend the Hessian of one expert (columns, columns) with that of all experts.

    With n tokens of its own, of the m = `TOKENS_PER_COLUMN`·columns that it needs, an expert gets

        s = max(0, 1 − n / m),  H = (1 − s)·H_own + s·H_pool

    as if the missing m − n tokens were like those of an average expert. Returns H and s.
    """
    s = max(0.0, 1 - expert.num_tokens / (TOKENS_PER_COLUMN * expert.columns))
    if s == 0:
        return expert.hessian(), 0.0
    hessian = pool.hessian().mul_(s)
    if expert.num_tokens:
        hessian.add_(expert.hessian(), alpha=1 - s)
    return hessian, s


def portions(layers: Sequence[Layer]) -> list[list[Layer]]:
    """Split layers into groups of one calibration pass each, to bound the memory of Hessians.

    Each group of experts has Hessians of at most `HESSIAN_BYTES`, unless one expert alone has more.
    Experts run in parallel and feed no other calibrated layer of their block, so pruning some
    leaves the inputs of the others unchanged; only the pooled Hessian then sees inner activations
    of experts that are already pruned. All other layers come last, since they may feed the experts.
    """
    experts: dict[tuple[int, int], list[Layer]] = {}
    for layer in layers:
        if isinstance(layer, Expert):
            experts.setdefault((id(layer.module), layer.index), []).append(layer)
    other_layers = [layer for layer in layers if not isinstance(layer, Expert)]
    parts, free = list[list[Layer]](), 0
    # Greedy, in the order of the model: the matrices of one expert share their rows, so they stay
    # in one pass, and an expert larger than the limit gets a pass of its own.
    for expert in experts.values():
        size = sum(4 * layer.columns**2 for layer in expert)
        if size > free or not parts:
            parts.append([])
            free = HESSIAN_BYTES
        parts[-1] += expert
        free -= size
    if len(parts) <= 1:
        return [list(layers)]
    return [*parts, *([other_layers] if other_layers else [])]


_MATMULS = {torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__}
_OPERANDS = ("input", "weight", "other", "mat2")
"""The names of the operands of these products and of `linear`, the left one first."""


class Products(TorchFunctionMode):
    """Calls `note(layer, x)` before every product Wx of a layer's weight, x as (..., columns).

    Mamba multiplies by `dt_proj.weight` itself, stacked experts by slices of a parameter: no module
    with a hook is called. The mode observes `@`, `matmul`, `mm` and `functional.linear` with W on
    either side, as stored or transposed, but no product with Wᵀ, such as that of a head tied to an
    embedding. Weights are identified by their address in memory, so they must not move within the
    context.
    """

    def __init__(self, layers: Sequence[Layer], note: Callable[[Layer, Tensor], None]) -> None:
        super().__init__()
        self._note = note
        self._weights: dict[Hashable, Layer] = {}
        self._transposed: dict[Hashable, Layer] = {}
        for layer in layers:
            view = layer.view
            if view.ndim == 2:
                self._weights[_storage_key(view)] = layer
                self._transposed[_storage_key(view.T)] = layer
        self._shapes = {key[1] for key in (*self._weights, *self._transposed)}  # type: ignore[index]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Observe the operands of a product, then compute it."""
        kwargs = kwargs or {}
        is_linear = func is functional.linear
        if is_linear or func in _MATMULS:
            left, right = (*args, *(kwargs[name] for name in _OPERANDS if name in kwargs))[:2]
            self._look(left, right.mT if is_linear and right.ndim > 1 else right)
        return func(*args, **kwargs)

    def _look(self, left: Tensor, right: Tensor) -> None:
        """Observe left @ right."""
        if left.shape in self._shapes:
            layer = self._weights.get(_storage_key(left))
            if layer is not None:
                self._note(layer, right.mT if right.ndim > 1 else right)
        if right.shape in self._shapes:
            layer = self._transposed.get(_storage_key(right))
            if layer is not None:
                self._note(layer, left)


def _storage_key(tensor: Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


@dataclass(eq=False)
class InputGroup:
    """Layers that read the same tensor (q, k, v; gate, up), and so share a Hessian."""

    layers: list[Layer]  # in the order of their calls; the input of the first is accumulated
    accumulator: HessianAccumulator
    since: int  # the number of the first batch that reached the group, from 0
    calls: dict[int, int] = field(default_factory=dict)  # by layer id, in this batch
    shift: InputShift | None = None
    """The shift from the dense model's input; `None` if it is not needed, or rows do not pair."""

    def hand_over(self) -> HessianAccumulator:
        """Return the accumulator and drop it, so that the caller holds the only reference."""
        accumulator = self.accumulator
        del self.accumulator
        return accumulator


class InputsDiffer(Exception):  # noqa: N818 (a message between two parts of the walk, not an error)
    """Layers shared an input in one batch, but not in another."""


class Calibration:
    """Accumulates 2·XᵀX over the tokens that each layer reads, in `groups` of layers.

    The input of a weight that is used without calling its module (Mamba's `dt_proj.weight @ x`)
    is taken from the products with that weight.

    Args:
        layers: The layers.
        padding: Separates tokens from padding.
        share: Whether layers that read the same tensor share a Hessian. The groups are determined
            in the first batch and checked in all others.
        pooled: Further experts, which get no Hessian of their own: their tokens are summed up with
            those of their siblings in `pools`.
        paired: Whether each batch is first run by the dense model, within `dense_run`, so that
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
        self.layers, self.groups = list(layers), list[InputGroup]()
        self._padding, self._pooled = padding, list(pooled)
        self._share, self._paired = share, paired
        self._inside: set[int] = set()
        self._rows: dict[Hashable, Tensor | None] = {}  # by expert: which rows are tokens
        self._is_dense_run = False
        self._dense: dict[int, list[Tensor]] = {}  # by layer: its inputs in the dense run
        self._copies: dict[Hashable, tuple[Tensor, Tensor]] = {}
        self._group_of: dict[int, InputGroup] = {}
        self._seen: dict[Hashable, tuple[Tensor, InputGroup]] = {}
        self._own_experts = {layer.key: layer for layer in self.layers if isinstance(layer, Expert)}
        self._pools = {e.siblings: HessianAccumulator(e.columns, e.name) for e in pooled}
        self._batch = 0

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Observe the layers in this context."""
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
            stack.enter_context(_one_by_one(experts))
            # The rows of an expert that are tokens are known only from its first matrix, so that
            # one is observed even if it is not pruned.
            by_identity = {id(layer): layer for layer in self.layers}
            keys = {layer.key for layer in self.layers}
            for expert in [*self._pooled, *(e.first for e in (*experts, *self._pooled))]:
                if expert.key not in keys:
                    keys.add(expert.key)
                    by_identity[id(expert)] = expert
            stack.enter_context(Products(list(by_identity.values()), self._multiplied))
            stack.callback(self._seen.clear)
            yield

    @contextmanager
    def dense_run(self) -> Iterator[None]:
        """Record the inputs in this context as those of the dense model on the batch."""
        self._is_dense_run = True
        try:
            yield
        finally:
            self._is_dense_run = False
            for tensors in (self._copies, self._rows, self._inside):
                tensors.clear()

    def end_batch(self) -> None:
        """Release a batch's tensors; raise `InputsDiffer` if a group's layers had other inputs."""
        for tensors in (self._rows, self._inside, self._seen):
            tensors.clear()
        self._batch += 1
        # A layer that reads a group's tensor in one batch and another's in the next would get the
        # Hessian of inputs that it never saw. Counts of calls show it without comparing tensors.
        for group in self.groups:
            counts = {group.calls.get(id(layer), 0) for layer in group.layers}
            group.calls.clear()
            if len(counts) > 1:
                raise InputsDiffer
            if self._dense.get(id(group.layers[0])):
                group.shift = None  # the dense model made more calls, so that rows do not pair
        self._dense.clear()

    def sum_over(self, processes: Processes, *, differ: bool) -> None:
        """Sum the Hessians of all processes, in the same groups everywhere; a collective call.

        All processes raise `InputsDiffer` if some process did, according to its `differ`, or if two
        processes have different groups.
        """
        index = {id(layer): i for i, layer in enumerate(self.layers)}
        seen = [
            ([index[id(x)] for x in group.layers], group.accumulator.num_tokens, bool(group.shift))
            for group in self.groups
        ]
        pooled = [pool.num_tokens for pool in self._pools.values()]
        everywhere = processes.all(None if differ else (seen, pooled))
        # One exchange before any sum: if one process cannot share Hessians, none may begin a sum
        # for which the others would wait.
        if None in everywhere:
            raise InputsDiffer
        agreed: dict[frozenset[int], tuple[list[int], int, bool]] = {}
        # 1. Groups are agreed upon before any tensor is sent: processes that sum different lists of
        #    tensors would wait for one another for ever.
        # 2. The same layers may be in one group here and in two elsewhere. The groups are
        #    consistent if and only if they are disjoint: their sizes add up to the size of their
        #    union.
        # 3. The weights of the sum are the tokens of all processes, so that the result is that of
        #    one process with all batches.
        for members, tokens, paired in (group for groups, _ in everywhere for group in groups):
            first, earlier, all_paired = agreed.get(frozenset(members), (members, 0, True))
            agreed[frozenset(members)] = first, earlier + tokens, all_paired and paired
        # Groups are a partition of the layers: one layer in two of them means that two processes
        # have grouped it differently.
        if sum(map(len, agreed)) > len(frozenset().union(*agreed)):
            raise InputsDiffer

        members_of = (frozenset(members) for members, _, _ in seen)
        own_groups = dict(zip(members_of, self.groups, strict=True))
        self.groups = []
        # All processes take the groups in the order of `agreed`, process 0's first, since the sums
        # below are collective calls. The order in which layers are solved does not change results.
        for key, (members, tokens, paired) in agreed.items():
            layers = [self.layers[i] for i in members]
            group = own_groups.get(key) or self._group(layers[0])
            group.layers = layers
            group.shift = group.shift if paired else None
            self._group_of |= {id(layer): group for layer in layers}
            self.groups.append(group)
            if tokens:
                group.accumulator.sum_over(processes, tokens)
                if group.shift is not None:
                    group.shift.sum_over(processes, tokens)
        totals = map(sum, zip(*(pooled for _, pooled in everywhere), strict=True))
        for pool, tokens in zip(self._pools.values(), totals, strict=True):
            if tokens:
                pool.sum_over(processes, tokens)

    @property
    def not_called(self) -> list[Layer]:
        """The layers that no batch reached, except experts with a pooled Hessian."""
        called = (layer for group in self.groups for layer in group.layers)
        pooled = {x.siblings for x in called if isinstance(x, Expert)} | self._pools.keys()
        return [
            layer
            for layer in self.layers
            if id(layer) not in self._group_of
            and not (isinstance(layer, Expert) and layer.siblings in pooled)
        ]

    def hand_over(self) -> Iterator[tuple[InputGroup, HessianAccumulator | None]]:
        """Yield the groups and drop them one by one, those of experts with their pooled Hessians.

        Experts that no batch reached come last, each in a group of its own, if there is a pooled
        Hessian for them.
        """
        pools, uncalled_ids = dict(self._pools), set(map(id, self.not_called))
        for group in self.groups:
            for expert in group.layers:
                if isinstance(expert, Expert):
                    accumulator = HessianAccumulator(expert.columns, expert.name)
                    pools.setdefault(expert.siblings, accumulator).merge(group.accumulator)
        for layer in self.layers:
            if id(layer) not in self._group_of and id(layer) not in uncalled_ids:
                empty = HessianAccumulator(layer.columns, layer.name)
                self.groups.append(InputGroup([layer], empty, 0))
        # Popped, not iterated over: a Hessian lives until its layers are pruned, so that memory
        # falls from group to group.
        while self.groups:
            group = self.groups.pop(0)
            first = group.layers[0]
            yield group, pools[first.siblings] if isinstance(first, Expert) else None

    def _enter(
        self, layer: Layer, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._inside.add(id(layer))
        x = args[0] if args else kwargs[next(iter(kwargs))]
        # The version changes if a tensor is modified in place between two layers.
        self.note(layer, x, (id(x), times_changed(x), layer.reading))

    def _leave(self, layer: Layer, *_: Any) -> None:
        self._inside.discard(id(layer))

    def _multiplied(self, layer: Layer, x: Tensor) -> None:
        if isinstance(layer, Expert):
            self._routed(layer, x)
        elif id(layer) not in self._inside:
            self.note(layer, x, None)

    def _routed(self, expert: Expert, x: Tensor) -> None:
        """Add the tokens in the rows of an expert's matrix to its Hessian, or to the pooled one.

        The rows of the second matrix are those of the first, in the same order.
        """
        of = (id(expert.module), expert.index)
        if expert.stack == expert.first.stack:
            self._rows[of] = self._padding.rows(x, expert.module, expert.name)
        rows = self._rows[of]
        tokens = x if rows is None else x.reshape(rows.numel(), -1)[rows]
        if not tokens.numel() or self._is_dense_run:  # which routes other tokens to the expert
            return
        if expert.key in self._own_experts:
            own_expert = self._own_experts[expert.key]
            group = self._group_of.get(id(own_expert)) or self._join(own_expert, None)
            group.accumulator.update(tokens)
        elif expert.siblings in self._pools:
            self._pools[expert.siblings].update(tokens)

    def note(self, layer: Layer, x: Tensor, key: Hashable) -> None:
        """Add the tokens of an input x of a layer, once for all layers that read it.

        The key identifies the tensor x, `None` if that is unknown. `InputsDiffer` is raised if the
        layer shared the input of its group's first layer, and does not now.
        """
        group = self._group_of.get(id(layer))
        if self._is_dense_run:
            if group is None or layer is group.layers[0]:
                self._dense.setdefault(id(layer), []).append(self._copy(x, key))
            return
        if group is None:
            group = self._join(layer, key)
        group.calls[id(layer)] = group.calls.get(id(layer), 0) + 1
        if layer is group.layers[0]:
            if key is not None:  # x is kept, too; see `_copy`
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
        """Copy x, which the model may change in place, once for all layers that read it."""
        if key is None:
            return x.clone()
        # x is kept, too: the key has its id, which another tensor could take once x is freed.
        if key not in self._copies:
            self._copies[key] = x, x.clone()
        return self._copies[key][1]

    def _dense_like(self, layer: Layer, x: Tensor) -> Tensor | None:
        """Take the layer's input in the dense run of this call; `None` if rows do not pair."""
        calls = self._dense.get(id(layer))
        dense = calls.pop(0) if calls else None
        paired = dense is not None and dense.shape == x.shape
        return dense if paired and self._padding.in_order(x, layer.module) else None

    def _join(self, layer: Layer, key: Hashable) -> InputGroup:
        """Add a layer to the group made in this batch for the tensor it reads, or to a new one."""
        _, group = self._seen.get(key, (None, None))
        if group is None or not self._share or group.since != self._batch:
            group = self._group(layer)
            self.groups.append(group)
        group.layers.append(layer)
        self._group_of[id(layer)] = group
        return group

    def _group(self, layer: Layer) -> InputGroup:
        """Return a new group, without layers, for the input of a layer."""
        group = InputGroup([], HessianAccumulator(layer.columns, layer.name), self._batch)
        if self._paired and not isinstance(layer, Expert):
            group.shift = InputShift(layer.columns, layer.name)
        return group
