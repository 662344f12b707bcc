"""How a model is to be pruned, and all that takes part in it."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mrp_lightning.calibration.offload import CPU
from mrp_lightning.errors import MethodError, OptionError, TargetError
from mrp_lightning.journal.journal import Journal, SharedJournal
from mrp_lightning.narrowing.columns import check_column_method
from mrp_lightning.processes import ALONE, Processes
from mrp_lightning.pruning.allocation import check_allocation
from mrp_lightning.pruning.block_tuner import BlockTuning
from mrp_lightning.records.report import LayerReport, PruningReport
from mrp_lightning.solver.patterns import Dense
from mrp_lightning.solver.recipe import Recipe
from mrp_lightning.targets.blocks import as_patterns
from mrp_lightning.targets.plan import Plan
from mrp_lightning.targets.structure import STRUCTURES

if TYPE_CHECKING:
    from mrp_lightning.models.streaming import StreamedBlocks

TARGETS = ("own", "dense")
TARGET_WEIGHT = 0.5
"""The default of `target_weight`, by measurement: see docs/methods.md."""

_NAMES = ("targets", "ignore", "blocks")
_NOT_WHOLE = (
    *("pattern", "bits", "allocation", "targets", "ignore", "blocks", "true_sequential"),
    "skip_indivisible",
)
"""What says which weights of a layer go, or of which layers; `structure` takes none of these."""
_OF_STATE = (
    *("method", "sparsity", "pattern", "block_size", "damping", "tolerance"),
    *("bits", "group_size", "target", "target_weight", "allocation", "tuning", "structure"),
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of a pruning, of which `callbacks.PruningCallback` documents each.

    `Settings.of` makes one from what users give.

    Attributes:
        target_weight: α, above 0 and at most 1, where the target is dense; `None` where each layer
            aims at its own outputs. `None` with `target: dense` becomes the default.
        recipe: How each layer is pruned, which follows from the first eight.

    Raises:
        PatternError: `sparsity`, `pattern` or `block_size` are malformed.
        MethodError: There is no such method, or it has no compensation and the target is dense.
        OptionError: Another argument is out of range, or does not go with the others; or `targets`
            names nothing.
    """

    method: str
    sparsity: float | None = None
    pattern: str | None = None
    block_size: int | None = 128
    damping: float = 0.01
    tolerance: float = 1e-6
    bits: int | None = None
    group_size: int = 64
    target: str = "own"
    target_weight: float | None = None
    allocation: str = "uniform"
    tuning: BlockTuning | None = None
    targets: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    true_sequential: bool = False
    offload: bool = False
    skip_indivisible: bool = False
    structure: str | None = None
    recipe: Recipe = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
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
        )
        check_allocation(self.allocation, recipe.pattern)
        object.__setattr__(self, "recipe", recipe)
        object.__setattr__(self, "target_weight", self._checked_target_weight(recipe))

    @property
    def grid_waits(self) -> bool:
        """Whether the weights of a block get on their grid after the block is tuned.

        What is tuned freely and rounded then loses less than what is tuned from one point of the
        grid to another. Where nothing is removed there is nothing to tune before the rounding.
        """
        recipe = self.recipe
        return bool(self.tuning and recipe.grid and not isinstance(recipe.pattern, Dense))

    @classmethod
    def of(
        cls,
        *,
        tuning: bool | BlockTuning | Mapping[str, Any] | None = None,
        targets: Sequence[str] | str | None = None,
        ignore: Sequence[str] | str | None = None,
        blocks: Sequence[str] | str | None = None,
        **others: Any,
    ) -> "Settings":
        """Take what users may write in several ways, and what `config` gave."""
        if targets is not None and not as_patterns(targets):
            raise OptionError(
                "`targets` is empty, so nothing would be pruned. Name layers, such as `q_proj`, or "
                "leave it out: then all layers in the blocks are pruned."
            )
        if isinstance(tuning, Mapping):
            tuning = BlockTuning(**tuning)
        return cls(
            tuning=BlockTuning() if tuning is True else tuning or None,
            targets=as_patterns(targets),
            ignore=as_patterns(ignore),
            blocks=as_patterns(blocks),
            **others,
        )

    def _check_structure(self) -> None:
        if self.structure not in STRUCTURES:
            raise OptionError(
                f"`structure` must be one of {', '.join(STRUCTURES)}; got {self.structure!r}."
            )
        given = self.config()
        without = {name: value for name, value in self.defaults().items() if name in _NOT_WHOLE}
        if others := [name for name, value in without.items() if given[name] != value]:
            raise OptionError(
                f"`structure: {self.structure}` removes a part (`sparsity`) of the "
                f"{self.structure} of every block, the same number in each, so that an ordinary "
                f"configuration says it. Leave out {', '.join(f'`{name}`' for name in others)}."
            )
        check_column_method(self.method)
        if self.structure == "experts" and self.method.endswith("+M"):
            raise MethodError(
                "`structure: experts` leaves the experts that stay as they are: the method "
                f"{self.method} would compensate. Take SM, wanda or magnitude; `tuning` changes "
                "what stays."
            )

    def _checked_target_weight(self, recipe: Recipe) -> float | None:
        weight = self.target_weight
        if self.target not in TARGETS:
            raise OptionError(f"`target` must be one of {', '.join(TARGETS)}; got {self.target!r}.")
        if self.target == "own":
            if weight is not None:
                raise OptionError(
                    f"`target_weight` {weight!r} means nothing without `target: dense`. "
                    "Give both, or leave it out."
                )
            return None
        if recipe.method.compensation.name == "none":
            raise MethodError(
                f"`target: dense` moves the weights that are kept, and the method {recipe.method} "
                "moves none. Take a method with a compensation, such as "
                f'"{recipe.method.mask.name}+M", or leave `target` out.'
            )
        if weight is None:
            return TARGET_WEIGHT
        if isinstance(weight, bool) or not isinstance(weight, Real) or not 0 < weight <= 1:
            raise OptionError(f"`target_weight` must be a number in (0, 1]; got {weight!r}.")
        return float(weight)

    def require_blocks(self) -> None:
        """Refuse what cannot be done in a model that is pruned in one pass.

        Raises:
            TargetError: There are no blocks, and a setting works on them.
        """
        needing = {"allocation": self.allocation != "uniform", "tuning": self.tuning is not None}
        named = [f"`{name}`" for name, is_asked_for in needing.items() if is_asked_for]
        if named:
            raise TargetError(
                f"{' and '.join(named)} work on repeated blocks, and none were found in this "
                "model. Name them in `blocks`, or leave this out."
            )

    def config(self) -> dict[str, Any]:
        """The settings as a report keeps them, in plain values that `Settings` takes again."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        names = {key: list(value) or None for key, value in plain.items() if key in _NAMES}
        return plain | names | {"tuning": None if self.tuning is None else asdict(self.tuning)}

    def state(self) -> dict[str, Any]:
        """The part of `config` by which the states of callbacks are told apart in a checkpoint."""
        config = self.config()
        return {name: config[name] for name in _OF_STATE}

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The settings that need not be given, as `config` has them."""
        found = {f.name: f.default for f in fields(cls) if f.default is not MISSING}
        return found | dict.fromkeys(_NAMES)


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Progress:
    """How far a pruning is.

    Attributes:
        block: The number of the block that is walked, from 1.
        blocks: The number of blocks in all.
        task: What is being done, in words.
        layers: The number of layers that are finished, pruned or skipped.
    """

    block: int
    blocks: int
    task: str
    layers: int


class Listener:
    """Is told how a pruning goes. This one only logs what users should know."""

    def say(self, text: str) -> None:
        """Hear, seldom, of what a user should be told."""
        log.info("%s", text)

    def progress(self, progress: Progress) -> None:
        """Hear, often, how far the pruning is."""

    def finished(self, k: int, rows: list[LayerReport], *, resumed: bool) -> None:
        """Hear that a block is finished.

        Args:
            k: The number of the block, from 0; that of the layers outside the blocks follows.
            rows: The layers pruned in it.
            resumed: Whether the journal held them.
        """


@dataclass(frozen=True, eq=False, kw_only=True)
class Job:
    """One pruning: the model, how it is pruned, on what data, with whom, and who is told of it.

    Attributes:
        model: The module whose forward `forward` runs. It is pruned in place.
        plan: The blocks and layers to prune.
        settings: How they are pruned.
        forward: Runs the model on one batch.
        batches: The calibration batches of this process: anything that `forward` takes.
        batch_of: Finds in an item of `batches` what may hold an `attention_mask`.
        device: The device on which the model runs.
        streamed: The blocks that stay in files until they are needed; then the journal is a
            `StreamedJournal`.
        processes: The processes that prune the model together. All of them prune it, each with
            batches of its own, and end with the same weights.
        journal: Keeps what is done to each block; what it holds is not done again, and the result
            has the same bits.
        report: The report, which is filled while layers are pruned.
        listener: Is told how it goes.
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
    journal: Journal | SharedJournal | None = None
    report: PruningReport = field(default_factory=lambda: PruningReport({}))
    listener: Listener = field(default_factory=Listener)

    @property
    def steps(self) -> int:
        """The number of blocks, and one more where layers outside of them are pruned."""
        return len(self.plan.blocks) + bool(self.plan.outside)

    def tell(self, step: int, task: str) -> None:
        """Tell the listener what is being done in a step, from 0."""
        done = len(self.report.layers) - len(self.plan.skipped)
        self.listener.progress(Progress(step + 1, self.steps, task, done))
