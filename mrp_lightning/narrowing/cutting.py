"""Cut removed units out of blocks, and check by a forward that a block can lose them."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mrp_lightning.devices import is_out_of_memory
from mrp_lightning.errors import TargetError
from mrp_lightning.narrowing.routing import Routing
from mrp_lightning.narrowing.structure import BlockParts, Structure, set_attributes
from mrp_lightning.targets.blocks import Block


def narrow(structure: Structure, config: Any) -> None:
    """Cut out of every block the units whose columns are zero in all consumers.

    The configuration of the model gets the new number of units. If a block has too few such units,
    a TargetError is raised, and nothing is changed.
    """
    zero = {name: parts.zero_units(structure.units) for name, parts in structure.blocks.items()}
    if short := [name for name, units in zero.items() if len(units) < structure.count]:
        raise TargetError(
            f"{structure.count} {structure.kind} of each block are to be cut out, and fewer than "
            f"these have only zero columns in: {', '.join(short)}. The weights were changed since "
            "they were pruned."
        )
    # Checked first, cut afterwards: a model of which some blocks are narrower runs nowhere. In each
    # block zero columns decide which units go, not a list kept elsewhere, so that what is cut is
    # exactly what contributes nothing, and the outputs stay the same.
    for parts in structure.blocks.values():
        set_attributes(parts.without(_removed_units(parts, structure), structure.units))
    set_attributes([*structure.attributes, *structure.config_entries(config)])


class StreamedNarrowing:
    """Cuts the removed units, zeros in the files, out of streamed blocks, each when it is saved."""

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
            # Any units, since tensors on the meta device change only their size.
            removed = torch.arange(self._structure.count)
            set_attributes(parts.without(removed, self._structure.units))
        set_attributes(self._structure.attributes)


def _removed_units(parts: BlockParts, structure: Structure) -> Tensor:
    """Return the indices of `structure.count` units whose columns are zero in every consumer."""
    # There may be more of them, in a model that had such units before: any contribute nothing.
    return parts.zero_units(structure.units)[: structure.count]


_OF_EFFECT = 0.02
"""The largest distance of two outputs, relative to the units' effect, that counts as rounding."""


class BlockTrial:
    """A check, by a forward, that a block without some units gives what it gives with them zero."""

    def __init__(self, structure: Structure) -> None:
        self._structure, self._seen = structure, set[Hashable]()

    def check(self, block: Block, run: Callable[[], Tensor | None]) -> None:
        """Check a block, unless one with the same arrangement of parameters was checked."""
        parts = self._structure.blocks.get(block.name)
        if parts is None:
            return
        make = tuple((type(c.module), c.name, c.dim, c.width) for c in parts.cuts)
        if make not in self._seen and _check_block(self._structure, parts, run, block):
            self._seen.add(make)


def _check_block(
    structure: Structure, parts: BlockParts, run: Callable[[], Tensor | None], block: Block
) -> bool:
    """Check by a forward that the parts of a block's units are what their shapes suggest.

    Random units are removed temporarily. With their columns of the consumers zero, the output must
    not depend on the parameters that produce these units, and the narrower block must return the
    same output. For experts, the narrower block must return the output of all experts with a router
    that does not choose the removed ones. A TargetError is raised otherwise.

    Returns whether the batch reached the block, whose hidden state `run` returns, `None` if not.
    """
    generator = torch.Generator().manual_seed(0)
    removed = torch.randperm(structure.units, generator=generator)[: structure.count].sort().values
    routing = Routing(block.module, parts, structure) if structure.kind == "experts" else None
    if routing is not None:
        routing.require_all()
    dense = run()
    if dense is None:
        return False
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
            noise = [cut.randomised(removed, generator) for cut in parts.cuts_of(consumers=False)]
            with set_attributes([cut.zeroed(removed) for cut in parts.cuts_of(consumers=True)]):
                expected = _output(run)
                with set_attributes(noise):
                    independent = _output(run)
        with set_attributes(parts.without(removed, structure.units)):
            narrower = _output(run)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        if is_out_of_memory(error):
            raise
        raise _refused(structure, name, f"does not run: {error}") from error
    # Another order of sums is no fault: allow rounding, relative to the units' effect or output.
    effect = float(torch.linalg.vector_norm(expected - dense.float()))
    size = float(torch.linalg.vector_norm(expected))
    allowed = max(_OF_EFFECT * effect, 4 * torch.finfo(dense.dtype).eps * size)
    if not float(torch.linalg.vector_norm(independent - expected)) <= allowed:
        raise _refused(structure, name, "would lose more than those: others are made with them")
    if not float(torch.linalg.vector_norm(narrower - expected)) <= allowed:
        raise _refused(structure, name, "computes something else")
    return True


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
