"""Try on one batch whether a block without some units computes what it is thought to compute."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from mrp_lightning.errors import TargetError
from mrp_lightning.narrowing.narrow import narrowed, without_columns
from mrp_lightning.narrowing.routing import Routing
from mrp_lightning.targets.blocks import Block
from mrp_lightning.targets.structure import BlockParts, Structure

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
    without: AbstractContextManager[None] = without_columns(parts, removed)
    if structure.kind == "experts":
        routing = Routing(block.module, parts, structure)
        routing.require_all()
        without = routing.without(removed)
    dense = run()
    if dense is None:
        return
    dense, name = dense.detach().clone(), block.name
    try:
        with without:
            expected = blind = _output(run)
            if structure.kind != "experts":
                with _noise(parts, removed, generator):
                    blind = _output(run)
        with narrowed(parts, removed, structure.units):
            narrower = _output(run)
        if structure.kind == "experts":
            with routing.without(removed[:1]):  # as the search for those that go begins
                run()
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise _refused(structure, name, f"does not run: {error}") from error
    effect = float(torch.linalg.vector_norm(expected - dense.float()))
    size = float(torch.linalg.vector_norm(expected))
    allowed = max(_OF_EFFECT * effect, 4 * torch.finfo(dense.dtype).eps * size)
    if not float(torch.linalg.vector_norm(blind - expected)) <= allowed:
        raise _refused(structure, name, "would lose more than those: others are made with them")
    if not float(torch.linalg.vector_norm(narrower - expected)) <= allowed:
        raise _refused(structure, name, "computes something else")


def _output(run: Callable[[], Tensor | None]) -> Tensor:
    found = run()
    assert found is not None
    return found.detach().float().clone()


@contextmanager
def _noise(parts: BlockParts, units: Tensor, generator: torch.Generator) -> Iterator[None]:
    """Let the entries of some units in what makes them be random in this context."""
    held = []
    with torch.no_grad():
        for cut in parts.producers:
            parameter, entries = cut.tensor.detach(), cut.entries(units)
            before = parameter.index_select(cut.dim, entries)
            noise = torch.randn(before.shape, generator=generator).to(before) * before.std()
            parameter.index_copy_(cut.dim, entries, noise)
            held.append((parameter, cut.dim, entries, before))
        try:
            yield
        finally:
            for parameter, dim, entries, before in held:
                parameter.index_copy_(dim, entries, before)


def _refused(structure: Structure, name: str, what: str) -> TargetError:
    return TargetError(
        f"`structure: {structure.kind}`: {name} without some of its {structure.kind} {what}. They "
        "do not lie in its weights as `structure` can remove them; use `sparsity` or `pattern` "
        "without it."
    )
