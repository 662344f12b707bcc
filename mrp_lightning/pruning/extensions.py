"""What goes beyond pruning each layer by itself; all of it is off unless it is asked for."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from numbers import Real
from typing import Any

from mrp_lightning.allocation.rule import check_allocation
from mrp_lightning.errors import MethodError, OptionError, TargetError
from mrp_lightning.solver.recipe import Recipe
from mrp_lightning.tuning.block_tuner import BlockTuning

TARGETS = ("own", "dense")
TARGET_WEIGHT = 0.5
"""The default of `target_weight`, by measurement: see docs/methods.md."""


@dataclass(frozen=True)
class Extensions:
    """What is done beside pruning each layer by itself. `Extensions.of` makes one for users.

    Attributes:
        target_weight: α: how far, from 0 to 1, layers aim at their outputs in the dense model in
            place of those that their own dense weight has on the inputs that they now get.
        allocation: How the sparsity is spread over blocks, one of `ALLOCATIONS`.
        tuning: How the kept weights of each block are tuned once it is pruned, `None` for not.
    """

    target_weight: float = 0.0
    allocation: str = "uniform"
    tuning: BlockTuning | None = None

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        *,
        target: str = "own",
        target_weight: float | None = None,
        allocation: str = "uniform",
        tuning: bool | BlockTuning | Mapping[str, Any] | None = False,
    ) -> "Extensions":
        """Check what users give.

        Args:
            recipe: How layers are pruned.
            target: "own" or "dense".
            target_weight: α, above 0 and at most 1, where the target is dense; `None` for the
                default, ½.
            allocation: "uniform", "dlp" or "output".
            tuning: Whether blocks are tuned, or how.

        Raises:
            OptionError: A value is out of range, or does not go with the others or the pattern.
            MethodError: The method has no compensation, by which a layer could aim at anything.
        """
        check_allocation(allocation, recipe.pattern)
        if isinstance(tuning, Mapping):
            tuning = BlockTuning(**tuning)
        how = BlockTuning() if tuning is True else tuning or None
        if target not in TARGETS:
            raise OptionError(f"`target` must be one of {', '.join(TARGETS)}; got {target!r}.")
        if target == "own":
            if target_weight is not None:
                raise OptionError(
                    f"`target_weight` {target_weight!r} means nothing without `target: dense`. "
                    "Give both, or leave it out."
                )
            return cls(0.0, allocation, how)
        if recipe.method.compensation.name == "none":
            raise MethodError(
                f"`target: dense` moves the weights that are kept, and the method {recipe.method} "
                "moves none. Take a method with a compensation, such as "
                f'"{recipe.method.mask.name}+M", or leave `target` out.'
            )
        weight = TARGET_WEIGHT if target_weight is None else target_weight
        if isinstance(weight, bool) or not isinstance(weight, Real) or not 0 < weight <= 1:
            raise OptionError(f"`target_weight` must be a number in (0, 1]; got {target_weight!r}.")
        return cls(float(weight), allocation, how)

    def require_blocks(self) -> None:
        """Refuse what cannot be done in a model that is pruned in one pass.

        Raises:
            TargetError: There are no blocks, and something here works on them.
        """
        needing = {"allocation": self.allocation != "uniform", "tuning": self.tuning is not None}
        named = [f"`{name}`" for name, is_asked_for in needing.items() if is_asked_for]
        if named:
            raise TargetError(
                f"{' and '.join(named)} work on repeated blocks, and none were found in this "
                "model. Name them in `blocks`, or leave this out."
            )

    def config(self) -> dict[str, Any]:
        """The options, as a report keeps them and `of` takes them."""
        return {
            "target": "dense" if self.target_weight else "own",
            "target_weight": self.target_weight or None,
            "allocation": self.allocation,
            "tuning": None if self.tuning is None else asdict(self.tuning),
        }
