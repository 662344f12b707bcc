"""Route the tokens of a block to some of its experts, and observe how they are routed."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mrp_lightning.calibration.walks import replaced
from mrp_lightning.errors import TargetError
from mrp_lightning.narrowing.structure import BlockParts, NarrowingPlan, Structure, set_attributes
from mrp_lightning.targets.plan import Plan


@dataclass(frozen=True, eq=False)
class Call:
    """A call of the experts of a block."""

    tokens: Tensor  # the input of the experts, (tokens, features)
    weights: Tensor  # the router's, (tokens, experts), zero for experts that are not chosen
    output: Tensor | None  # of the experts, (tokens, features); None if they did not run


class _Called(BaseException):
    """Ends a forward once the experts are called. Not an `Exception`, since models catch these."""


class Routing:
    """The experts of one block, and the router that sends tokens to them.

    Attributes:
        module: The innermost module around router and experts.
        experts: The module that holds the weights of all experts.

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
        """The removed experts, whose second matrices are zero: indices, int64 on the CPU.

        There are none until `structure.count` matrices are zero, and none once they are cut out.
        """
        none = torch.tensor([], dtype=torch.long)
        if self.parts.consumers[0].view.shape[1] < self.structure.units:
            return none  # already cut out
        zero = self.parts.zero_units(self.structure.units)
        return zero if len(zero) >= self.structure.count else none

    def require_all(self) -> None:
        """Raise a `TargetError` if experts of the block are zero before any is removed."""
        if len(zero := self.parts.zero_units(self.structure.units)):
            raise TargetError(
                f"`structure: experts`: in {self.parts.consumers[0].name} these experts are zero "
                f"already, as removed ones are: {', '.join(map(str, zero.tolist()))}. Give the "
                "model as it was before, or use `sparsity` or `pattern` without `structure`."
            )

    @contextmanager
    def without(self, removed: Tensor) -> Iterator[None]:
        """Restrict the router to the experts that are not removed, in this context."""
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
        """Leave the removed experts out of each forward in this context.

        The removed ones are those at the start of that forward, not of the context.
        """
        forward = self.module.forward

        def rerouted(*args: Any, **kwargs: Any) -> Any:
            with self.without(self.removed):
                return forward(*args, **kwargs)

        with replaced(self.module, "forward", rerouted):
            yield

    @contextmanager
    def recorded(self, record: Callable[[Call], None]) -> Iterator[None]:
        """Pass each call of the experts in this context to `record`."""
        forward = self.experts.forward

        def recording(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            record(self._call(args, kwargs, output))
            return output

        with replaced(self.experts, "forward", recording):
            yield

    def weights(self, inputs: Tensor, removed: Tensor) -> Tensor:
        """Return the router's weights (tokens, experts) for inputs of `module`.

        They are zero for the `removed` experts, and in float32 at least. No expert runs.
        """
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
