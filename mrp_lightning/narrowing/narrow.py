"""Make a block, or a model, narrower: keep some units of each block and cut out the others."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mrp_lightning.errors import TargetError
from mrp_lightning.targets.structure import Attribute, BlockParts, Structure


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
        _cut(parts, gone[name][: structure.count], structure.units)
    _set(structure.attributes)
    _set(structure.config_entries(config))


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
        before = [(config, name, getattr(config, name)) for config, name, _ in self._entries]
        _set(self._entries)
        try:
            yield
        except BaseException:
            _set(before)
            raise

    @contextmanager
    def saved(self, name: str) -> Iterator[None]:
        """Let a block that is in memory be narrower in this context."""
        parts, units = self._structure.blocks.get(name), self._structure.units
        if parts is None:
            yield
            return
        gone = zero_units(parts, units)[: self._structure.count]
        with narrowed(parts, gone, units):
            yield

    def settle(self) -> None:
        """Let all blocks be narrower for good; their weights are in files."""
        for parts in self._structure.blocks.values():
            _cut(parts, torch.arange(self._structure.count), self._structure.units)
        _set(self._structure.attributes)


@contextmanager
def narrowed(parts: BlockParts, removed: Tensor, units: int) -> Iterator[None]:
    """Let a block be without the removed units in this context, and as it was after it."""
    held = [(cut, cut.tensor) for cut in parts.cuts]
    values = [(module, name, getattr(module, name)) for module, name, _ in parts.attributes]
    try:
        _cut(parts, removed, units)
        yield
    finally:
        for cut, tensor in held:
            setattr(cut.module, cut.name, tensor)
        _set(values)


@contextmanager
def without_columns(parts: BlockParts, units: Tensor) -> Iterator[None]:
    """Let the columns of some units be zero in all consumers in this context."""
    held = []
    with torch.no_grad():
        for layer in parts.consumers:
            weight = layer.weight
            columns = parts.columns(units).to(weight.device)
            held.append((weight, columns, weight[:, columns]))
            weight[:, columns] = 0
        try:
            yield
        finally:
            for weight, columns, before in held:
                weight[:, columns] = before


def zero_units(parts: BlockParts, units: int) -> Tensor:
    """The units whose columns are zero in every consumer: their numbers, in order."""
    zero = torch.ones(units, dtype=torch.bool)
    for layer in parts.consumers:
        zero &= (layer.view == 0).all(0).reshape(units, -1).all(1).cpu()
    return zero.nonzero()[:, 0]


def _cut(parts: BlockParts, removed: Tensor, units: int) -> None:
    """Give the modules tensors without the removed units, and the attributes that fit them."""
    stays = torch.ones(units, dtype=torch.bool)
    stays[removed] = False
    kept = stays.nonzero()[:, 0]
    for cut in parts.cuts:
        setattr(cut.module, cut.name, cut.without(kept))
    _set(parts.attributes)


def _set(attributes: Sequence[Attribute]) -> None:
    for owner, name, value in attributes:
        setattr(owner, name, value)
