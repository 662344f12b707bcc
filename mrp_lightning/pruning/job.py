"""The settings of a pruning, and the job: the model with all that takes part in pruning it."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mrp_lightning.calibration.offload import CPU
from mrp_lightning.errors import ERROR_OF_ARGUMENT, MethodError, OptionError, TargetError
from mrp_lightning.journal.journal import Journal
from mrp_lightning.narrowing.columns import check_column_method
from mrp_lightning.narrowing.structure import STRUCTURES, NarrowingPlan, Structure
from mrp_lightning.processes import ALONE, Processes
from mrp_lightning.records.report import LayerReport, PruningReport
from mrp_lightning.solver.patterns import Dense, SemiStructured
from mrp_lightning.solver.recipe import Recipe
from mrp_lightning.targets.blocks import as_patterns
from mrp_lightning.targets.layers import Layer
from mrp_lightning.targets.plan import Plan
from mrp_sparse.arguments import checked, is_count, is_number
from mrp_sparse.formats.grid import GROUP_SIZE

if TYPE_CHECKING:
    from mrp_lightning.models.streaming import StreamedBlocks

_ALLOCATIONS = ("uniform", "output")
TARGETS = ("own", "dense")
_TARGET_WEIGHT = 0.5
"""The default of `target_weight`, by measurement: see docs/methods.md."""

_NAMES = ("targets", "ignore", "blocks")
_NOT_WHOLE = (
    *("pattern", "zero_has_a_code", "allocation", "targets", "ignore", "blocks"),
    *("true_sequential", "skip_indivisible"),
)
"""Settings that do not go with `structure`: they choose weights of a layer, or layers."""
_OF_STATE = (
    *("method", "sparsity", "pattern", "block_size", "damping", "tolerance"),
    *("bits", "group_size", "grid", "zero_has_a_code", "target", "target_weight"),
    *("allocation", "tuning", "structure"),
)


@dataclass(frozen=True, kw_only=True)
class BlockTuning:
    """The tuning of the kept weights of each block after it is pruned.

    Adam, with a rate that falls linearly to zero, minimises ‖y − y_d‖² over the calibration data,
    where y is the output of the block in the pruned model, and y_d its output in the dense model.
    Only the kept weights of pruned layers change; removed weights stay zero. Some windows are held
    out: the epoch with the lowest error on them is chosen, or the untuned block if no epoch is
    better. Tuning costs about 3·epochs forwards of the calibration data, and memory for five copies
    of one block's weights in float32.

    Args:
        epochs: The number of passes over the calibration windows, ≥ 1.
        learning_rate: The rate of the first step, > 0.
        batch_size: The number of windows in a step, ≥ 1. A step takes whole batches of the
            calibration data, and at least one of each process.
        held_out: The fraction of the windows, in (0, 1), that is held out. These are the last ones,
            at least one.

    Raises:
        OptionError: Values are out of range; all are listed.
    """

    epochs: int = 5
    learning_rate: float = 5e-4
    batch_size: int = 8
    held_out: float = 0.1

    def __post_init__(self) -> None:
        counts = {"epochs": self.epochs, "batch_size": self.batch_size}
        wrong = [
            f"`tuning.{name}` must be a whole number ≥ 1; got {value!r}"
            for name, value in counts.items()
            if not is_count(value)
        ]
        limits = {"learning_rate": (self.learning_rate, math.inf), "held_out": (self.held_out, 1)}
        wrong += [
            f"`tuning.{name}` must be a number above 0 and below {limit:g}; got {value!r}"
            for name, (value, limit) in limits.items()
            if not is_number(value) or not 0 < value < limit
        ]
        if wrong:
            raise OptionError(". ".join(wrong) + ".")


@checked(errors=ERROR_OF_ARGUMENT)
@dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of a pruning. The callbacks take them by these names.

    Exactly one of `sparsity` and `pattern` is given, or neither of them and `bits` or `grid`.

    Raises:
        PatternError: `sparsity`, `pattern` or `block_size` are malformed.
        MethodError: There is no such method, or it has no compensation and the target is dense.
        OptionError: Another argument is out of range, or does not go with the others; or `targets`
            names nothing.
    """

    method: str
    """magnitude, wanda, SS (the same as sparsegpt), SM, MS, MM, or a pair MASK+COMPENSATION, with
    MASK magnitude, wanda, S, M or J, and COMPENSATION none, S or M. Case matters."""

    sparsity: float | None = None
    """The fraction of the weights to remove, in (0, 1)."""

    pattern: str | int | None = None  # int: to explain what YAML makes of an unquoted 2:4
    """"N:M" keeps N of every M consecutive input features. Quoted in YAML, which reads an unquoted
    2:4 as a number."""

    block_size: int | None = 128
    """The number of columns (input features) that are chosen together, a multiple of M. `None`
    means all."""

    damping: float = 0.01
    """The fraction (≥ 0) of the mean of the Hessian's diagonal that is added to it."""

    tolerance: float = 1e-6
    """The relative distance (> 0) to the optimal loss at which the exact compensation M stops."""

    bits: int | None = None
    """3, 4 or 8: the kept weights are put on a grid of so many bits, with a scale for each row and
    `group_size` columns, so that the layer's outputs change least. The checkpoint keeps its dtype,
    and its values lie on the grid exactly. Without `sparsity` and `pattern` it is quantisation
    alone. `None` leaves the weights as they are."""

    group_size: int = GROUP_SIZE
    """The number of columns (input features) of a row that share a scale, for `bits`."""

    grid: str | None = None
    """The type of an engine on whose grid the kept weights are put: q4_0, q5_0, q8_0, iq4_nl or
    mxfp4 of llama.cpp; int4-g32, int4-g64, int4-g128, int8-g32, int8-g64 or int8-g128 of
    compressed-tensors. It has its bits and group size, which need not be given. An export to that
    type (`export.to_gguf`, `--format compressed-tensors`) is then exact. `None` is this project's
    own grid, for `bits`."""

    zero_has_a_code: bool = False
    """Whether removed weights take one of the codes of `bits`, which formats need that store a code
    for each weight; it costs one to two percent of a layer's loss."""

    target: str = "own"
    """With "own", the target of a layer is what its dense weight gives on its inputs in the pruned
    model. With "dense", it is the layer's output in the dense model, which makes up for losses of
    earlier blocks and runs each block twice as often; it is refused for methods without
    compensation. See docs/methods.md for this and the next three."""

    target_weight: float | None = None
    """The weight α of the dense target, in (0, 1]. `None` is ½, by measurement; where each layer
    aims at its own outputs it stays `None`."""

    allocation: str = "uniform"
    """With "uniform", all blocks get the same sparsity. With "output", blocks whose pruning changes
    the model's output more get less sparsity, and the model the same in all; this takes a dry run
    of the pruning. For `sparsity` only."""

    tuning: bool | BlockTuning = False
    """Whether, or how, the kept weights of each pruned block are tuned towards its outputs in the
    dense model. The losses of layers in the report are those before tuning."""

    targets: Sequence[str] | str | None = None
    """The names of the linear layers to prune; by default all layers in the blocks except routers.
    A name is one or more whole parts of a layer's name, such as `q_proj`, `mlp` or `layers.3`, with
    shell wildcards. After `re:` it is a regular expression that matches names of layers from their
    start, such as `re:.*q_proj$`. A layer outside the blocks, such as `lm_head`, is calibrated
    after the blocks."""

    ignore: Sequence[str] | str | None = None
    """The names of layers to leave dense, of the same form."""

    blocks: Sequence[str] | str | None = None
    """The names of the lists of blocks (`model.layers`), or of single blocks, if the outermost
    `ModuleList`s are not the right ones."""

    true_sequential: bool = False
    """Whether the layers of a block are pruned one after another (q, k, v; then o; …), each on the
    outputs of those before it. Each takes one pass over the data."""

    offload: bool = False
    """Whether blocks and stored activations stay in CPU memory, with one block at a time on the
    accelerator."""

    skip_indivisible: bool = False
    """Whether layers whose input features are no multiple of M are left dense; otherwise such a
    model is refused."""

    structure: str | None = None
    """"neurons", "heads" or "experts": remove whole neurons of the MLPs, whole key-value groups
    with their query heads, or whole experts with their rows of the router, `sparsity` of them in
    each block, and leave a narrower dense model that its configuration describes. Of neurons a
    multiple of 32 stays, of experts at least as many as each token is sent to. With `bits` or
    `grid`, all layers of the narrower model are put on the grid (not with experts). For `sparsity`
    and the methods SM, magnitude, wanda, magnitude+M and wanda+M only (experts: the first three);
    see docs/narrower.md."""

    recipe: Recipe = field(init=False, repr=False, compare=False)
    """How each layer is pruned, which follows from the first eight arguments."""

    def __post_init__(self) -> None:
        if self.targets is not None and not as_patterns(self.targets):
            raise OptionError(
                "`targets` is empty, so nothing would be pruned. Name layers, such as `q_proj`, or "
                "leave it out: then all layers in the blocks are pruned."
            )
        for name in _NAMES:
            object.__setattr__(self, name, as_patterns(getattr(self, name)) or None)
        if self.structure is not None:
            self._check_structure()
        recipe = Recipe.of(
            method=self.method,
            sparsity=self.sparsity,
            pattern=self.pattern,
            block_size=self.block_size,
            damping=self.damping,
            tolerance=self.tolerance,
            bits=self.bits,
            group_size=self.group_size,
            grid=self.grid,
            zero_has_a_code=self.zero_has_a_code,
            leaves_zeros=self.structure is None,
        )
        object.__setattr__(self, "recipe", recipe)
        if recipe.grid is not None:  # a named grid has its own
            object.__setattr__(self, "bits", recipe.grid.bits)
            object.__setattr__(self, "group_size", recipe.grid.group_size)
        self._check_allocation()
        object.__setattr__(self, "target_weight", self._checked_target_weight())

    @property
    def block_tuning(self) -> BlockTuning | None:
        """The tuning of blocks as an object, `None` if there is none."""
        return BlockTuning() if self.tuning is True else self.tuning or None

    @property
    def grid_waits(self) -> bool:
        """Whether the weights of a block are put on their grid after the block is tuned.

        Tuning free weights and rounding them then loses less than tuning from one point of the grid
        to another. In quantisation alone there is nothing to tune before the rounding.
        """
        recipe = self.recipe
        return bool(self.tuning and recipe.grid and not isinstance(recipe.pattern, Dense))

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Settings":
        """Return the settings whose `config` this is."""
        tuning = config.get("tuning")
        return cls(**{**config, "tuning": False if tuning is None else BlockTuning(**tuning)})

    def _check_structure(self) -> None:
        if self.structure not in STRUCTURES:
            raise OptionError(
                f"`structure` must be one of {', '.join(STRUCTURES)}; got {self.structure!r}."
            )
        config, defaults = self.config(), self.defaults()
        if others := [name for name in _NOT_WHOLE if config[name] != defaults[name]]:
            raise OptionError(
                f"`structure: {self.structure}` removes a part (`sparsity`) of the "
                f"{self.structure} of every block, the same number in each, so that an ordinary "
                f"configuration describes it. Leave out {', '.join(f'`{x}`' for x in others)}."
            )
        check_column_method(self.method)
        if self.structure == "experts" and (self.bits is not None or self.grid is not None):
            raise OptionError(
                "`structure: experts` goes with no `bits` or `grid` in one run. Remove experts "
                "first, and put the model that is saved on a grid in a second run."
            )
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
        """Raise a TargetError for settings that work on blocks, for a model without blocks."""
        needing = {"allocation": self.allocation != "uniform", "tuning": bool(self.tuning)}
        named = [f"`{name}`" for name, is_asked_for in needing.items() if is_asked_for]
        if named:
            raise TargetError(
                f"{' and '.join(named)} work on repeated blocks, and none were found in this "
                "model. Name them in `blocks`, or leave this out."
            )

    def config(self) -> dict[str, Any]:
        """Return the settings as plain values, as reports store them; see `from_config`."""
        config = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        config |= {name: config[name] and list(config[name]) for name in _NAMES}
        return config | {"tuning": asdict(self.block_tuning) if self.block_tuning else None}

    def state(self) -> dict[str, Any]:
        """Return the part of `config` that identifies the callback's state in a checkpoint."""
        config = self.config()
        return {name: config[name] for name in _OF_STATE}

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return the defaults of the settings that have one, in the form of `config`."""
        defaults = {f.name: f.default for f in fields(cls) if f.default is not MISSING}
        return defaults | {"tuning": None}


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Progress:
    """The state of a pruning."""

    block: int  # the number of the block that is walked, from 1
    blocks: int  # the number of all blocks
    task: str  # the present work, in words
    layers: int  # the number of layers that are finished, pruned or skipped


class Listener:
    """Receives the progress of a pruning. This one only logs messages."""

    def log(self, text: str) -> None:
        """Log a message for the user; called seldom."""
        log.info("%s", text)

    def progress(self, progress: Progress) -> None:
        """Receive the state of the pruning; called often."""

    def finished(self, k: int, rows: list[LayerReport], *, resumed: bool) -> None:
        """Receive the rows of a block that is finished.

        Blocks are numbered from 0; the layers outside the blocks have the number after them. A
        block is `resumed` if it comes from the journal.
        """


@dataclass(frozen=True, eq=False, kw_only=True)
class Job:
    """One pruning: model, settings, data, processes, journal, report.

    Attributes:
        model: The module whose forward `forward` runs. It is pruned in place.
        plan: The blocks and layers to prune.
        settings: How they are pruned.
        forward: Runs the model on one batch.
        batches: The calibration batches of this process: anything that `forward` takes.
        batch_of: Returns the part of an item of `batches` that may hold an `attention_mask`.
        device: The device on which the model runs.
        streamed: The blocks that stay in files until they are needed.
        processes: The processes that prune the model together. Each has its own batches, and all
            of them end with the same weights.
        journal: Records each finished block. Recorded blocks are restored, with the same bits.
        report: The report, which is filled while layers are pruned.
        listener: Receives the progress.
    """

    model: nn.Module
    plan: Plan
    settings: Settings
    forward: Callable[[Any], Any]
    batches: Sequence[Any]
    batch_of: Callable[[Any], Any] = lambda item: item
    device: torch.device = CPU
    streamed: "StreamedBlocks | None" = None
    processes: Processes = ALONE
    journal: Journal | None = None
    report: PruningReport = field(default_factory=lambda: PruningReport({}))
    listener: Listener = field(default_factory=Listener)

    @property
    def structure(self) -> Structure | None:
        """The units that are removed whole, `None` where the plan removes single weights."""
        return self.plan.structure if isinstance(self.plan, NarrowingPlan) else None

    def tuned_with(self, block: str) -> Sequence[Layer]:
        """Return the layers of a block that only its tuning changes."""
        if not isinstance(self.plan, NarrowingPlan) or not self.settings.tuning:
            return ()
        return self.plan.others.get(block, ())

    @property
    def steps(self) -> int:
        """The number of blocks, plus one if layers outside the blocks are pruned."""
        return len(self.plan.blocks) + bool(self.plan.outside)

    def progress(self, step: int, task: str) -> None:
        """Report the present task of a step, from 0, to the listener."""
        done = len(self.report.layers) - len(self.plan.skipped)
        self.listener.progress(Progress(step + 1, self.steps, task, done))
