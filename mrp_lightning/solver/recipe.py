"""The recipe of a pruning: its checked amount, method, block size and damping."""

from dataclasses import dataclass
from typing import Any

from mrp_ground.arguments import is_count, is_number
from mrp_lightning.errors import OptionError, PatternError
from mrp_lightning.solver.amount import Amount
from mrp_lightning.solver.arguments import NAMED as NAMED
from mrp_lightning.solver.arguments import LayerSettings as LayerSettings
from mrp_lightning.solver.arguments import method_parts
from mrp_lightning.solver.compensations import (
    ColumnSweep,
    Compensation,
    ExactCompensation,
    NoCompensation,
)
from mrp_lightning.solver.masks import Joint, Magnitude, Mask, MultipleRemoval, SingleRemoval, Wanda

MASKS: dict[str, Mask] = {
    mask.name: mask for mask in (Magnitude(), Wanda(), SingleRemoval(), MultipleRemoval(), Joint())
}


@dataclass(frozen=True)
class Method:
    """A mask, which chooses the weights to remove, and a compensation, which makes up for them."""

    name: str  # as the user wrote it
    mask: Mask
    compensation: Compensation

    def __str__(self) -> str:
        return self.name

    @property
    def needs_inverse(self) -> bool:
        """Whether the method uses (H + λI)⁻¹, so that λ affects its result."""
        return self.mask.needs_inverse or self.compensation.needs_inverse


def parse_method(name: str, *, tolerance: float | None = None) -> Method:
    """Return the method of a name, or of a pair MASK+COMPENSATION such as "wanda+M".

    `tolerance` concerns the compensation M; the others ignore it.

    Raises:
        MethodError: There is no such method; the message lists all.
        OptionError: The tolerance is out of range.
    """
    # All are made, so that a tolerance out of range is an error for every method.
    instances = (NoCompensation(), ColumnSweep(), ExactCompensation(tolerance))
    compensations: dict[str, Compensation] = {each.name: each for each in instances}
    mask, compensation = method_parts(name)
    return Method(name, MASKS[mask], compensations[compensation])


@dataclass(frozen=True, kw_only=True)
class Recipe(Amount):
    """How each layer is pruned: the parsed arguments of `prune_weight`.

    Attributes:
        pattern: The weights that stay: N of every M columns, a fraction, or all of them.
        grid: The values that kept weights may take, `None` for all.
        method: The mask and the compensation.
        block_size: The number of columns whose weights are chosen together, `None` for all.
        damping: λ as a fraction ≥ 0 of the mean of the Hessian's diagonal.

    Raises:
        MethodError: The mask does not exist for the pattern.
        PatternError: `block_size` would split the groups of an N:M pattern.
        OptionError: `block_size` or `damping` is out of range.
    """

    method: Method
    block_size: int | None
    damping: float

    def __post_init__(self) -> None:
        self.method.mask.check(self.pattern)
        size, pattern = self.block_size, self.pattern
        if size is not None and not is_count(size):
            raise OptionError(
                "`block_size` must be a positive number of columns, or None for all columns; got "
                f"{size!r}."
            )
        # A mask that is chosen at once for the whole layer has no blocks that could split a group.
        if size is not None and self.method.mask.by_block and size % pattern.group:
            raise PatternError(
                f'`block_size` must be a multiple of {pattern.group} for pattern "{pattern}"; got '
                f"{size}. Use for example {max(1, 128 // pattern.group) * pattern.group}."
            )
        check_damping(self.damping)
        object.__setattr__(self, "damping", float(self.damping))

    @classmethod
    def of(cls, **arguments: Any) -> "Recipe":
        """Parse the fields of `LayerSettings`; see `parse` for errors."""
        return cls.parse(LayerSettings(**arguments))

    @classmethod
    def parse(cls, settings: LayerSettings) -> "Recipe":
        """Parse the settings of a layer.

        Raises:
            PatternError: `sparsity` or `pattern` is malformed, both are given, or neither without
                a grid; or `block_size` splits the groups of the pattern.
            MethodError: There is no such method, or not for this pattern.
            OptionError: Another setting is out of range, or contradicts the others.
        """
        return cls(
            **vars(Amount.of_settings(settings)),
            method=parse_method(settings.method, tolerance=settings.tolerance),
            block_size=settings.block_size,
            damping=settings.damping,
        )


def check_damping(damping: float) -> None:
    """Raise an OptionError unless `damping` is a finite number ≥ 0."""
    if not is_number(damping) or damping < 0:
        raise OptionError(f"`damping` must be a finite number ≥ 0; got {damping!r}.")
