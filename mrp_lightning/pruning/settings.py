"""The settings of a pruning: its arguments, checked and parsed."""

from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cached_property
from typing import Any

from mrp_ground.arguments import checked
from mrp_lightning.errors import ERROR_OF_ARGUMENT, MethodError, OptionError, TargetError
from mrp_lightning.narrowing.structure import BLOCKS, STRUCTURES
from mrp_lightning.pruning.arguments import BlockTuning as BlockTuning
from mrp_lightning.pruning.arguments import PruningArguments
from mrp_lightning.solver.columns import column_method
from mrp_lightning.solver.patterns import Dense, Unstructured
from mrp_lightning.solver.recipe import Recipe
from mrp_lightning.targets.blocks import as_patterns

_ALLOCATIONS = ("uniform", "output")
TARGETS = ("own", "dense")

_NAMES = ("targets", "ignore", "blocks")
_NOT_WHOLE = (
    *("pattern", "allocation", "targets", "ignore", "blocks", "skip_indivisible"),
    *("block_size", "tolerance"),
)
"""Settings that exclude `structure`, since they choose layers, or weights within a layer."""
_OF_PARTS = (*_NOT_WHOLE, "method", "target", "tuning", "balance", "bits", "grid", "head_grid")
"""Settings that exclude `structure: blocks`, which leaves no part of a block to choose or tune."""
_OF_BLOCKS = (
    *("structure", "target", "allocation", "balance", "tuning", "targets", "ignore", "blocks"),
    "skip_indivisible",
)
"""Settings without a meaning where the output head alone is quantised."""
_OF_GRIDS = ("bits", "grid", "group_size", "head_grid", "balance")
"""Settings that round what is kept; their defaults round nothing."""


@checked(errors=ERROR_OF_ARGUMENT)
@dataclass(frozen=True, kw_only=True)
class Settings(PruningArguments):
    """The arguments of a pruning, which are also keyword arguments of the callbacks.

    Give exactly one of `sparsity` and `pattern`, or, for quantisation alone, neither but `bits`,
    `grid` or `head_grid`.

    Raises:
        PatternError: `sparsity`, `pattern` or `block_size` are malformed.
        MethodError: There is no such method, or not for this pattern, `structure` or `target`.
        OptionError: Another argument is out of range, or contradicts the others; or `targets` is
            empty.
    """

    @cached_property
    def recipe(self) -> Recipe:
        """The parsed recipe of each layer, from the arguments that concern a single layer."""
        return Recipe.parse(self)

    def __post_init__(self) -> None:
        if self.targets is not None and not as_patterns(self.targets):
            raise OptionError(
                "`targets` is empty, so nothing would be pruned. Name layers, such as `q_proj`, or "
                "leave it out: then all layers in the blocks are pruned."
            )
        # One form of each value, so that equal settings have equal configs, on which the
        # fingerprint of a run depends: a name is a list of one, and no names are None.
        vars(self).update({name: as_patterns(getattr(self, name)) or None for name in _NAMES})
        # Before the recipe is parsed, whose errors would be about patterns: a structure takes none.
        if self.structure is not None:
            self._check_structure()
        # The checks after it compare the recipe with arguments that no single layer has.
        recipe = self.recipe
        if recipe.is_of_head_alone:
            self._check_head_alone()
        if self.pattern is not None:  # "2 : 4", too, is written as 2:4
            vars(self).update(pattern=str(recipe.pattern))
        if recipe.grid is not None:  # a named grid implies them
            vars(self).update(bits=recipe.grid.bits, group_size=recipe.grid.group_size)
        self._check_allocation()
        if self.balance and recipe.grid is None:
            raise OptionError(
                "`balance` scales columns for the groups of a grid, and weights that are on no "
                "grid would stay as they are. Give `bits` or `grid`, or leave `balance` out."
            )
        self._check_target()

    @property
    def block_tuning(self) -> BlockTuning | None:
        """The options of block tuning, `None` if blocks are not tuned."""
        return BlockTuning() if self.tuning is True else self.tuning or None

    @property
    def grid_waits(self) -> bool:
        """Whether a block is quantised only after it is tuned.

        Tuning unquantised weights first loses less than tuning on the grid. In quantisation alone,
        the unquantised weights are the dense ones, and need no tuning.
        """
        recipe = self.recipe
        # Without removal the tuner changes scales instead, and the grid comes first.
        return bool(self.tuning and recipe.grid and not isinstance(recipe.pattern, Dense))

    def _check_head_alone(self) -> None:
        if excluded := self._given(_OF_BLOCKS):
            raise OptionError(
                f"`head_grid` alone changes nothing but the output head, so that {excluded} would "
                "mean nothing. Leave this out, or give `sparsity`, `pattern`, `bits` or `grid`."
            )

    def _given(self, names: Sequence[str]) -> str:
        """Return those of some settings that have no default value, for a message."""
        config, defaults = self.config(), self.defaults() | {"method": "SM"}
        return ", ".join(f"`{name}`" for name in names if config[name] != defaults[name])

    def _check_structure(self) -> None:
        if self.structure not in STRUCTURES:
            raise OptionError(
                f"`structure` must be one of {', '.join(STRUCTURES)}; got {self.structure!r}."
            )
        if self.structure == BLOCKS:
            if excluded := self._given(_OF_PARTS):
                raise OptionError(
                    "`structure: blocks` removes a part (`sparsity`) of the blocks, chosen by the "
                    f"model's output. Leave out {excluded}; another run can prune or quantise the "
                    "blocks that stay, and `distill` trains them."
                )
            return
        if excluded := self._given(_NOT_WHOLE):
            raise OptionError(
                f"`structure: {self.structure}` removes a part (`sparsity`) of the "
                f"{self.structure} of every block, the same number in each, so that an ordinary "
                f"configuration describes it. Leave out {excluded}."
            )
        column_method(self.method)
        if self.bits is not None or self.grid is not None:
            raise OptionError(
                f"`structure: {self.structure}` goes with no `bits` or `grid` in one run. Remove "
                f"{self.structure} in a first run, and put the model that it saves on a grid in a "
                "second one, with `bits` or `grid` alone or with `pattern`."
            )
        if self.structure != "experts":
            return
        if self.method != "SM":
            raise MethodError(
                "`structure: experts` measures which experts the output needs least, and takes no "
                f"other method than SM; got {self.method}. `tuning` changes what stays."
            )
        if self._given(["damping"]):
            raise OptionError(
                "`damping` is added to Hessians, and `structure: experts` uses none. Leave "
                "`damping` out."
            )

    def _check_allocation(self) -> None:
        pattern = self.recipe.pattern
        if self.allocation not in _ALLOCATIONS:
            raise OptionError(
                f"`allocation` must be one of {', '.join(_ALLOCATIONS)}; got {self.allocation!r}."
            )
        if self.allocation != "uniform" and not isinstance(pattern, Unstructured):
            raise OptionError(
                f"`allocation: {self.allocation}` gives blocks different sparsities, and all have "
                f"the pattern {pattern}. Give `sparsity`, or leave `allocation` out."
            )

    def _check_target(self) -> None:
        method = self.recipe.method
        if self.target not in TARGETS:
            raise OptionError(f"`target` must be one of {', '.join(TARGETS)}; got {self.target!r}.")
        # A mask alone leaves kept weights as they are, so that no target could have an effect.
        if self.target == "dense" and method.compensation.name == "none":
            raise MethodError(
                f"`target: dense` moves the weights that are kept, and the method {method} moves "
                f'none. Take a method with a compensation, such as "{method.mask.name}+M", or '
                "leave `target` out."
            )

    def require_blocks(self) -> None:
        """Raise a `TargetError` for settings of blocks; called if no layer to prune is in one."""
        needing = {
            "allocation": self.allocation != "uniform",
            "balance": self.balance,
            "tuning": bool(self.tuning),
        }
        named = [f"`{name}`" for name, is_asked_for in needing.items() if is_asked_for]
        if named:
            raise TargetError(
                f"{' and '.join(named)}: this is for layers in repeated blocks, and none of the "
                "layers to prune is in one. Name lists of blocks in `blocks`, or leave this out."
            )

    # Readers of a report need no defaults of the version that wrote it: all settings are in it.
    def config(self) -> dict[str, Any]:
        """Return the settings as plain values, for reports and journals."""
        # `tuning` is written as its options, also where it is `True`: equal settings need equal
        # configs, by which a journal is resumed.
        config = {f.name: getattr(self, f.name) for f in fields(self)}
        config |= {name: config[name] and list(config[name]) for name in _NAMES}
        return config | {"tuning": asdict(self.block_tuning) if self.block_tuning else None}

    def without_grids(self) -> dict[str, Any]:
        """Return the arguments of the same pruning without rounding what is kept."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _OF_GRIDS}

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return the defaults of the settings that have one, in the form of `config`."""
        defaults = {f.name: f.default for f in fields(cls) if f.default is not MISSING}
        return defaults | {"tuning": None}
