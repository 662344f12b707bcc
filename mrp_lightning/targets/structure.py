"""Parts of a model that can be removed whole: neurons, heads, experts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mrp_lightning.targets.layers import Layer

STRUCTURES = ("neurons", "heads", "experts")
"""What can be removed whole."""


@dataclass(frozen=True, eq=False)
class Cut:
    """A parameter or buffer that gets smaller along one dimension: each unit has some places there.

    The places of a unit are neighbours.
    """

    module: nn.Module  # holds the tensor
    name: str  # in that module
    dim: int
    width: int  # entries of a unit

    @property
    def tensor(self) -> Tensor:
        """The parameter or buffer, as the module holds it now."""
        tensor = getattr(self.module, self.name)
        assert isinstance(tensor, Tensor)
        return tensor

    def entries(self, units: Tensor) -> Tensor:
        """The places along the dimension of some units."""
        within = torch.arange(self.width, device=units.device)
        return (units[:, None] * self.width + within).flatten().to(self.tensor.device)

    def without(self, kept: Tensor) -> Tensor:
        """The tensor with the kept units alone; a parameter if it is one."""
        before = self.tensor
        after = before.detach().index_select(self.dim, self.entries(kept)).contiguous()
        if isinstance(before, nn.Parameter):
            return nn.Parameter(after, requires_grad=before.requires_grad)
        return after


Attribute = tuple[Any, str, Any]
"""An attribute that says a size: its owner, a module or a configuration, its name, and its value in
the narrower model."""


@dataclass(frozen=True, eq=False)
class BlockParts:
    """What belongs to the units of one block.

    Attributes:
        consumers: The layers that read the units: they lose columns, and the others make up for it.
        cuts: All parameters and buffers that get smaller, those of the consumers too.
        attributes: The attributes of modules that say their sizes.
        group: How many neighbouring columns of a consumer belong to a unit.
    """

    consumers: Sequence[Layer]
    cuts: Sequence[Cut]
    attributes: Sequence[Attribute]
    group: int

    @property
    def producers(self) -> list[Cut]:
        """The cuts of all but the consumers."""
        reading = {id(layer.parameter) for layer in self.consumers}
        return [cut for cut in self.cuts if id(cut.tensor) not in reading]

    def columns(self, units: Tensor) -> Tensor:
        """The columns of some units in the consumers."""
        return (units[:, None] * self.group + torch.arange(self.group)).flatten()


@dataclass(frozen=True, eq=False)
class Structure:
    """The units of one kind in all blocks of a model, and how many of them go.

    Attributes:
        kind: neurons, heads or experts.
        units: How many there are in each block that has any.
        kept: How many are to stay in each block.
        blocks: What belongs to them, by the name of the block.
        config: The entries of the configuration that say their number, and what they become.
        attributes: The attributes of modules outside the blocks that say their number.
    """

    kind: str
    units: int
    kept: int
    blocks: Mapping[str, BlockParts]
    config: Mapping[str, int]
    attributes: Sequence[Attribute] = ()

    @property
    def count(self) -> int:
        """The number of units that go in each block."""
        return self.units - self.kept

    @property
    def num_weights(self) -> int:
        """The number of the model's weights that go."""
        tensors = [cut.tensor for parts in self.blocks.values() for cut in parts.cuts]
        weights = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
        return self.count * sum(weight.numel() // self.units for weight in weights)

    def config_entries(self, config: Any) -> list[Attribute]:
        """The entries of a model's configuration that say their number."""
        return [(config.get_text_config(), name, value) for name, value in self.config.items()]

    def __str__(self) -> str:
        return f"{self.kept} of {self.units} {self.kind} a block"
