"""Units of a model that can be removed whole (neurons, heads, experts), and a plan to do so."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mrp_lightning.targets.layers import Layer
from mrp_lightning.targets.plan import Plan

UNITS = ("neurons", "heads", "experts")
"""The kinds of units of a block that can be removed as a whole."""
BLOCKS = "blocks"
STRUCTURES = (*UNITS, BLOCKS)
"""The kinds of parts of a model that can be removed as a whole."""

Attribute = tuple[Any, str, Any]
"""An object (a module or a configuration), the name of one of its attributes, and a new value."""


def set_attributes(attributes: Sequence[Attribute]) -> ExitStack:
    """Set attributes; the returned context, if it is entered, restores their former values."""
    with ExitStack() as stack:
        for owner, name, value in attributes:
            if hasattr(owner, name):
                stack.callback(setattr, owner, name, getattr(owner, name))
            else:
                stack.callback(delattr, owner, name)
            setattr(owner, name, value)
        return stack.pop_all()


@dataclass(frozen=True, eq=False)
class Cut:
    """A parameter or buffer along one dimension of which each unit has `width` adjacent entries."""

    module: nn.Module  # whose parameter or buffer it is
    name: str  # of the parameter or buffer
    dim: int
    width: int

    @property
    def tensor(self) -> Tensor:
        """The parameter or buffer, as the module holds it now."""
        tensor = getattr(self.module, self.name)
        assert isinstance(tensor, Tensor)
        return tensor

    def entries(self, units: Tensor) -> Tensor:
        """Return the indices along the dimension, (units · width,), of units (numbers, int64)."""
        within = torch.arange(self.width, device=units.device)
        return (units[:, None] * self.width + within).flatten().to(self.tensor.device)

    def without(self, kept: Tensor) -> Attribute:
        """Return the attribute with the tensor of the `kept` units alone."""
        return self._attribute(self.tensor.detach().index_select(self.dim, self.entries(kept)))

    def zeroed(self, units: Tensor) -> Attribute:
        """Return the attribute with a tensor in which the entries of units are zero."""
        return self._attribute(self.tensor.detach().index_fill(self.dim, self.entries(units), 0))

    def randomised(self, units: Tensor, generator: torch.Generator) -> Attribute:
        """Return the attribute with normal noise of the same deviation in the units' entries."""
        tensor, entries = self.tensor.detach(), self.entries(units)
        values = tensor.index_select(self.dim, entries)
        noise = torch.randn(values.shape, generator=generator).to(values) * values.std(correction=0)
        return self._attribute(tensor.index_copy(self.dim, entries, noise))

    def _attribute(self, tensor: Tensor) -> Attribute:
        if isinstance(original := self.tensor, nn.Parameter):
            parameter = nn.Parameter(tensor.contiguous(), requires_grad=original.requires_grad)
            return self.module, self.name, parameter
        return self.module, self.name, tensor.contiguous()


@dataclass(frozen=True, eq=False)
class BlockParts:
    """The parts of one block that belong to its units.

    Attributes:
        consumers: The layers that read the units: they lose columns, and are compensated.
        cuts: All parameters and buffers that get smaller, those of the consumers included.
        attributes: The attributes of modules that hold a size, with their new values.
        group: The number of adjacent columns of a consumer that belong to a unit.
    """

    consumers: Sequence[Layer]
    cuts: Sequence[Cut]
    attributes: Sequence[Attribute]
    group: int

    def cuts_of(self, *, consumers: bool) -> list[Cut]:
        """Return the cuts of the consumers, or those of all other parts."""
        consumed = {id(layer.parameter) for layer in self.consumers}
        return [cut for cut in self.cuts if (id(cut.tensor) in consumed) == consumers]

    def zero_units(self, units: int) -> Tensor:
        """Return the sorted indices, on the CPU, of units whose columns all consumers have zero."""
        zero = torch.ones(units, dtype=torch.bool)
        for layer in self.consumers:
            zero &= (layer.view == 0).all(0).reshape(units, -1).all(1).cpu()
        return zero.nonzero()[:, 0]

    def without(self, removed: Tensor, units: int) -> list[Attribute]:
        """Return the attributes of a block of `units` units without the `removed` ones."""
        is_kept = torch.ones(units, dtype=torch.bool)
        is_kept[removed] = False
        kept = is_kept.nonzero()[:, 0]
        return [*(cut.without(kept) for cut in self.cuts), *self.attributes]


@dataclass(frozen=True, eq=False)
class Structure:
    """The units of one kind in all blocks of a model, and the number of them that is removed.

    Attributes:
        kind: neurons, heads or experts. With heads, a unit is a key-value group with its query
            heads.
        units: The number of units in each block that has any.
        kept: The number of units that remain in each block.
        blocks: The parts that belong to the units, by the name of the block, without blocks that
            have none.
        config: The entries of the configuration for the number of units, with their new values.
        attributes: The attributes of modules outside of the blocks for the number of units.
    """

    kind: str
    units: int
    kept: int
    blocks: Mapping[str, BlockParts]
    config: Mapping[str, int]
    attributes: Sequence[Attribute] = ()

    @property
    def count(self) -> int:
        """The number of units that are removed from each block."""
        return self.units - self.kept

    @property
    def num_weights(self) -> int:
        """The number of the model's weights that are removed."""
        tensors = [cut.tensor for parts in self.blocks.values() for cut in parts.cuts]
        weights = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
        return self.count * sum(weight.numel() // self.units for weight in weights)

    def config_entries(self, config: Any) -> list[Attribute]:
        """Return the entries of a configuration that give the number of units, as attributes."""
        return [(config.get_text_config(), name, value) for name, value in self.config.items()]

    def __str__(self) -> str:
        return f"{self.kept} of {self.units} {self.kind} a block"


@dataclass(frozen=True, eq=False, kw_only=True)
class NarrowingPlan(Plan):
    """The plan of removing whole units: the layers to prune are their consumers.

    Attributes:
        structure: The units.
        others: The other layers, which tuning may change, by the name of their block.
    """

    structure: Structure
    others: Mapping[str, Sequence[Layer]] = field(default_factory=dict)
