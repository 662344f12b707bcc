"""Make a block, or a model, narrower: cut units out, route around experts, and try it."""

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
    """Cut the removed units out of all blocks: those whose columns are zero in all consumers.

    Args:
        structure: The units.
        config: The configuration, which says their number from then on.

    Raises:
        TargetError: A block has fewer such units than are to go; then nothing is changed.
    """
    gone = {name: zero_units(parts, structure.units) for name, parts in structure.blocks.items()}
    if short := [name for name, units in gone.items() if len(units) < structure.count]:
        raise TargetError(
            f"{structure.count} {structure.kind} of each block are to be cut out, and fewer than "
            f"these have only zero columns in: {', '.join(short)}. The weights were changed since "
            "they were pruned."
        )
    for name, parts in structure.blocks.items():
        set_attributes(parts.without(gone[name][: structure.count], structure.units))
    set_attributes([*structure.attributes, *structure.config_entries(config)])


class StreamedNarrowing:
    """Cuts the removed units out of blocks that stay in files: of each as it is saved.

    Args:
        structure: The units, which are zero in the files until then.
        config: The configuration that says their number.
    """

    def __init__(self, structure: Structure, config: Any) -> None:
        self._structure, self._entries = structure, structure.config_entries(config)

    @contextmanager
    def configured(self) -> Iterator[None]:
        """Let the configuration say the new sizes from now on, unless what is in here fails."""
        with set_attributes(self._entries) as former:
            yield
            former.pop_all()

    @contextmanager
    def saved(self, name: str) -> Iterator[None]:
        """Let a block that is in memory be narrower in this context."""
        parts, units = self._structure.blocks.get(name), self._structure.units
        if parts is None:
            yield
            return
        gone = zero_units(parts, units)[: self._structure.count]
        with set_attributes(parts.without(gone, units)):
            yield

    def settle(self) -> None:
        """Let all blocks be narrower for good; their weights are in files."""
        for parts in self._structure.blocks.values():
            removed = torch.arange(self._structure.count)
            set_attributes(parts.without(removed, self._structure.units))
        set_attributes(self._structure.attributes)


def zero_units(parts: BlockParts, units: int) -> Tensor:
    """The units whose columns are zero in every consumer: their numbers, in order."""
    zero = torch.ones(units, dtype=torch.bool)
    for layer in parts.consumers:
        zero &= (layer.view == 0).all(0).reshape(units, -1).all(1).cpu()
    return zero.nonzero()[:, 0]


@dataclass(frozen=True, eq=False)
class Call:
    """What the experts of a block were called with, and gave.

    Attributes:
        tokens: Their input, (tokens, features).
        weights: What the router gives each expert, (tokens, experts): zero where it does not choose
            one.
        output: What they gave, (tokens, features); `None` where they did not run.
    """

    tokens: Tensor
    weights: Tensor
    output: Tensor | None


class _Called(BaseException):
    """Ends a forward once the experts are called. Not an Exception: models catch these."""


class Routing:
    """The experts of one block, and what sends tokens to them.

    Args:
        block: The block.
        parts: What belongs to its experts.
        structure: All experts of the model, and how many of them go.

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
        """The experts that are removed: whose second matrices are zero. None until enough are."""
        none = torch.tensor([], dtype=torch.long)
        if self.parts.consumers[0].view.shape[1] < self.structure.units:
            return none  # they are cut out
        zero = zero_units(self.parts, self.structure.units)
        return zero if len(zero) >= self.structure.count else none

    def require_all(self) -> None:
        """Refuse a block in which experts are zero that nobody has removed.

        Raises:
            TargetError: There are such.
        """
        if len(zero := zero_units(self.parts, self.structure.units)):
            raise TargetError(
                f"`structure: experts`: in {self.parts.consumers[0].name} these experts are zero "
                f"already, as removed ones are: {', '.join(map(str, zero.tolist()))}. Give the "
                "model as it was before, or use `sparsity` or `pattern` without `structure`."
            )

    @contextmanager
    def without(self, removed: Tensor) -> Iterator[None]:
        """Let the router choose among the other experts only."""
        if not len(removed):
            yield
            return
        stays = torch.ones(self.structure.units, dtype=torch.bool)
        stays[removed] = False
        kept, forward = stays.nonzero()[:, 0], self.experts.forward

        def renumbered(*args: Any, **kwargs: Any) -> Any:
            given = _arguments(args, kwargs)
            given[1] = kept.to(given[1].device)[given[1]]
            return forward(*given)

        with (
            set_attributes(self._router(len(kept)).without(removed, self.structure.units)),
            replaced(self.experts, "forward", renumbered),
        ):
            yield

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Let each forward be without the experts that are removed by then."""
        forward = self.module.forward

        def rerouted(*args: Any, **kwargs: Any) -> Any:
            with self.without(self.removed):
                return forward(*args, **kwargs)

        with replaced(self.module, "forward", rerouted):
            yield

    @contextmanager
    def recorded(self, note: Callable[[Call], None]) -> Iterator[None]:
        """Let `note` be called with each call of the experts."""
        forward = self.experts.forward

        def noted(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            note(self._call(args, kwargs, output))
            return output

        with replaced(self.experts, "forward", noted):
            yield

    def weights(self, inputs: Tensor, removed: Tensor) -> Tensor:
        """What the router gives each expert, (tokens, experts), for inputs of `module`."""
        found: list[Call] = []

        def stop(*args: Any, **kwargs: Any) -> Any:
            found.append(self._call(args, kwargs, None))
            raise _Called

        # Inside `without`, whose numbers are those of all experts.
        with replaced(self.experts, "forward", stop), self.without(removed):
            try:
                self.module.forward(inputs)
            except _Called:
                return found[0].weights
        raise TargetError(
            f"`structure: experts`: {self.parts.consumers[0].name} was not called for some tokens."
        )

    def outputs(self, tokens: Tensor) -> Tensor:
        """What each expert gives for tokens, (tokens, experts, features), in float32 at least."""
        one = tokens.new_ones(len(tokens), 1)
        all_outputs = [
            self.experts(tokens, torch.full_like(one, e, dtype=torch.long), one)
            for e in range(self.structure.units)
        ]
        wide = torch.promote_types(tokens.dtype, torch.float32)
        return torch.stack(all_outputs, 1).to(wide)

    def _router(self, stays: int) -> BlockParts:
        """What is narrower where so many experts stay, but the experts, which are only renumbered.

        Attributes count experts, or parts of them.
        """
        kept = self.structure.kept
        return replace(
            self.parts,
            cuts=[cut for cut in self.parts.cuts if cut.module is not self.experts],
            attributes=[
                (owner, name, value * stays // kept if isinstance(value, int) else value)
                for owner, name, value in self.parts.attributes
                if owner is not self.experts
            ],
        )

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Call:
        tokens, chosen, weights = _arguments(args, kwargs)
        weights = weights.detach().to(torch.promote_types(weights.dtype, torch.float32))
        spread = weights.new_zeros(len(tokens), self.structure.units)
        return Call(tokens.detach(), spread.scatter_add_(1, chosen, weights), output)


@contextmanager
def rerouted(plan: Plan) -> Iterator[None]:
    """Let the blocks of a plan that removes experts run without those that are removed by then."""
    with ExitStack() as stack:
        if isinstance(plan, NarrowingPlan) and plan.structure.kind == "experts":
            structure = plan.structure
            for block in plan.blocks:
                if block.name in structure.blocks:
                    parts = structure.blocks[block.name]
                    stack.enter_context(Routing(block.module, parts, structure).followed())
        yield


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The tokens, the numbers of the experts and their weights, in this order."""
    found = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    numbers = [x for x in found if not x.is_floating_point()]
    floats = [x for x in found if x.is_floating_point()]
    if len(numbers) != 1 or len(floats) != 2 or len(found[0]) != len(numbers[0]):
        raise TargetError(
            "`structure: experts`: the experts of this model are not called with tokens, the "
            "numbers of experts and their weights."
        )
    return [floats[0], numbers[0], floats[1]]


_OF_EFFECT = 0.02
"""How much of the units' own effect the outputs may be apart by: rounding."""


class BlockTrial:
    """Tries one block of each make, the first that is walked."""

    def __init__(self, structure: Structure) -> None:
        self._structure, self._seen = structure, set[Hashable]()

    def check(self, block: Block, run: Callable[[], Tensor | None]) -> None:
        """Try a block, unless one like it was tried; see `check_block`."""
        parts = self._structure.blocks.get(block.name)
        if parts is None:
            return
        make = tuple((type(c.module), c.name, c.dim, c.width) for c in parts.cuts)
        if make not in self._seen:
            self._seen.add(make)
            check_block(self._structure, parts, run, block)


def check_block(
    structure: Structure, parts: BlockParts, run: Callable[[], Tensor | None], block: Block
) -> None:
    """Refuse a block in which the units are not where the shapes of its parameters suggest.

    Some units are removed at random. With their columns in the consumers zero, what makes these
    units must have no part in the output, and the narrower block must give the same output. Of
    experts it must give what all of them do where the router, without some rows, leaves these out.

    Args:
        structure: The units.
        parts: What belongs to them in the block.
        run: Runs the block on one batch, and gives its hidden state; `None` where the batch does
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
            with routing.without(removed[:1]):  # the first sets of the search have one expert
                run()
        else:
            noise = [cut.randomised(removed, generator) for cut in parts.producers]
            with set_attributes([cut.zeroed(removed) for cut in parts.consumed]):
                expected = _output(run)
                with set_attributes(noise):
                    independent = _output(run)
        with set_attributes(parts.without(removed, structure.units)):
            narrower = _output(run)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise _refused(structure, name, f"does not run: {error}") from error
    effect = float(torch.linalg.vector_norm(expected - dense.float()))
    size = float(torch.linalg.vector_norm(expected))
    allowed = max(_OF_EFFECT * effect, 4 * torch.finfo(dense.dtype).eps * size)
    if not float(torch.linalg.vector_norm(independent - expected)) <= allowed:
        raise _refused(structure, name, "would lose more than those: others are made with them")
    if not float(torch.linalg.vector_norm(narrower - expected)) <= allowed:
        raise _refused(structure, name, "computes something else")


def _output(run: Callable[[], Tensor | None]) -> Tensor:
    found = run()
    assert found is not None
    return found.detach().float().clone()


def _refused(structure: Structure, name: str, what: str) -> TargetError:
    return TargetError(
        f"`structure: {structure.kind}`: {name} without some of its {structure.kind} {what}. They "
        "do not lie in its weights as `structure` can remove them; use `sparsity` or `pattern` "
        "without it."
    )
