"""The one table of method names: every method is a mask and a compensation."""

from dataclasses import dataclass

from mrp_lightning.errors import MethodError, OptionError, PatternError
from mrp_lightning.solver.column_sweep import ColumnSweep
from mrp_lightning.solver.compensation import Compensation, NoCompensation
from mrp_lightning.solver.exact import Optimum
from mrp_lightning.solver.masks import (
    LayerMask,
    Magnitude,
    Mask,
    MultipleRemoval,
    SingleRemoval,
    Wanda,
)
from mrp_lightning.solver.patterns import Pattern, SemiStructured

MASKS: dict[str, Mask] = {
    mask.name: mask for mask in (Magnitude(), Wanda(), SingleRemoval(), MultipleRemoval())
}
COMPENSATIONS: dict[str, Compensation] = {
    compensation.name: compensation for compensation in (NoCompensation(), ColumnSweep(), Optimum())
}
NAMED = {
    "magnitude": "magnitude+none",
    "wanda": "wanda+none",
    "SS": "S+S",
    "sparsegpt": "S+S",
    "SM": "S+M",
    "MS": "M+S",
    "MM": "M+M",
}


@dataclass(frozen=True)
class Method:
    """A mask and a compensation.

    Attributes:
        name: as the user wrote it.
        mask: which weights go.
        compensation: how the others make up for them.
    """

    name: str
    mask: Mask
    compensation: Compensation

    def __str__(self) -> str:
        return self.name

    def check(self, pattern: Pattern, block_size: int | None) -> None:
        """Refuse what cannot be combined, before any work.

        Raises:
            MethodError: the mask does not exist for the pattern.
            PatternError: `block_size` would split the groups of an N:M pattern.
            OptionError: `block_size` is neither None nor a positive integer.
        """
        self.mask.check(pattern)
        if block_size is None:
            return
        if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
            raise OptionError(
                f"`block_size` must be a positive number of columns, or None for all columns; got "
                f"{block_size!r}."
            )
        if isinstance(self.mask, LayerMask) or not isinstance(pattern, SemiStructured):
            return
        if block_size % pattern.group:
            raise PatternError(
                f'`block_size` must be a multiple of {pattern.group} for pattern "{pattern}"; got '
                f"{block_size}. Use for example {max(1, 128 // pattern.group) * pattern.group}."
            )


def parse_method(name: str) -> Method:
    """Look up a method by name.

    Args:
        name: one of the names in the table, or a pair MASK+COMPENSATION such as "wanda+M". Upper
            and lower case differ.

    Raises:
        MethodError: there is no such method; the message lists all.
    """
    parts = NAMED.get(name, name).split("+") if isinstance(name, str) else []
    if len(parts) != 2 or parts[0] not in MASKS or parts[1] not in COMPENSATIONS:
        raise MethodError(
            f"`method` must be one of {', '.join(NAMED)}, or MASK+COMPENSATION with MASK in "
            f"{'|'.join(MASKS)} and COMPENSATION in {'|'.join(COMPENSATIONS)} (case matters); "
            f"got {name!r}."
        )
    return Method(name, MASKS[parts[0]], COMPENSATIONS[parts[1]])
