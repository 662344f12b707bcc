"""`pruning_report.json`: the results of a run for each layer and block."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import StringIO
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from mrp_lightning.environment import versions
from mrp_lightning.errors import FormatError, counted
from mrp_lightning.solver.recipe import LayerSettings, Recipe
from mrp_lightning.storage.files import save_ours
from mrp_lightning.storage.json_files import as_dataclass, as_json, check_version, read_json
from mrp_lightning.targets.blocks import listed

if TYPE_CHECKING:
    from mrp_lightning.records.block_result import BlockResult
    from mrp_lightning.solver.problem import Quality


log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Row:
    """A row of `pruning_report.json`."""

    _always: ClassVar[tuple[str, ...]] = ()
    """The keys that are written as null if they have no value; all others are left out."""

    def to_dict(self) -> dict[str, Any]:
        """Return the row of `pruning_report.json`."""
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in vars(self).items()
            if key in self._always or not (value is None or value is False)
        }


@dataclass(frozen=True, kw_only=True)
class LayerReport(_Row):
    """The row of one layer in the report. The measures of a layer that was left dense are `None`.

    Attributes:
        name: The name of the layer in the checkpoint.
        shape: The shape of the weight, (rows, columns) if it is pruned.
        method: The mask and the compensation, by the name that the user gave, such as `SM`.
        sparsity: The fraction of the weights that are removed, between 0 and 1. It is `None` for an
            output head on a grid of its own, which has no part in the pattern.
        loss: The mean over the calibration tokens of ‖(w + δ)x − wx‖², summed over all rows. Where
            whole experts are removed, wx stands for the routed sum of all experts.
        relative_loss: `loss` divided by the mean over the tokens of ‖wx‖².
        damping: λ, added to the diagonal of the Hessian. For a method that inverts no Hessian it is
            the λ of the requested damping, and `None` where whole experts are removed.
        iterations: The number of conjugate gradient iterations of the exact compensation, `None`
            for other methods.
        gap: The certified distance of the damped loss to its optimum for the removed weights,
            relative to that optimum, before a cast to a narrower dtype and before the grid;
            `None` for methods that do not seek the optimum.
        seconds: The time that pruning the layer took. The first of the layers that share an input
            pays for preparing the Hessian; with a grid, each has a share by its number of weights.
        tokens: The number of calibration tokens that the layer saw; where whole experts are
            removed, of those on which the loss was measured.
        dead_inputs: The number of input features that were 0 in every token; `None` where whole
            experts are removed.
        skipped: The reason why the layer was left dense, `None` if it is pruned.
        already_pruned: Whether the weight had the pattern before it was pruned.
        zeros_before: The fraction of the weights that were zero before, above 0 and at most 1. The
            losses are against these weights, zeros and all. It is `None` where none were, and where
            they were not counted: output heads, removed experts, reports of older versions.
        zeros: The fraction of the weights that are zero now, counted in the result: those removed
            now, and those zero before that stayed zero. It is `None` where `zeros_before` is, and
            where whole neurons or heads are removed.
        shared_hessian: The share of all experts' Hessian, between 0 and 1, in the Hessian by which
            an expert was pruned. It is above 0 where the expert saw too few tokens, and `loss` is
            then measured by that mixture. It is `None` for layers that are not experts.
        raised_damping: The fraction of the Hessian's mean diagonal that was added, if the requested
            fraction was too small. It is `None` if that was enough.
        peak_memory: The most memory, in bytes, that was allocated on the GPU while the layer, and
            those solved with it, were pruned. It is `None` on other devices.
        target_loss: The same as `loss`, against the weight that stands for the dense model's
            outputs. It is `None` where the layer's own outputs are the target.
        own_target: The reason why the layer's own outputs are its target in a run with
            `target="dense"`.
        fallback_mask: The mask that replaced that of `method`, such as `magnitude`, because it lost
            less. It is usually `None`.
        swaps: How often a removed column, or group of columns, was exchanged for a kept one, where
            whole columns are removed. It is `None` elsewhere.
        bits: The bits of a kept weight, `None` if the weights are on no grid.
        zeros_loss: The part of `loss` before the kept weights are put on their grid. It is `None`
            if they are on no grid, and so is `grid_loss`.
        grid_loss: The part of `loss` that the grid adds, which may be negative. For a tuned layer
            it is measured against the tuned weights, but `zeros_loss` before tuning.
        block: The name of the repeated block that the layer is in, such as `model.layers.3`. It is
            `None` outside the blocks, and in reports of older versions.

    Raises:
        ValueError: The layer is pruned, and its `shape` is not that of a matrix with columns.
    """

    name: str
    shape: tuple[int, ...]
    method: str | None = None
    sparsity: float | None = None
    loss: float | None = None
    relative_loss: float | None = None
    damping: float | None = None
    iterations: int | None = None
    gap: float | None = None
    seconds: float | None = None
    tokens: int | None = None
    dead_inputs: int | None = None
    skipped: str | None = None
    already_pruned: bool = False
    zeros_before: float | None = None
    zeros: float | None = None
    shared_hessian: float | None = None
    raised_damping: float | None = None
    peak_memory: int | None = None
    target_loss: float | None = None
    own_target: str | None = None
    fallback_mask: str | None = None
    swaps: int | None = None
    bits: int | None = None
    zeros_loss: float | None = None
    grid_loss: float | None = None
    block: str | None = None

    _always = (
        *("name", "shape", "method", "sparsity", "loss", "relative_loss", "damping", "iterations"),
        *("gap", "seconds", "tokens", "dead_inputs", "skipped"),
    )

    @classmethod
    def of(
        cls,
        quality: "Quality",
        recipe: Recipe,
        *,
        name: str,
        shape: Sequence[int],
        energy: float,
        tokens: int,
        **others: Any,
    ) -> "LayerReport":
        """Return the row of a layer that is pruned.

        Args:
            quality: The losses of its solution, and what the solver did for it.
            recipe: The recipe of the layer.
            name: The name of the layer in the checkpoint.
            shape: The shape of the weight, (rows, columns).
            energy: The mean over the calibration tokens of ‖wx‖², to which the loss is relative.
            tokens: The number of calibration tokens that the layer saw.
            others: Attributes of the row that neither solution nor recipe has, by name.
        """
        ratio = quality.damping_ratio
        return cls(
            name=name,
            shape=tuple(shape),
            method=recipe.method.name,
            loss=quality.loss,
            # A layer whose outputs were all zero has lost nothing.
            relative_loss=quality.loss / energy if energy else 0.0,
            damping=quality.damping_used,
            iterations=quality.iterations,
            gap=quality.gap,
            tokens=tokens,
            dead_inputs=quality.dead_inputs,
            raised_damping=ratio if ratio is not None and ratio > recipe.damping else None,
            target_loss=quality.target_loss,
            fallback_mask=quality.fallback_mask,
            swaps=quality.swaps,
            bits=None if recipe.grid is None else recipe.grid.bits,
            zeros_loss=quality.zeros_loss,
            grid_loss=quality.grid_loss,
            **others,
        )

    @classmethod
    def left_dense(
        cls, name: str, shape: Sequence[int], reason: str, block: str | None = None
    ) -> "LayerReport":
        """Return the row of a layer of `block` that stays dense, and log the reason."""
        log.info("%s is left dense: %s", name, reason)
        return cls(name=name, shape=tuple(shape), skipped=reason, block=block)

    def on_grid(self, lost: float, bits: int, seconds: float) -> "LayerReport":
        """Return the row of this layer after its kept weights were put on a grid.

        Args:
            lost: The loss of the grid alone: `loss` with δ measured from the weights before it.
            bits: The bits of a kept weight.
            seconds: The time of the quantisation, which is added to that of the row.
        """
        assert self.loss is not None
        # The sum is the whole loss, since `lost` is the part that the grid adds. `relative_loss`
        # grows in proportion, because the energy ‖wx‖² stays the same.
        whole = self.loss + lost
        return replace(
            self,
            loss=whole,
            relative_loss=(self.relative_loss or 0.0) * (whole / self.loss if self.loss else 1.0),
            seconds=(self.seconds or 0.0) + seconds,
            bits=bits,
            target_loss=None if self.target_loss is None else self.target_loss + lost,
            zeros_loss=self.loss,
            grid_loss=lost,
        )

    @property
    def zero_fraction(self) -> float:
        """The fraction of the weights that are zero by this pruning or an earlier one."""
        return (self.sparsity or 0.0) if self.zeros is None else self.zeros

    def __post_init__(self) -> None:
        is_matrix = len(self.shape) == 2 and self.shape[0] >= 0 and self.shape[1] > 0
        if self.skipped is None and not is_matrix:
            raise ValueError(
                f"the `shape` of {self.name} is {list(self.shape)}, expected (rows, columns)"
            )


@dataclass(frozen=True, kw_only=True)
class BlockReport(_Row):
    """The row of a block in the report. Values of parts that the run does not use are `None`.

    Attributes:
        name: The name of the block in the model.
        sparsity: The fraction of its weights that was to be removed, between 0 and 1.
        error_before: ‖y − y_d‖² / ‖y_d‖² over the held-out windows before tuning, for the outputs y
            of the block, and y_d of the block in the dense model. In quantisation alone, it is the
            mean over the tokens of this quotient.
        error_after: The error after tuning, at most `error_before`.
        epoch: The epoch whose weights were chosen, 0 for those before tuning.
        seconds: The duration of the tuning.
    """

    name: str
    sparsity: float | None = None
    error_before: float | None = None
    error_after: float | None = None
    epoch: int | None = None
    seconds: float | None = None


NAME = "pruning_report.json"
FORMAT_VERSION = 1
SPARSITY_ROUNDING = 1e-6
"""The tolerance of `sparsity`, which is a mean in float32 in reports of early versions."""


@dataclass
class PruningReport:
    """All layers of a run, in the order in which they were pruned.

    Attributes:
        config: The arguments of the run.
        layers: The layers, both those that are pruned and those that were left dense.
        seconds: The wall-clock time of the pruning, calibration included, without saving.
        cpu_seconds: The CPU time of the pruning in all threads of this process, `None` where it is
            not known.
        peak_rss: The most memory of this machine, in bytes, that the process held while it pruned.
            `None` where that is not known: where the process had held as much before, and on
            Windows.
        complete: Whether the pruning ended and, with a `save_dir`, the model is written. If not,
            `layers` has those that are pruned so far, and all others are unchanged.
        versions: The versions of the libraries that pruned, by name.
        stored_totals: The `totals` of the file from which the report was read, `None` for a report
            that is being made.
        provenance: The `command` that pruned, and the calibration `data` with its `source`,
            `samples`, `sequence_length` and `seed`, as far as they are known. For a model that was
            pruned before, `pruned_before` is the result of the function of that name; for one that
            was trained since, `trained` has the `steps` and the `command`.
        model_weights: The number of all weights of the model, also outside layers; `None` for a
            report that an older version wrote.
        files: The names of all files that were written with the report, relative to its directory.
        blocks: The blocks in their order, in runs with tuning or allocation.
        narrowed: For a narrower model, the `structure` that was removed, the number of `units` of
            each block and how many are `kept`, the number of `blocks`, the changed entries of the
            `config`, and the remaining number of weights, `model_weights`; otherwise empty. The
            `shape` of a layer is that before the removal.
        resumed_blocks: The number of blocks from the journal of an interrupted run. The layers
            outside the blocks count as one block; `seconds` includes that run.
    """

    config: dict[str, Any]
    layers: list[LayerReport] = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: float | None = None
    peak_rss: int | None = None
    complete: bool = False
    versions: dict[str, str] = field(default_factory=versions)
    stored_totals: dict[str, Any] | None = field(default=None, compare=False)
    files: list[str] = field(default_factory=list)
    blocks: list[BlockReport] = field(default_factory=list)
    provenance: dict[str, Any] = field(default_factory=dict)
    model_weights: int | None = None
    resumed_blocks: int = 0
    narrowed: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return a table of the layers, for a terminal."""
        return listing(self.layers, self.totals)

    @classmethod
    def of(
        cls, results: Iterable["BlockResult"], config: Mapping[str, Any], **others: Any
    ) -> "PruningReport":
        """Return the report of blocks, in the order in which they were pruned.

        Args:
            results: The results of the blocks, also of an interrupted run.
            config: The arguments of the run.
            others: Other attributes of the report, by name.
        """
        blocks = list(results)
        return cls(
            config=dict(config),
            layers=[row for block in blocks for row in block.rows],
            blocks=[block.row for block in blocks if block.row is not None],
            **others,
        )

    @property
    def pruned(self) -> list[LayerReport]:
        """Return the layers that are pruned."""
        return [row for row in self.layers if row.skipped is None]

    @property
    def relative_loss(self) -> float | None:
        """Return the mean of `relative_loss` over the pruned layers, `None` if there are none."""
        return mean_relative_loss(self.pruned)

    @property
    def losses(self) -> tuple[float, float]:
        """Return (Σ relative loss, the part of it due to the grid) over the layers on a grid."""
        losses = [
            # Shares of the relative loss, since losses of layers have different scales.
            (row.relative_loss, row.grid_loss / row.loss)
            for row in self.pruned
            if row.relative_loss and row.loss and row.grid_loss is not None
        ]
        return sum(loss for loss, _ in losses), sum(loss * share for loss, share in losses)

    @property
    def recipe(self) -> Recipe:
        """Return a recipe with the pattern and the grid of `config`, to compare weights with.

        Weights do not show their method: the recipe has magnitude, which every pattern allows.

        Raises:
            ArgumentError: No run has such a pattern or grid.
        """
        return _recipe(self.config)

    @property
    def totals(self) -> dict[str, Any]:
        """Return sums and means over the pruned layers; a report that was read has its file's.

        `removed` and `sparsity` also count weights that were zero before and stayed zero.
        """
        if self.stored_totals is not None:
            return self.stored_totals
        # Pruned rows alone: only they are sure to be matrices, by `__post_init__`.
        weights = sum(row.shape[0] * row.shape[1] for row in self.pruned)
        zeros = sum(row.zero_fraction * row.shape[0] * row.shape[1] for row in self.pruned)
        zeros_before = sum(
            (row.zeros_before or 0) * row.shape[0] * row.shape[1] for row in self.pruned
        )
        of_model = self.model_weights
        spent = {"cpu_seconds": self.cpu_seconds, "peak_rss": self.peak_rss}
        peaks = [row.peak_memory for row in self.pruned if row.peak_memory is not None]
        return {
            "complete": self.complete,
            "layers": len(self.pruned),
            "skipped": len(self.layers) - len(self.pruned),
            "already_pruned": sum(row.already_pruned for row in self.pruned),
            **({"zeros_before": zeros_before / weights} if zeros_before else {}),
            "weights": weights,
            "removed": round(zeros),
            "sparsity": zeros / weights if weights else 0.0,
            **({"model_weights": of_model, "share": weights / of_model} if of_model else {}),
            "relative_loss": self.relative_loss,
            "seconds": self.seconds,
            **{key: value for key, value in spent.items() if value is not None},
            **({"peak_memory": max(peaks)} if peaks else {}),
            **({"resumed_blocks": self.resumed_blocks} if self.resumed_blocks else {}),
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `pruning_report.json`."""
        return {
            "format_version": FORMAT_VERSION,
            "layers": [row.to_dict() for row in self.layers],
            "totals": self.totals,
            "versions": self.versions,
            "config": self.config,
            **({"blocks": [row.to_dict() for row in self.blocks]} if self.blocks else {}),
            **({"narrowed": self.narrowed} if self.narrowed else {}),
            **({"provenance": self.provenance} if self.provenance else {}),
            **({"files": self.files} if self.files else {}),
        }

    def save(self, directory: str | PathLike[str]) -> Path:
        """Write `pruning_report.json` into a directory, and return its path."""
        path = Path(directory) / NAME
        save_ours(path, as_json(self.to_dict()))
        return path

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "PruningReport":
        """Read a `pruning_report.json`, also one of an older run.

        `totals`, `versions` and `config` are as they are stored.

        Raises:
            FileNotFoundError: There is no such file.
            FormatError: The file is damaged, or of a newer version of mrp-lightning. The message
                lists all problems.
        """
        content = read_json(path, "prune again", FORMAT_VERSION)
        return cls.from_dict(content, str(path), "delete it, or prune again")

    @classmethod
    def from_dict(cls, content: Any, source: str, remedy: str = "prune again") -> "PruningReport":
        """Read the result of `to_dict`, also of an older version.

        Args:
            content: The report as plain containers.
            source: The origin of the report, for messages.
            remedy: The next step for a damaged report, for messages.

        Raises:
            FormatError: The report is damaged, or of a newer version of mrp-lightning. The message
                lists all problems.
        """
        check_version(content, source, FORMAT_VERSION, "prune again")
        stored = as_dataclass(_Content, content, source, remedy)
        totals = stored.totals
        return cls(
            # As stored: `_Config` has only the keys that readers use, and would drop all others.
            config=content["config"],
            layers=stored.layers,
            seconds=totals.seconds or 0.0,
            cpu_seconds=totals.cpu_seconds,
            peak_rss=totals.peak_rss,
            complete=totals.complete,
            versions=stored.versions,
            stored_totals=content["totals"],
            files=stored.files,
            blocks=stored.blocks,
            provenance=stored.provenance,
            model_weights=totals.model_weights,
            resumed_blocks=totals.resumed_blocks,
            narrowed=stored.narrowed,
        )


def mean_relative_loss(rows: Iterable[LayerReport]) -> float | None:
    """Return the mean of `relative_loss` over the rows that have one, `None` if none has."""
    losses = [row.relative_loss for row in rows if row.relative_loss is not None]
    return sum(losses) / len(losses) if losses else None


def pruned_before(directory: str | PathLike[str]) -> list[dict[str, Any]]:
    """Return the earlier prunings of the model in a directory, from its report, if it has one.

    Each has `method` and those of `structure`, `sparsity`, `pattern`, `bits` and `head_grid` that
    were set; the earliest comes first. A report that cannot be read is ignored, with a warning.
    """
    file = Path(directory) / NAME
    if not file.is_file():
        return []
    try:
        report = PruningReport.load(file)
    # History is for the report alone: a damaged one must not stop a pruning that does not need it.
    except (FormatError, OSError) as error:
        log.warning("How this model was pruned before is not known: %s", error)
        return []
    earlier = report.provenance.get("pruned_before")
    keys = ("method", "structure", "sparsity", "pattern", "bits", "head_grid")
    settings = {key: report.config.get(key) for key in keys}
    return [
        *([x for x in earlier if isinstance(x, dict)] if isinstance(earlier, list) else []),
        {key: value for key, value in settings.items() if value is not None},
    ]


@dataclass(kw_only=True)
class _Totals:
    """The `totals` of a file; fields with a default are missing in files of older versions."""

    layers: float | None
    skipped: float | None
    weights: float | None
    removed: float | None
    sparsity: float | None
    relative_loss: float | None
    seconds: float | None
    complete: bool = False
    model_weights: int | None = None
    cpu_seconds: float | None = None
    peak_rss: int | None = None
    resumed_blocks: int = 0
    zeros_before: float | None = None


@dataclass(kw_only=True)
class _Config:
    """The part of the `config` of a file that readers use."""

    method: str
    sparsity: Any = None
    pattern: Any = None
    bits: int | None = None
    group_size: int = 64
    grid: str | None = None
    head_grid: str | None = None
    structure: str | None = None

    def __post_init__(self) -> None:
        # A report is refused while it is read, not when `recipe` is asked for later.
        _recipe(vars(self))


def _recipe(config: Mapping[str, Any]) -> Recipe:
    keys = ("sparsity", "pattern", "bits", "group_size", "grid", "head_grid")
    amount = {key: config[key] for key in keys if config.get(key) is not None}
    leaves_zeros = config.get("structure") is None
    return Recipe.parse(LayerSettings(method="magnitude", **amount), leaves_zeros=leaves_zeros)


@dataclass(kw_only=True)
class _Content:
    """The content of `pruning_report.json`."""

    layers: list[LayerReport]
    totals: _Totals
    versions: dict[str, str]
    config: _Config
    blocks: list[BlockReport] = field(default_factory=list)
    provenance: dict[str, Any] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    narrowed: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = {row.block for row in self.layers if row.block is not None}
        unknown = [repr(row.name) for row in self.blocks if names and row.name not in names]
        if unknown:  # layers have no block in the reports of older versions
            raise ValueError(f"`blocks` names blocks that no layer is in: {', '.join(unknown)}")


_WIDTH = 80


def listing(layers: Iterable[LayerReport], totals: dict[str, Any]) -> str:
    """Return the layers of a report with their losses, in 80 columns, and why others are dense.

    Args:
        layers: The rows of the report; a layer that stayed dense has the reason.
        totals: The `totals` of the report.
    """
    from rich.table import Table  # slow to import, and only needed here

    from mrp_lightning.terminal import Console

    table = Table(show_edge=False, pad_edge=False)
    table.add_column("layer", overflow="fold")
    for column in ("shape", "sparsity", "relative\nloss", "seconds"):
        table.add_column(column, justify="right")
    dense: dict[str, str] = {}
    for row in layers:
        shape = " × ".join(map(str, row.shape))
        if row.skipped is not None:
            dense[row.name] = row.skipped
        else:
            numbers = (_number(row.relative_loss, ".3g"), _number(row.seconds, ".1f"))
            table.add_row(row.name, shape, _number(row.zero_fraction, ".1%"), *numbers)
    table.add_section()
    loss, seconds = _number(totals["relative_loss"], ".3g"), _number(totals["seconds"], ".1f")
    weights, sparsity = f"{totals['weights']:,}", _number(totals["sparsity"], ".1%")
    table.add_row(counted(totals["layers"], "layer"), weights, sparsity, loss, seconds)
    # Into a text of fixed width, so that the listing is the same in a terminal and in a file.
    text = StringIO()
    Console(file=text, width=_WIDTH).print(table)
    if dense:
        text.write(f"Left dense:\n{listed(dense)}")
    return text.getvalue().rstrip("\n")


def _number(value: object, style: str) -> str:
    return "" if value is None else format(value, style)
