"""The experts of a block and the router that chooses among them, told to leave some experts out.

No family is known by its name: its own modules route and compute. The router is one without some
experts when its rows are cut out; what it then chooses are places among those that stay. Experts of
transformers 5 take tokens (tokens, features), and the numbers and weights of the experts that each
token is sent to, (tokens, chosen).
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mrp_lightning.calibration.forwards import replaced
from mrp_lightning.errors import TargetError
from mrp_lightning.narrowing.narrow import narrowed, zero_units
from mrp_lightning.targets.plan import Plan
from mrp_lightning.targets.structure import BlockParts, Structure


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
            narrowed(self._router(len(kept)), removed, self.structure.units),
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
    structure = plan.structure
    with ExitStack() as stack:
        if structure is not None and structure.kind == "experts":
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
