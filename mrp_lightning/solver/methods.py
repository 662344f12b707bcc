"""The one table of method names: every method is a mask and a compensation."""

from dataclasses import dataclass

from mrp_lightning.errors import MethodError
from mrp_lightning.solver.compensations import ColumnSweep, Compensation, NoCompensation
from mrp_lightning.solver.exact import ExactCompensation
from mrp_lightning.solver.joint import Joint
from mrp_lightning.solver.masks import Magnitude, Mask, MultipleRemoval, SingleRemoval, Wanda

MASKS: dict[str, Mask] = {
    mask.name: mask for mask in (Magnitude(), Wanda(), SingleRemoval(), MultipleRemoval(), Joint())
}
NAMED = {
    "magnitude": "magnitude+none",
    "wanda": "wanda+none",
    "SS": "S+S",
    "sparsegpt": "S+S",
    "SM": "S+M",
    "MS": "M+S",
    "MM": "M+M",
    "JM": "J+M",
}


@dataclass(frozen=True)
class Method:
    """A mask, which says what weights go, and a compensation, which makes up for them."""

    name: str  # as the user wrote it
    mask: Mask
    compensation: Compensation

    def __str__(self) -> str:
        return self.name

    @property
    def needs_inverse(self) -> bool:
        """Whether the method uses (H + λI)⁻¹, so that λ has a part in its result."""
        return self.mask.needs_inverse or self.compensation.needs_inverse


def parse_method(name: str, *, tolerance: float = 1e-6) -> Method:
    """Look up a method by its name in the table, or by a pair MASK+COMPENSATION such as "wanda+M".

    `tolerance` is that of the compensation M, and means nothing to the others.

    Raises:
        MethodError: There is no such method; the message lists all.
        OptionError: The tolerance is out of range.
    """
    known = (NoCompensation(), ColumnSweep(), ExactCompensation(tolerance))
    compensations: dict[str, Compensation] = {each.name: each for each in known}
    parts = NAMED.get(name, name).split("+") if isinstance(name, str) else []
    if len(parts) != 2 or parts[0] not in MASKS or parts[1] not in compensations:
        raise MethodError(
            f"`method` must be one of {', '.join(NAMED)}, or MASK+COMPENSATION with MASK in "
            f"{'|'.join(MASKS)} and COMPENSATION in {'|'.join(compensations)} (case matters); "
            f"got {name!r}."
        )
    return Method(name, MASKS[parts[0]], compensations[parts[1]])
