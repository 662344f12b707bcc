"""The settings of a pruning: its arguments, each with its type, default and text, and checks."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any

from mrp_ground.arguments import checked, is_count, is_number
from mrp_lightning.errors import ERROR_OF_ARGUMENT, MethodError, OptionError, TargetError
from mrp_lightning.narrowing.structure import STRUCTURES
from mrp_lightning.solver.columns import check_column_method
from mrp_lightning.solver.patterns import Dense, SemiStructured
from mrp_lightning.solver.recipe import LayerSettings, Recipe
from mrp_lightning.targets.blocks import as_patterns

_ALLOCATIONS = ("uniform", "output")
TARGETS = ("own", "dense")
_TARGET_WEIGHT = 0.5
"""The default of `target_weight`, chosen by measurement: see docs/methods.md."""

_NAMES = ("targets", "ignore", "blocks")
_NOT_WHOLE = (
    *("pattern", "zero_has_a_code", "allocation", "targets", "ignore", "blocks"),
    *("true_sequential", "skip_indivisible"),
)
"""Settings that exclude `structure`, since they choose layers, or weights within a layer."""
_OF_BLOCKS = (
    *("structure", "target", "allocation", "balance", "tuning", "targets", "ignore", "blocks"),
    *("true_sequential", "skip_indivisible"),
)
"""Settings without a meaning where the output head alone is quantised."""


@dataclass(frozen=True, kw_only=True)
class BlockTuning:
    """The tuning of each block's kept weights after the block is pruned.

    Adam, with a learning rate that falls linearly to zero, minimises ‖y − y_d‖² over the
    calibration data, where y is the output of the block in the pruned model, and y_d its output in
    the dense model.
    Only the kept weights of pruned layers change; removed weights stay zero. Where weights are put
    on a grid and none are removed, only the scales change, by ten times the learning rate relative
    to their size, and the error of each token is relative to its own ‖y_d‖²; the codes stay. Some
    windows are held out: the epoch with the lowest error on them is chosen, or the untuned block if
    no epoch is better. Tuning costs about 3·epochs forwards of the calibration data, and memory for
    five copies of one block's weights in float32.

    Args:
        epochs: The number of passes over the calibration windows, ≥ 1.
        learning_rate: The learning rate of the first step, > 0.
        batch_size: The number of windows in a step, ≥ 1. A step takes whole batches of the
            calibration data, and at least one of each process.
        held_out: The fraction of the windows, in (0, 1), that is held out: the last windows, at
            least one.

    Raises:
        OptionError: Values are out of range; all are listed.
    """

    epochs: int = 5
    learning_rate: float = 5e-4
    batch_size: int = 8
    held_out: float = 0.1

    def __post_init__(self) -> None:
        counts = {"epochs": self.epochs, "batch_size": self.batch_size}
        mistakes = [
            f"`tuning.{name}` must be a whole number ≥ 1; got {value!r}"
            for name, value in counts.items()
            if not is_count(value)
        ]
        limits = {"learning_rate": (self.learning_rate, math.inf), "held_out": (self.held_out, 1)}
        mistakes += [
            f"`tuning.{name}` must be a number above 0 and below {limit:g}; got {value!r}"
            for name, (value, limit) in limits.items()
            if not is_number(value) or not 0 < value < limit
        ]
        if mistakes:
            raise OptionError(". ".join(mistakes) + ".")


@checked(errors=ERROR_OF_ARGUMENT)
@dataclass(frozen=True, kw_only=True)
class Settings(LayerSettings):
    """The arguments of a pruning, which are also keyword arguments of the callbacks.

    Give exactly one of `sparsity` and `pattern`, or, for quantisation alone, neither but `bits`,
    `grid` or `head_grid`.

    Raises:
        PatternError: `sparsity`, `pattern` or `block_size` are malformed.
        MethodError: There is no such method, or it has no compensation although `target` is
            "dense".
        OptionError: Another argument is out of range, or contradicts the others; or `targets` is
            empty.
    """

    balance: bool = False
    """Whether columns are scaled before they are put on a grid, by factors that cancel in the norm
    or the linear layer before them, so that the dense model's outputs stay. Each group of the grid
    then shares out its rounding errors with the least loss. It takes a pass over the calibration
    data, and changes weights of norms in the checkpoint. For `bits` and `grid` only."""

    target: str = "own"
    """With "own", a layer's target is the output of its dense weight on its inputs in the pruned
    model. With "dense", it is the layer's output in the dense model, which compensates for losses
    of earlier blocks, but runs each block twice as often; it needs a method with compensation.
    docs/methods.md describes this argument and the next three."""

    target_weight: float | None = None
    """The weight α of the dense target, in (0, 1]. `None` means ½, chosen by measurement; with
    `target` "own" it must be `None`."""

    allocation: str = "uniform"
    """With "uniform", all blocks get the same sparsity. With "output", blocks whose pruning changes
    the model's output more get a lower sparsity, at the same total; this takes a dry run of the
    pruning. For `sparsity` only."""

    tuning: bool | BlockTuning = False
    """Whether the kept weights of each pruned block are tuned towards its outputs in the dense
    model, and with which options. The report has the layers' losses before tuning."""

    targets: Sequence[str] | str | None = None
    """The names of the linear layers to prune; by default all layers in the blocks except routers.
    A name is one or more whole parts of a layer's name, such as `q_proj`, `mlp` or `layers.3`, with
    shell wildcards. After `re:` it is a regular expression that matches names of layers from their
    start, such as `re:.*q_proj$`. A layer outside the blocks, such as `lm_head`, is calibrated
    after the blocks."""

    ignore: Sequence[str] | str | None = None
    """The names of layers to leave dense, in the form of `targets`."""

    blocks: Sequence[str] | str | None = None
    """The names of the lists of blocks (`model.layers`), or of single blocks, if the outermost
    `ModuleList`s are not the right ones."""

    true_sequential: bool = False
    """Whether the layers of a block are pruned in stages (q, k, v; then o; …), each on the outputs
    of the stages before it. Each stage takes one pass over the data."""

    offload: bool = False
    """Whether blocks and stored activations stay in CPU memory, with one block at a time on the
    accelerator."""

    skip_indivisible: bool = False
    """Whether layers whose number of input features is no multiple of M stay dense; otherwise they
    are an error."""

    structure: str | None = None
    """"neurons", "heads" or "experts": remove a fraction `sparsity` of each block's MLP neurons, of
    its key-value groups with their query heads, or of its experts with their rows of the router.
    The result is a narrower dense model, described by an ordinary configuration. The number of
    remaining neurons is a multiple of 32; of experts, at least as many remain as each token uses.
    With `bits` or `grid`, all layers of the narrower model are put on the grid (not with experts).
    For `sparsity` and the methods SM, magnitude, wanda, magnitude+M and wanda+M only (experts: the
    first three); see docs/narrower.md."""

    recipe: Recipe = field(init=False, repr=False, compare=False)
    """The parsed recipe of each layer, from the arguments that concern a single layer."""

    def __post_init__(self) -> None:
        if self.targets is not None and not as_patterns(self.targets):
            raise OptionError(
                "`targets` is empty, so nothing would be pruned. Name layers, such as `q_proj`, or "
                "leave it out: then all layers in the blocks are pruned."
            )
        # One form of each value, so that equal settings have equal configs, on which the
        # fingerprint of a run depends: a name is a list of one, and no names are None.
        for name in _NAMES:
            object.__setattr__(self, name, as_patterns(getattr(self, name)) or None)
        # Before the recipe is parsed, whose errors would be about patterns: a structure takes none.
        if self.structure is not None:
            self._check_structure()
        # The checks after it compare the recipe with arguments that no single layer has.
        recipe = Recipe.parse(self, leaves_zeros=self.structure is None)
        object.__setattr__(self, "recipe", recipe)
        if recipe.is_of_head_alone:
            self._check_head_alone()
        if self.pattern is not None:  # "2 : 4", too, is written as 2:4
            object.__setattr__(self, "pattern", str(recipe.pattern))
        if recipe.grid is not None:  # a named grid implies them
            object.__setattr__(self, "bits", recipe.grid.bits)
            object.__setattr__(self, "group_size", recipe.grid.group_size)
        self._check_allocation()
        if self.balance and recipe.grid is None:
            raise OptionError(
                "`balance` scales columns for the groups of a grid, and weights that are on no "
                "grid would stay as they are. Give `bits` or `grid`, or leave `balance` out."
            )
        # Last, since its check reads the method of the parsed recipe.
        object.__setattr__(self, "target_weight", self._checked_target_weight())

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

    @property
    def amount(self) -> str:
        """The pattern, the bits and the grid of the head in short, such as `2:4, head iq4_nl`."""
        head = None if self.head_grid is None else f"head {self.head_grid}"
        return ", ".join(filter(None, [self.recipe.amount, head]))

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Settings":
        """Return the settings of a `config`."""
        # The inverse of `config`, in which no tuning is `None`.
        tuning = config.get("tuning")
        return cls(**{**config, "tuning": False if tuning is None else BlockTuning(**tuning)})

    def _check_head_alone(self) -> None:
        config, defaults = self.config(), self.defaults()
        if excluded := [name for name in _OF_BLOCKS if config[name] != defaults[name]]:
            raise OptionError(
                f"`head_grid` alone changes nothing but the output head, so that "
                f"{', '.join(f'`{x}`' for x in excluded)} would mean nothing. Leave this out, or "
                "give `sparsity`, `pattern`, `bits` or `grid`."
            )

    def _check_structure(self) -> None:
        if self.structure not in STRUCTURES:
            raise OptionError(
                f"`structure` must be one of {', '.join(STRUCTURES)}; got {self.structure!r}."
            )
        config, defaults = self.config(), self.defaults()
        if excluded := [name for name in _NOT_WHOLE if config[name] != defaults[name]]:
            raise OptionError(
                f"`structure: {self.structure}` removes a part (`sparsity`) of the "
                f"{self.structure} of every block, the same number in each, so that an ordinary "
                f"configuration describes it. Leave out {', '.join(f'`{x}`' for x in excluded)}."
            )
        check_column_method(self.method)
        if self.structure == "experts" and (self.bits is not None or self.grid is not None):
            raise OptionError(
                "`structure: experts` goes with no `bits` or `grid` in one run. Remove experts "
                "first, and put the model that is saved on a grid in a second run."
            )
        # After the check for all structures: experts allow fewer of its methods.
        if self.structure == "experts" and self.method.endswith("+M"):
            raise MethodError(
                "`structure: experts` leaves the experts that stay as they are: the method "
                f"{self.method} would compensate. Take SM, wanda or magnitude; `tuning` changes "
                "what stays."
            )

    def _check_allocation(self) -> None:
        pattern, start = self.recipe.pattern, f"`allocation: {self.allocation}` gives blocks"
        if self.allocation not in _ALLOCATIONS:
            raise OptionError(
                f"`allocation` must be one of {', '.join(_ALLOCATIONS)}; got {self.allocation!r}."
            )
        if self.allocation != "uniform" and isinstance(pattern, Dense):
            raise OptionError(
                f"{start} different sparsities, and nothing is removed. Give `sparsity` beside "
                "`bits`, or leave `allocation` out."
            )
        if self.allocation != "uniform" and isinstance(pattern, SemiStructured):
            raise OptionError(
                f'{start} different sparsities, but pattern "{pattern}" removes {pattern.removed} '
                f"of every {pattern.group} weights everywhere. Give `sparsity` in place of "
                "`pattern`, or leave `allocation` out."
            )

    def _checked_target_weight(self) -> float | None:
        weight, method = self.target_weight, self.recipe.method
        if self.target not in TARGETS:
            raise OptionError(f"`target` must be one of {', '.join(TARGETS)}; got {self.target!r}.")
        if self.target == "own":
            if weight is not None:
                raise OptionError(
                    f"`target_weight` {weight!r} means nothing without `target: dense`. "
                    "Give both, or leave it out."
                )
            return None
        # A mask alone leaves kept weights as they are, so that no target could have an effect.
        if method.compensation.name == "none":
            raise MethodError(
                f"`target: dense` moves the weights that are kept, and the method {method} moves "
                f'none. Take a method with a compensation, such as "{method.mask.name}+M", or '
                "leave `target` out."
            )
        if weight is None:
            return _TARGET_WEIGHT
        if not is_number(weight) or not 0 < weight <= 1:
            raise OptionError(f"`target_weight` must be a number in (0, 1]; got {weight!r}.")
        return float(weight)

    def require_blocks(self) -> None:
        """Raise a `TargetError` for settings that need blocks; called if the model has none."""
        needing = {
            "allocation": self.allocation != "uniform",
            "balance": self.balance,
            "tuning": bool(self.tuning),
        }
        named = [f"`{name}`" for name, is_asked_for in needing.items() if is_asked_for]
        if named:
            raise TargetError(
                f"{' and '.join(named)} work on repeated blocks, and none were found in this "
                "model. Name them in `blocks`, or leave this out."
            )

    # Readers of a report need no defaults of the version that wrote it: all settings are in it.
    def config(self) -> dict[str, Any]:
        """Return the settings as plain values, for reports; `from_config` is the inverse."""
        # `tuning` is written as its options, also where it is `True`: equal settings need equal
        # configs, by which a journal is resumed.
        config = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        config |= {name: config[name] and list(config[name]) for name in _NAMES}
        return config | {"tuning": asdict(self.block_tuning) if self.block_tuning else None}

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return the defaults of the settings that have one, in the form of `config`."""
        defaults = {f.name: f.default for f in fields(cls) if f.default is not MISSING}
        return defaults | {"tuning": None}
