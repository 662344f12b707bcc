"""Balance the columns of layers before they are put on a grid, by factors that cancel.

A group of a grid has one scale for all of its columns, so that its rounding errors are of one size,
whatever the sizes of the inputs. If the features x of an input can be divided by factors s where
they are produced, the readers' weights W diag(s) leave the model's function as it is, and s chooses
how errors are shared out. With compensation, the loss of column j is d_j times the square of its
rounding error, where d_j = 1 / U_jj² is the part of x_j² that the columns after j cannot make up
for, UᵀU = (H + λI)⁻¹. The scale of a group G lies between the mean and the largest of its weights,
as a norm of order p does, so that

    loss ∝ Σ_G (Σ_j∈G (c_j s_j²)^(p/2))^(2/p) · Σ_j∈G d_j / s_j²,  c_j = Σ_i W_ij²

over the rows i of all readers. By Hölder's inequality the loss of all groups is least, whatever
their size, for s_j ∝ d_j^(1/(p+2)) c_j^(−p/(2p+4)): p = 2 balances the columns' shares of the loss,
p = ∞ their largest weights. p = 8 is best on layers of two models, with 4 bits in groups of 64.
AWQ (Lin et al., 2023) scales columns, too, by a search over powers of activations alone.

The producer of an input is a norm, whose weights are divided, or a linear layer, whose rows are: up
for down in a gated MLP, v for o in attention. Linked modules are found by running the block: with
factors that are powers of two, every bit of its output stays as it was.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mrp_lightning.calibration.walks import Inject, Walk, hidden_of
from mrp_lightning.errors import TargetError, counted
from mrp_lightning.pruning.block import WalkedBlock
from mrp_lightning.pruning.job import Job
from mrp_lightning.solver.hessian import InputHessian
from mrp_lightning.targets.blocks import Block, named_modules
from mrp_lightning.targets.layers import (
    PLAIN_DTYPES,
    Conv1D,
    Layer,
    Linear,
    layers_of,
    why_not_plain,
)

_NORM = 8.0
"""The order p of the norm for the scale of a group, by measurement: lab/results/engine-types.md."""
_LARGEST = 16.0
"""The largest factor, a power of two, and the inverse of the least one."""
_ROWS, _ROWS_PLUS_ONE, _COLUMNS = "rows", "rows_plus_one", "columns"
FACTOR = "factor of "
"""The beginning of the names of factors in a journal."""


@dataclass(frozen=True)
class Link:
    """A producer of features within a block, and all layers that read them."""

    producer: str  # the name in the block of the norm or linear layer
    readers: tuple[str, ...]  # the names in the block of the linear layers
    rows: tuple[int, ...]  # the row of the producer that each column of the readers reads
    adds_one: bool = False  # whether it multiplies by one plus its weights, as norms of Gemma do

    def factors(self, by_row: Tensor) -> Iterator[tuple[str, str, Tensor]]:
        """Yield name, kind and factors of each module, from the factors of the producer's rows."""
        yield self.producer, _ROWS_PLUS_ONE if self.adds_one else _ROWS, by_row
        for reader in self.readers:
            yield reader, _COLUMNS, by_row[list(self.rows)]


def apply_factors(factors: Mapping[str, Tensor], block: Block) -> None:
    """Scale the weights and biases of a block, which must be dense, in place.

    By `NAME.columns` the factors (columns,) multiply the columns of a layer, and by `NAME.rows` the
    factors (rows,) divide the rows of a layer, or the weights of a norm; `NAME.rows_plus_one` are
    those of a norm that adds one to its weights.
    """
    for name, module in named_modules(block.module):
        keys = {kind: f"{block.name}.{name}.{kind}" for kind in (_ROWS, _ROWS_PLUS_ONE, _COLUMNS)}
        _scale(module, {kind: factors[key] for kind, key in keys.items() if key in factors})


class InputStudy:
    """Measures the inputs of the dense model of a job, and chooses factors for its blocks."""

    def __init__(self, job: Job) -> None:
        modules = job.model.modules()
        counts = Counter(id(p) for module in modules for p in module.parameters(recurse=False))
        self._shared = {key for key, count in counts.items() if count > 1}  # by several modules
        self._listener = job.listener
        # The links of earlier blocks by the names and shapes of their parameters.
        self._known: dict[tuple[object, ...], list[Link]] = {}
        self._factors: dict[str, Tensor] = {}

    def visit(self, block: WalkedBlock) -> None:
        """Measure the inputs of a block, or raise a HessianError if they are not finite."""
        links = _links(block, self._known, self._shared)
        self._factors |= _factors_of_block(block, links)

    def conclusions(self) -> dict[str, Tensor]:
        """Return the factors of all blocks; raise a TargetError if there are none."""
        if not self._factors:
            raise TargetError(
                "`balance` found no input in this model that it could scale: it needs a norm whose "
                "output only linear layers read, or a linear layer that feeds another one in "
                "proportion. Leave `balance` out, or load the model in bfloat16 or float32 if it "
                "is in float16."
            )
        balanced = sum(name.endswith(f".{_COLUMNS}") for name in self._factors)
        self._listener.log(f"Balanced the columns of {counted(balanced, 'layer')}.")
        return {f"{FACTOR}{name}": each for name, each in self._factors.items()}


def _links(
    block: WalkedBlock, known: dict[tuple[object, ...], list[Link]], shared: set[int]
) -> list[Link]:
    """Return the links of a block that all processes find; `known` has those of earlier blocks."""
    walk = block.walk
    kind = tuple((name, tuple(p.shape)) for name, p in block.module.named_parameters())
    # Blocks that run on stored inputs pass their hidden state alone to later ones. Others may pass
    # more, such as shared keys and values, so that the last hidden state has to stay, too.
    end = block.k if isinstance(walk, Inject) else len(walk.blocks) - 1
    links: list[Link] | None = None
    for i in range(len(walk.batches)):
        if walk.output(end, i) is None:
            continue
        block.report_progress(f"{block.name}, which layers feed which")
        probe = Probe(block.module, partial(_hidden, walk, end, i), shared)
        # Blocks with the same parameters seldom differ in their links. To confirm all links at once
        # takes one or two runs, to search for them at least one for each norm and layer.
        links = known.get(kind)
        if links is None or not probe.holds(links):
            links = probe.links()
        break
    # A process without a batch has no opinion.
    gathered = [each for each in block.job.processes.all(links) if each is not None]
    # All processes must scale by the same factors, so that a link counts only if none of them has
    # seen it fail.
    agreed = [x for x in gathered[0] if all(x in each for each in gathered)] if gathered else []
    known[kind] = agreed
    return agreed


def _hidden(walk: Walk, k: int, i: int) -> Tensor:
    return hidden_of(walk.output(k, i)).detach()


def _factors_of_block(block: WalkedBlock, links: Sequence[Link]) -> dict[str, Tensor]:
    """Measure the inputs of a block, and return its factors by the names of `apply_factors`."""
    modules, processes = dict(named_modules(block.module)), block.job.processes
    on_grid = {layer.name: layer for layer in block.layers}
    readers = {
        link: [on_grid[name] for x in link.readers if (name := f"{block.name}.{x}") in on_grid]
        for link in links
    }
    # The readers of a link read the same rows of its producer, so the Hessian of the first stands
    # for all of them, and one accumulator suffices for each link.
    first = {id(layers[0]): link for link, layers in readers.items() if layers}
    measured = [layers[0] for layers in readers.values() if layers]
    remainders: dict[Link, Tensor] = {}
    for group, _ in block.calibrate(measured, []).hand_over() if measured else ():
        (layer,), accumulator = group.layers, group.hand_over()
        if accumulator.num_tokens and bool((hessian := accumulator.hessian()).any()):
            inputs = InputHessian(hessian.to(layer.view.device), name=layer.name)
            factor = inputs.damped(block.job.settings.damping).factor
            # d_j = 1 / U_jj², with UᵀU = (H + λI)⁻¹. Of dead inputs it would be that of λ alone.
            remainder = factor.diagonal().double() ** -2
            remainders[first[id(layer)]] = remainder.masked_fill(inputs.dead, 0)
    factors: dict[str, Tensor] = {}
    # Norms come first in `links`. The rows of their readers count as they are once these are
    # balanced, so that no factor depends on how the channels of the model happen to be scaled.
    for link in reversed([link for link in links if link in remainders]):
        by_row = _by_row(link, remainders[link], readers[link], factors)
        by_row = _rounded_to(modules[link.producer], by_row, link.adds_one).to(processes.device)
        # Different machines may round logarithms and powers differently, and factors cancel only if
        # producer and readers have the same bits in all processes.
        by_row = processes.like_first_(by_row.contiguous()).cpu()
        for name, kind, each in link.factors(by_row):
            factors[f"{block.name}.{name}.{kind}"] = each
    return factors


def _by_row(
    link: Link, remainder: Tensor, layers: Sequence[Layer], factors: Mapping[str, Tensor]
) -> Tensor:
    """Return the factor s of each row of a link's producer, (rows,), float32.

    s_j is proportional to d_j^(1/(p+2)) c_j^(−p/(2p+4)), where d_j is the `remainder`, and c_j the
    energy of the weights of the `layers` that read row j. In grouped-query attention several
    columns read a row: their d and c are summed. Factors have a geometric mean of 1, and are then
    clamped to 1/`_LARGEST` to `_LARGEST`; rows whose d or c is 0 have the factor 1. `factors` are
    those so far.
    """
    energy = torch.zeros_like(remainder)
    for layer in layers:
        weight = layer.weight.double()
        if (by_row := factors.get(f"{layer.name}.{_ROWS}")) is not None:
            weight = weight / by_row.to(weight)[:, None]
        energy += weight.square().sum(0)
    is_live = (remainder > 0) & (energy > 0)
    rows = torch.tensor(link.rows, device=remainder.device)
    sums = torch.zeros(2, int(rows.max()) + 1, dtype=torch.double, device=rows.device)
    d, c = sums.index_add_(1, rows, torch.stack([remainder, energy]) * is_live)
    is_live = (d > 0) & (c > 0)
    # The logarithm of d^(1/(p+2)) c^(−p/(2p+4)). Where d or c is 0, it has no finite value, and the
    # factor 1 leaves the weights as they are.
    # The mean is taken out, since the loss is the same for s and t·s: c_j s_j² grows as t², and d_j
    # / s_j² falls as t².
    logs = torch.where(is_live, (d.log() - _NORM / 2 * c.log()) / (_NORM + 2), 0.0)
    logs -= logs.sum() / is_live.sum().clamp(min=1)
    bounded = logs.clamp(-math.log(_LARGEST), math.log(_LARGEST)).exp()
    return torch.where(is_live, bounded, 1.0).float()


def _rounded_to(producer: nn.Module, factors: Tensor, adds_one: bool) -> Tensor:
    """Return the factors that divide a norm's weights after rounding; those of a layer stay."""
    if layers_of("", producer):
        return factors  # the rounding of matrices is small beside that of their grid
    # The readers are multiplied by the factor that the rounded norm really has. So the rounding of
    # the norm, up to 2⁻⁹ of a weight in bfloat16, cancels as the factor itself does.
    weight = producer.get_parameter("weight").detach().to(factors.device)
    one = float(adds_one)
    wide = weight.float() + one
    new = (wide / factors - one).to(weight.dtype).float() + one
    # A weight of 0, before or after, gives no quotient that a reader could be multiplied by.
    return torch.where((new != 0) & (wide != 0), wide / new, factors)


def _scale(module: nn.Module, factors: Mapping[str, Tensor]) -> None:
    """Multiply the columns of a module's weight, and divide its rows and bias, in place.

    The factors are by kind, as in `apply_factors`; an empty mapping changes nothing.
    """
    if not factors:
        return
    layers, one = layers_of("", module), float(_ROWS_PLUS_ONE in factors)
    weight = layers[0].view if layers else module.get_parameter("weight").detach()
    bias = getattr(module, "bias", None)
    with torch.no_grad():
        # One is added before the division and subtracted at the end, since norms of Gemma multiply
        # by 1 + w, and this sum is the factor to divide. In bfloat16 the sum would lose bits of a
        # small w.
        scaled = weight.to(torch.promote_types(weight.dtype, torch.float32)) + one
        if _COLUMNS in factors:
            scaled = scaled * factors[_COLUMNS].to(scaled)
        rows = factors.get(_ROWS_PLUS_ONE if one else _ROWS)
        if rows is not None:
            by_row = rows.to(scaled)
            scaled = scaled / (by_row[:, None] if layers else by_row)
            # The features are W x + b, so that b is divided as the rows are.
            if isinstance(bias, Tensor):
                bias.copy_(bias.to(scaled) / by_row)
        weight.copy_(scaled - one)


def _same(a: Tensor, b: Tensor) -> bool:
    """Return whether all values are equal; NaN equals NaN, since padding may compute it."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


class Probe:
    """Finds the links of a block by running it on one batch with scaled weights.

    Args:
        block: The block. Its weights are as before after each call.
        run: Runs the block, and returns its hidden state.
        shared: The identities of parameters that must not change, since other modules hold them.
    """

    def __init__(
        self, block: nn.Module, run: Callable[[], Tensor], shared: set[int] | None = None
    ) -> None:
        self._run = run
        self._modules = dict(named_modules(block))
        self._layers: dict[str, Layer] = {}
        self._norms: list[str] = []
        for name, module in self._modules.items():
            parameters = dict(module.named_parameters(recurse=False))
            if any(id(p) in (shared or ()) for p in parameters.values()):
                continue
            for layer in layers_of(name, module):
                if isinstance(layer, Linear | Conv1D) and why_not_plain(layer) is None:
                    self._layers[name] = layer
            weight = parameters.get("weight")
            if (
                set(parameters) <= {"weight", "bias"}
                and isinstance(weight, nn.Parameter)
                and weight.ndim == 1
                and weight.dtype in PLAIN_DTYPES
            ):
                self._norms.append(name)
        self._output, self._inputs = self._watched()

    def links(self) -> list[Link]:
        """Return the links of the block: producers and their readers. A layer reads from one."""
        if not _same(self._watched()[0], self._output):
            return []  # its outputs differ from run to run, so that nothing can be told from them
        links: list[Link] = []
        for link in self._candidates():
            linked = {reader for earlier in links for reader in earlier.readers}
            if linked.isdisjoint(link.readers) and self.holds([link]):
                links.append(link)
        return links

    def holds(self, links: Sequence[Link]) -> bool:
        """Return whether the largest and least factors leave the output as it is, to the bit.

        Both are powers of two, so that nothing is rounded, and far from 1, so that the output would
        change if the model clips values between producer and readers. Modules that are shared, or
        not in the block, give False.
        """
        factors: dict[str, dict[str, Tensor]] = {}
        for link in links:
            by_row = self._powers(max(link.rows) + 1, 1 / _LARGEST, _LARGEST)
            for name, kind, each in link.factors(by_row):
                factors.setdefault(name, {})[kind] = each
        if not factors.keys() <= {*self._layers, *self._norms}:
            return False
        # A norm that adds one is tested with w = 0, where powers of two are exact. The output is
        # another one then, so that the expected one comes from a run of its own.
        with self._of_scale_one([link.producer for link in links if link.adds_one]):
            expected = self._run() if any(x.adds_one for x in links) else self._output
            with self._scaled(factors):
                return _same(self._run(), expected)

    def _candidates(self) -> Iterator[Link]:
        """Yield producers with the layers whose inputs change in proportion to their rows."""
        # The order matters: the usual norm, which multiplies by w, is tried first. One that
        # multiplies by 1 + w does not change in proportion to w, so that it passes on to the second
        # test.
        for norm in self._norms:
            rows = len(self._modules[norm].get_parameter("weight"))
            if readers := self._proportional(rows, self._changed(norm, rows, _ROWS, self._inputs)):
                yield Link(norm, readers, tuple(range(rows)))
                continue
            with self._of_scale_one([norm]):
                changed = self._changed(norm, rows, _ROWS_PLUS_ONE, self._watched()[1])
            if readers := self._proportional(rows, changed):
                yield Link(norm, readers, tuple(range(rows)), adds_one=True)
        for layer in self._layers:
            rows = len(self._layers[layer].weight)
            changed = self._changed(layer, rows, _ROWS, self._inputs)
            if readers := self._proportional(rows, changed):
                yield Link(layer, readers, tuple(range(rows)))
            for name, (x, _) in changed.items():
                if x.shape[-1] > rows and (numbers := self._rows_of(layer, name)) is not None:
                    yield Link(layer, (name,), numbers)

    def _changed(
        self, producer: str, rows: int, kind: str, inputs: Mapping[str, Tensor]
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the `inputs` that scaled rows of a producer change, each with the changed one."""
        scaled = self._inputs_with(producer, {kind: self._powers(rows)})
        return {
            name: (x, scaled[name])
            for name, x in inputs.items()
            if name in scaled
            and x.shape == scaled[name].shape
            and x.shape[-1] % rows == 0
            and not _same(x, scaled[name])
        }

    def _proportional(
        self, rows: int, changed: Mapping[str, tuple[Tensor, Tensor]]
    ) -> tuple[str, ...]:
        """Return the layers each of whose columns changed as the row of its number did."""
        by_row = self._powers(rows)
        return tuple(
            name
            for name, (x, scaled) in changed.items()
            if x.shape[-1] == rows and _same(scaled, x / by_row.to(x))
        )

    def _rows_of(self, producer: str, reader: str) -> tuple[int, ...] | None:
        """Return the producer's row that each column of the reader reads.

        In run b, the rows whose number has the bit b are halved. The result is `None` if a column
        of the input is neither halved nor unchanged in all tokens, or always zero.
        """
        x = self._inputs[reader].flatten(0, -2).nan_to_num()
        largest = x.abs().max(0).values
        if not bool((largest > 0).all()):
            return None
        rows = torch.arange(len(self._layers[producer].weight))
        numbers = torch.zeros(x.shape[1], dtype=torch.long)
        # ⌈log₂ rows⌉ runs number all rows; to scale one row at a time would take a run for each.
        for bit in range(max(1, (len(rows) - 1).bit_length())):
            has_bit = rows >> bit & 1
            inputs = self._inputs_with(producer, {_ROWS: 1.0 + has_bit})
            scaled = inputs[reader].flatten(0, -2).nan_to_num()
            halved = scaled.abs().max(0).values < largest
            if not _same(scaled, torch.where(halved, x / 2, x)):
                return None
            numbers += halved.cpu().long() << bit
        return tuple(numbers.tolist()) if bool((numbers < len(rows)).all()) else None

    def _inputs_with(self, producer: str, factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the inputs of layers while one module is scaled."""
        with self._scaled({producer: factors}):
            return self._watched()[1]

    def _powers(self, count: int, one: float = 0.5, other: float = 1.0) -> Tensor:
        """Return two factors, powers of two, in an order that has no period."""
        # With a period, such as every second row, a reader that shifts or repeats rows by a
        # multiple of it would look proportional. The seed is fixed, so that all callers get the
        # same order.
        generator = torch.Generator().manual_seed(count)
        return torch.where(torch.rand(count, generator=generator) < 0.5, one, other)

    @contextmanager
    def _of_scale_one(self, norms: Sequence[str]) -> Iterator[None]:
        """Set the weights of norms that add one to them to zero in this context.

        Factors of two are exact then: (1 + w) / s − 1 seldom is.
        """
        with self._restored(norms):
            for name in norms:
                self._modules[name].get_parameter("weight").zero_()
            yield

    @contextmanager
    def _scaled(self, factors: Mapping[str, Mapping[str, Tensor]]) -> Iterator[None]:
        """Scale modules in this context."""
        with self._restored(factors):
            for name, of_module in factors.items():
                _scale(self._modules[name], of_module)
            yield

    @contextmanager
    def _restored(self, names: Iterable[str]) -> Iterator[None]:
        """Restore the weights of modules at the end of this context."""
        # Copies restore every bit. To scale back would lose values that over- or underflowed.
        parameters = [p for name in names for p in self._modules[name].parameters(recurse=False)]
        weights = [parameter.detach().clone() for parameter in parameters]
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, weight in zip(parameters, weights, strict=True):
                    parameter.copy_(weight)

    def _watched(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Run the block; return its hidden state and the inputs of its linear layers."""
        inputs: dict[str, Tensor] = {}

        def read(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else next(iter(kwargs.values()), None)
            if isinstance(x, Tensor) and x.ndim > 1:
                inputs[name] = x.detach()

        with ExitStack() as stack:
            for name, layer in self._layers.items():
                hook = layer.module.register_forward_pre_hook(partial(read, name), with_kwargs=True)
                stack.callback(hook.remove)
            return self._run(), inputs
