"""Make a model narrower: cut units out of blocks, route around experts, check a block."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mrp_lightning.calibration.walks import replaced
from mrp_lightning.errors import TargetError
from mrp_lightning.narrowing.structure import (
    BlockParts,
    NarrowingPlan,
    Structure,
    set_attributes,
)
from mrp_lightning.targets.blocks import Block
from mrp_lightning.targets.plan import Plan


def narrow(structure: Structure, config: Any) -> None:
    """Cut out of every block the units whose columns are zero in all consumers.

    Args:
        structure: The units.
        config: The configuration of the model, which gets the new number of units.

    Raises:
        TargetError: A block has too few such units. Then nothing is changed.
    """
    zero = {name: _zero_units(parts, structure.units) for name, parts in structure.blocks.items()}
    if short := [name for name, units in zero.items() if len(units) < structure.count]:
        raise TargetError(
            f"{structure.count} {structure.kind} of each block are to be cut out, and fewer than "
            f"these have only zero columns in: {', '.join(short)}. The weights were changed since "
            "they were pruned."
        )
    for parts in structure.blocks.values():
        set_attributes(parts.without(_removed_units(parts, structure), structure.units))
    set_attributes([*structure.attributes, *structure.config_entries(config)])


class StreamedNarrowing:
    """Cuts the removed units out of streamed blocks, each when it is saved.

    Args:
        structure: The units. The files of the blocks hold zeros in place of removed units.
        config: The configuration of the model.
    """

    def __init__(self, structure: Structure, config: Any) -> None:
        self._structure, self._entries = structure, structure.config_entries(config)

    @contextmanager
    def configured(self) -> Iterator[None]:
        """Write the new sizes into the configuration; restore the old ones if the context fails."""
        with set_attributes(self._entries) as former:
            yield
            former.pop_all()

    @contextmanager
    def saved(self, name: str) -> Iterator[None]:
        """Make a block that is in memory narrower for the duration of the context."""
        parts = self._structure.blocks.get(name)
        if parts is None:
            yield
            return
        removed = _removed_units(parts, self._structure)
        with set_attributes(parts.without(removed, self._structure.units)):
            yield

    def settle(self) -> None:
        """Make all blocks, whose weights are in files, narrower permanently."""
        for parts in self._structure.blocks.values():
            removed = torch.arange(self._structure.count)
            set_attributes(parts.without(removed, self._structure.units))
        set_attributes(self._structure.attributes)


def _zero_units(parts: BlockParts, units: int) -> Tensor:
    """Return the sorted indices of the units whose columns are zero in every consumer."""
    zero = torch.ones(units, dtype=torch.bool)
    for layer in parts.consumers:
        zero &= (layer.view == 0).all(0).reshape(units, -1).all(1).cpu()
    return zero.nonzero()[:, 0]


def _removed_units(parts: BlockParts, structure: Structure) -> Tensor:
    """Return the indices of `structure.count` units whose columns are zero in every consumer.

    On a grid of few bits, columns of remaining units may be zero, too. Then the removed units are
    identified by zero rows in the layers that produce them.
    """
    zero = _zero_units(parts, structure.units)
    if len(zero) > structure.count:
        is_made = torch.zeros(structure.units, dtype=torch.bool)
        for cut in parts.producers:
            if cut.tensor.ndim > 1:
                rows = cut.tensor.detach().movedim(cut.dim, 0)
                is_made |= (rows != 0).reshape(structure.units, -1).any(1).cpu()
        zero = zero[is_made[zero].long().sort(stable=True).indices[: structure.count]]
    return zero.sort().values


@dataclass(frozen=True, eq=False)
class Call:
    """A call of the experts of a block.

    Attributes:
        tokens: The input of the experts, (tokens, features).
        weights: The router's weights, (tokens, experts), zero for experts that are not chosen.
        output: The output of the experts, (tokens, features); `None` if they did not run.
    """

    tokens: Tensor
    weights: Tensor
    output: Tensor | None


class _Called(BaseException):
    """Ends a forward once the experts are called. Not an `Exception`, since models catch these."""


class Routing:
    """The experts of one block, and the router that sends tokens to them.

    Args:
        block: The block.
        parts: The parts of the block that belong to its experts.
        structure: All experts of the model, and the number of them that is removed.

    Attributes:
        module: The innermost module around router and experts.

    Raises:
        TargetError: The block has experts in several places.
    """

    def __init__(self, block: nn.Module, parts: BlockParts, structure: Structure) -> None:
        self.parts, self.structure = parts, structure
        if len(parts.consumers) != 1:
            names = ", ".join(layer.name for layer in parts.consumers)
            raise TargetError(f"`structure: experts`: one block has several sets of them: {names}.")
        self.experts = parts.consumers[0].module
        owners = {cut.module for cut in parts.cuts}
        self.module = [m for m in block.modules() if owners <= set(m.modules())][-1]

    @property
    def removed(self) -> Tensor:
        """The removed experts, whose second matrices are zero; none until `structure.count` are."""
        none = torch.tensor([], dtype=torch.long)
        if self.parts.consumers[0].view.shape[1] < self.structure.units:
            return none  # already cut out
        zero = _zero_units(self.parts, self.structure.units)
        return zero if len(zero) >= self.structure.count else none

    def require_all(self) -> None:
        """Raise a `TargetError` if experts of the block are zero before any is removed."""
        if len(zero := _zero_units(self.parts, self.structure.units)):
            raise TargetError(
                f"`structure: experts`: in {self.parts.consumers[0].name} these experts are zero "
                f"already, as removed ones are: {', '.join(map(str, zero.tolist()))}. Give the "
                "model as it was before, or use `sparsity` or `pattern` without `structure`."
            )

    @contextmanager
    def without(self, removed: Tensor) -> Iterator[None]:
        """Restrict the router to the experts that are not removed."""
        if not len(removed):
            yield
            return
        is_kept = torch.ones(self.structure.units, dtype=torch.bool)
        is_kept[removed] = False
        numbers, forward = is_kept.nonzero()[:, 0], self.experts.forward

        def renumbered(*args: Any, **kwargs: Any) -> Any:
            # The router numbers the remaining experts from 0; the experts' weights keep their old
            # indices.
            tokens, expert_indices, weights = _arguments(args, kwargs)
            return forward(tokens, numbers.to(expert_indices.device)[expert_indices], weights)

        with (
            set_attributes(self._router(len(numbers)).without(removed, self.structure.units)),
            replaced(self.experts, "forward", renumbered),
        ):
            yield

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Run each forward of this context without the experts that are removed when it starts."""
        forward = self.module.forward

        def rerouted(*args: Any, **kwargs: Any) -> Any:
            with self.without(self.removed):
                return forward(*args, **kwargs)

        with replaced(self.module, "forward", rerouted):
            yield

    @contextmanager
    def recorded(self, record: Callable[[Call], None]) -> Iterator[None]:
        """Pass each call of the experts to `record`."""
        forward = self.experts.forward

        def recording(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            record(self._call(args, kwargs, output))
            return output

        with replaced(self.experts, "forward", recording):
            yield

    def weights(self, inputs: Tensor, removed: Tensor) -> Tensor:
        """Return the router's weights (tokens, experts) for inputs of `module`."""
        calls: list[Call] = []

        def stop(*args: Any, **kwargs: Any) -> Any:
            calls.append(self._call(args, kwargs, None))
            raise _Called

        # `without` is entered last, so that it maps the indices for `stop` back to those of all
        # experts.
        with replaced(self.experts, "forward", stop), self.without(removed):
            try:
                self.module.forward(inputs)
            except _Called:
                return calls[0].weights
        raise TargetError(
            f"`structure: experts`: {self.parts.consumers[0].name} was not called for some tokens."
        )

    def outputs(self, tokens: Tensor) -> Tensor:
        """Return the outputs of all experts, (tokens, experts, features), in float32 at least."""
        one = tokens.new_ones(len(tokens), 1)
        all_outputs = [
            self.experts(tokens, torch.full_like(one, e, dtype=torch.long), one)
            for e in range(self.structure.units)
        ]
        wide = torch.promote_types(tokens.dtype, torch.float32)
        return torch.stack(all_outputs, 1).to(wide)

    def _router(self, remaining: int) -> BlockParts:
        """Return the router's parameters and attributes for some number of `remaining` experts.

        The attributes in `parts` are those for `structure.kept` experts, and multiples of it.
        """
        kept = self.structure.kept
        return replace(
            self.parts,
            cuts=[cut for cut in self.parts.cuts if cut.module is not self.experts],
            attributes=[
                (owner, name, value * remaining // kept if isinstance(value, int) else value)
                for owner, name, value in self.parts.attributes
                if owner is not self.experts
            ],
        )

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Call:
        tokens, expert_indices, weights = _arguments(args, kwargs)
        weights = weights.detach().to(torch.promote_types(weights.dtype, torch.float32))
        spread = weights.new_zeros(len(tokens), self.structure.units)
        return Call(tokens.detach(), spread.scatter_add_(1, expert_indices, weights), output)


@contextmanager
def rerouted(plan: Plan) -> Iterator[None]:
    """Run blocks without their removed experts in this context, if the plan removes experts."""
    with ExitStack() as stack:
        if isinstance(plan, NarrowingPlan) and plan.structure.kind == "experts":
            structure = plan.structure
            for block in plan.blocks:
                if block.name in structure.blocks:
                    parts = structure.blocks[block.name]
                    stack.enter_context(Routing(block.module, parts, structure).followed())
        yield


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the tokens, the numbers of the chosen experts and their weights, in this order."""
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    numbers = [x for x in tensors if not x.is_floating_point()]
    floats = [x for x in tensors if x.is_floating_point()]
    if len(numbers) != 1 or len(floats) != 2 or len(tensors[0]) != len(numbers[0]):
        raise TargetError(
            "`structure: experts`: the experts of this model are not called with tokens, the "
            "numbers of experts and their weights."
        )
    return [floats[0], numbers[0], floats[1]]


_OF_EFFECT = 0.02
"""The largest distance of two outputs, relative to the units' effect, that is rounding."""


class BlockTrial:
    """Checks the first block of each arrangement of parameters; see `_check_block`."""

    def __init__(self, structure: Structure) -> None:
        self._structure, self._seen = structure, set[Hashable]()

    def check(self, block: Block, run: Callable[[], Tensor | None]) -> None:
        """Check a block, unless a block with the same parameters was checked."""
        parts = self._structure.blocks.get(block.name)
        if parts is None:
            return
        make = tuple((type(c.module), c.name, c.dim, c.width) for c in parts.cuts)
        if make not in self._seen:
            self._seen.add(make)
            _check_block(self._structure, parts, run, block)


def _check_block(
    structure: Structure, parts: BlockParts, run: Callable[[], Tensor | None], block: Block
) -> None:
    """Check by a forward that the parts of a block's units are what their shapes suggest.

    Random units are removed temporarily. With their columns of the consumers zero, the output must
    not depend on the parameters that produce these units, and the narrower block must return the
    same output. For experts, the narrower block must return the output of all experts with a router
    that does not choose the removed ones.

    Args:
        structure: The units.
        parts: The parts of the block that belong to them.
        run: Runs the block on one batch, and returns its hidden state; `None` if the batch does
            not reach it.
        block: The block.

    Raises:
        TargetError: The outputs differ.
    """
    generator = torch.Generator().manual_seed(0)
    removed = torch.randperm(structure.units, generator=generator)[: structure.count].sort().values
    routing = Routing(block.module, parts, structure) if structure.kind == "experts" else None
    if routing is not None:
        routing.require_all()
    dense = run()
    if dense is None:
        return
    dense, name = dense.detach().clone(), block.name
    try:
        if routing is not None:
            with routing.without(removed):
                expected = independent = _output(run)
            with routing.without(removed[:1]):  # as in the search, whose first sets have one expert
                run()
        else:
            # Noise in place of the producers' entries must not change the output once the
            # consumers ignore these units.
            noise = [cut.randomised(removed, generator) for cut in parts.producers]
            with set_attributes([cut.zeroed(removed) for cut in parts.consumed]):
                expected = _output(run)
                with set_attributes(noise):
                    independent = _output(run)
        with set_attributes(parts.without(removed, structure.units)):
            narrower = _output(run)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise _refused(structure, name, f"does not run: {error}") from error
    # Another order of sums is no fault: allow rounding, relative to the units' effect or output.
    effect = float(torch.linalg.vector_norm(expected - dense.float()))
    size = float(torch.linalg.vector_norm(expected))
    allowed = max(_OF_EFFECT * effect, 4 * torch.finfo(dense.dtype).eps * size)
    if not float(torch.linalg.vector_norm(independent - expected)) <= allowed:
        raise _refused(structure, name, "would lose more than those: others are made with them")
    if not float(torch.linalg.vector_norm(narrower - expected)) <= allowed:
        raise _refused(structure, name, "computes something else")


def _output(run: Callable[[], Tensor | None]) -> Tensor:
    hidden = run()
    assert hidden is not None
    return hidden.detach().float().clone()


def _refused(structure: Structure, name: str, problem: str) -> TargetError:
    return TargetError(
        f"`structure: {structure.kind}`: {name} without some of its {structure.kind} {problem}. "
        "They do not lie in its weights as `structure` can remove them; use `sparsity` or "
        "`pattern` without it."
    )
