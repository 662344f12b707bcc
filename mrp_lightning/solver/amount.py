"""The amount of a pruning: which weights may remain, and which values they may have.

It is apart from the recipe, since a report and an export need no solver.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from mrp_lightning.errors import OptionError
from mrp_lightning.solver.arguments import GROUP_SIZE, LayerSettings
from mrp_lightning.solver.grid import GRIDS, Grid, grid_named, grid_of_bits
from mrp_lightning.solver.patterns import Dense, Pattern, make_pattern


@dataclass(frozen=True, kw_only=True)
class Amount:
    """The pattern and the grids of a pruning, which its weights show whatever the method."""

    pattern: Pattern
    grid: Grid | None = None  # of the kept weights; None leaves their values free
    head_grid: Grid | None = None  # of the output head; None leaves it as it is

    @property
    def grids(self) -> list[Grid]:
        """The grids that weights of the layers, or of the head, are put on; empty without any."""
        return [grid for grid in (self.grid, self.head_grid) if grid is not None]

    @property
    def of_layers(self) -> str:
        """The pattern and the grid in short, such as `2:4`, `50%+4bit` and `q4_0`; may be empty."""
        pattern = "" if isinstance(self.pattern, Dense) else str(self.pattern)
        return "+".join(filter(None, [pattern, str(self.grid or "")]))

    def __str__(self) -> str:
        """Return the pattern, the grid and that of the head in short: `2:4, head iq4_nl`."""
        head = f"head {self.head_grid}" if self.head_grid else ""
        return ", ".join(filter(None, [self.of_layers, head]))

    @property
    def for_head(self) -> Self:
        """The same with the output head's grid, and with nothing to remove."""
        return replace(self, pattern=Dense(), grid=self.head_grid)

    @property
    def is_of_head_alone(self) -> bool:
        """Whether all layers but the output head stay as they are."""
        return isinstance(self.pattern, Dense) and self.grid is None

    @staticmethod
    def of_config(config: Mapping[str, Any]) -> "Amount":
        """Parse the settings that a report has; see `Recipe.parse` for the errors."""
        names = [each.name for each in fields(LayerSettings)]
        given = {name: config[name] for name in names if config.get(name) is not None}
        return Amount.of_settings(LayerSettings(**given))

    @staticmethod
    def of_settings(settings: LayerSettings) -> "Amount":
        """Parse the settings of a layer; see `Recipe.parse` for the errors."""
        is_sparse = settings.sparsity is not None or settings.pattern is not None
        grid = _grid(settings, holds_zeros=is_sparse)
        of_head = settings.head_grid
        head_grid = None if of_head is None else grid_named(of_head, "head_grid")
        is_dense = not is_sparse and (grid is not None or head_grid is not None)
        pattern = Dense() if is_dense else make_pattern(settings.sparsity, settings.pattern)
        return Amount(pattern=pattern, grid=grid, head_grid=head_grid)


def _grid(settings: LayerSettings, *, holds_zeros: bool) -> Grid | None:
    """Return the grid of the kept weights, or `None`; removed ones are zeros if `holds_zeros`."""
    name, bits, group_size = settings.grid, settings.bits, settings.group_size
    if name is not None:
        grid = grid_named(name)
        # A default group size cannot be distinguished from the same number as an argument, so that
        # it contradicts no grid.
        stated = {"bits": bits, "group_size": None if group_size == GROUP_SIZE else group_size}
        contradictions = [
            f"`{argument}` {value!r}"
            for argument, value in stated.items()
            if value not in (None, getattr(grid, argument))
        ]
        if contradictions:
            raise OptionError(
                f"`grid` {name!r} has {grid.bits} bits and groups of {grid.group_size}; got "
                f"{' and '.join(contradictions)}. Leave out one or the other."
            )
        if holds_zeros and not grid.holds_zero:
            raise OptionError(
                f"`grid` {name!r} has no code for zero, so that it holds no removed weights. Take "
                f"{', '.join(each.name or '' for each in GRIDS.values() if each.holds_zero)}, or "
                "give `bits` in place of `grid`, or leave out `sparsity` and `pattern`."
            )
        return grid
    if bits is not None:
        # A bitmask stores which weights are removed, so that none of the codes needs to be zero.
        # Without a bitmask, zero is the best value of many a weight, and needs a code.
        return grid_of_bits(bits, group_size, zero_has_a_code=not holds_zeros)
    if group_size != GROUP_SIZE:
        raise OptionError(
            f"`group_size` {group_size!r} means nothing without `bits`. Give both, or leave it out."
        )
    return None
