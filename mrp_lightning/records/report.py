"""`pruning_report.json`: the results of a run for each layer and block."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from io import StringIO
from os import PathLike
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator

from mrp_lightning.environment import versions
from mrp_lightning.errors import FormatError, counted
from mrp_lightning.records.block_result import BlockResult
from mrp_lightning.records.rows import BlockReport, LayerReport, mean_relative_loss
from mrp_lightning.solver.amount import Amount
from mrp_lightning.solver.patterns import Dense
from mrp_lightning.storage.files import save_ours
from mrp_lightning.storage.json_files import as_dataclass, as_json, check_version, read_json
from mrp_lightning.targets.blocks import listed

log = logging.getLogger(__name__)


NAME = "pruning_report.json"
FORMAT_VERSION = 1
_SECTIONS = ("layers", "totals", "versions", "config")


def _readable(config: dict[str, Any]) -> dict[str, Any]:
    """Return the `config` of a file; raise a ValueError if readers would refuse it later."""
    if is_of_vocabulary_alone(config):
        return config
    if not isinstance(config.get("method"), str):
        raise ValueError("`method` is missing, or is no string")
    Amount.of_config(config)
    return config


def is_of_vocabulary_alone(config: Mapping[str, Any]) -> bool:
    """Return whether the vocabulary was cut, and nothing pruned."""
    return "method" not in config and isinstance(config.get("vocabulary"), int)


@dataclass
class PruningReport:
    """All layers of a run, in the order in which they were pruned.

    Attributes:
        config: The arguments of the callback by name, and `base_model`, the directory or hub id
            of the model, where it has one.
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
        provenance: The `command` that pruned, and the calibration `data` with its `source`,
            `samples`, `sequence_length` and `seed`, as far as they are known. For a model that was
            pruned before, `pruned_before` is the result of the function of that name; for one that
            was trained since, `trained` has the `steps` and the `command`.
        model_weights: The number of all weights of the model, also outside layers; `None` where
            that is not known.
        files: The names of all files that were written with the report, relative to its directory.
        blocks: The blocks in their order, where they are tuned or have sparsities of their own.
        narrowed: For a narrower model, the `structure` that was removed, the number of `units` of
            each block and how many are `kept`, the number of `blocks`, the changed entries of the
            `config`, and the remaining number of weights, `model_weights`; otherwise empty. The
            `shape` of a layer is that before the removal. For a model without some blocks, the
            units are its blocks; `removed` has the names of those that went, `change` the mean
            KL(dense ‖ shortened) on held-out windows, `run_change` and `greedy_change` that of the
            two ways to choose, and `repair` the fitted `layers` (by their former names) and the
            `change` with them.
        vocabulary: For a model whose vocabulary was cut, its `size` before, the number of tokens
            that are `kept`, the `rows` of the embeddings before, `model_weights` before and after,
            the `proof` (see `VocabularyCut`), and the `tokens` of several texts, by name, before
            and after. From `prune`, `held_out` has the `bytes` of the held-out text that was read,
            and before and after `bytes_per_token` and `bits_per_byte`, the negative log-likelihood
            of a byte. Otherwise empty. All else in the report is of the smaller model.
        resumed_blocks: The number of blocks from the journal of an interrupted run. The layers
            outside the blocks count as one block; `seconds` includes that run.
    """

    config: Annotated[dict[str, Any], AfterValidator(_readable)]
    layers: list[LayerReport] = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: float | None = None
    peak_rss: int | None = None
    complete: bool = False
    versions: dict[str, str] = field(default_factory=versions)
    files: list[str] = field(default_factory=list)
    blocks: list[BlockReport] = field(default_factory=list)
    provenance: dict[str, Any] = field(default_factory=dict)
    model_weights: int | None = None
    resumed_blocks: int = 0
    narrowed: dict[str, Any] = field(default_factory=dict)
    vocabulary: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return a table of the layers, for a terminal."""
        return listing(self.layers, self.totals)

    @classmethod
    def of(
        cls, results: Iterable[BlockResult], config: Mapping[str, Any], **others: Any
    ) -> "PruningReport":
        """Return the report of blocks, in the order in which they were pruned.

        `others` are attributes of the report, by name.
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
        """The layers that are pruned."""
        return [row for row in self.layers if row.skipped is None]

    @property
    def relative_loss(self) -> float | None:
        """The mean of `relative_loss` over the pruned layers, `None` if there are none."""
        return mean_relative_loss(self.pruned)

    @property
    def amount(self) -> Amount:
        """The pattern and the grids that `config` asks for, parsed."""
        if is_of_vocabulary_alone(self.config):
            return Amount(pattern=Dense())
        return Amount.of_config(self.config)

    @property
    def totals(self) -> dict[str, Any]:
        """The totals of `pruning_report.json`: numbers of layers and of weights, losses and times.

        `sparsity` is the fraction `removed` / `weights` of the pruned layers, `share` that of these
        `weights` in the model, `relative_loss` the mean over layers, times are in seconds and
        memory is in bytes. `removed` and `sparsity` also count weights that were zero before and
        stayed zero.
        """
        pruned, of_model = self.pruned, self.model_weights
        weights = sum(row.num_weights for row in pruned)
        zeros = sum(row.zero_fraction * row.num_weights for row in pruned)
        before = [(row.zeros, row.num_weights) for row in pruned if row.zeros is not None]
        zeros_before = sum(had.before * number for had, number in before)
        spent = {"cpu_seconds": self.cpu_seconds, "peak_rss": self.peak_rss}
        peaks = [row.peak_memory for row in pruned if row.peak_memory is not None]
        return {
            "complete": self.complete,
            "layers": len(pruned),
            "skipped": len(self.layers) - len(pruned),
            "already_pruned": sum(had.had_pattern for had, _ in before),
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
            "blocks": [asdict(row) for row in self.blocks],
            "narrowed": self.narrowed,
            "vocabulary": self.vocabulary,
            "provenance": self.provenance,
            "files": self.files,
        }

    def save(self, directory: str | PathLike[str]) -> Path:
        """Write `pruning_report.json` into an existing directory, and return its path."""
        path = Path(directory) / NAME
        save_ours(path, as_json(self.to_dict()))
        return path

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "PruningReport":
        """Read a `pruning_report.json`; a FormatError is raised if it is damaged or newer."""
        content = read_json(path, "prune again", FORMAT_VERSION)
        return cls.from_dict(content, str(path), "delete it, or prune again")

    @classmethod
    def from_dict(cls, content: Any, source: str, remedy: str = "prune again") -> "PruningReport":
        """Read the result of `to_dict`; `source` and `remedy`, the next step, are for messages.

        Raises:
            FormatError: The report is damaged, or of another version of mrp-lightning. The message
                lists all problems.
        """
        check_version(content, source, FORMAT_VERSION, "prune again")
        missing = [f"`{key}`" for key in _SECTIONS if key not in content]
        totals = content.get("totals")
        if missing or not isinstance(totals, dict):
            raise FormatError(
                f"{source} is not as mrp-lightning writes it: it lacks "
                f"{', '.join(missing) or '`totals`'}. {remedy[0].upper()}{remedy[1:]}."
            )
        # Sums over the layers are computed anew; `layers`, which is their number among the totals,
        # is the list of rows in the report.
        return as_dataclass(cls, {**totals, **content}, source, remedy)


def pruned_before(directory: str | PathLike[str]) -> list[dict[str, Any]]:
    """Return the earlier prunings of the model in a directory, from its report, if it has one.

    Each has those of `method`, `structure`, `sparsity`, `pattern`, `bits`, `grid`, `head_grid` and
    `vocabulary` that were set; the earliest comes first. A report that cannot be read is ignored,
    with a warning.
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
    keys = ("method", "structure", "sparsity", "pattern", "bits", "grid", "head_grid", "vocabulary")
    settings = {key: report.config.get(key) for key in keys}
    own = {key: value for key, value in settings.items() if value is not None}
    if trained := report.provenance.get("trained"):
        own["trained"] = trained["steps"]
    earlier = report.provenance.get("pruned_before")
    known = earlier if isinstance(earlier, list) else []
    return [*(x for x in known if isinstance(x, dict)), own]


def was_pruned(earlier: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether weights were removed or rounded in one of the results of `pruned_before`.

    A model of which the vocabulary alone was cut is dense.
    """
    return any("method" in run for run in earlier)


def was_rounded(prunings: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether weights were put on a grid of few bits in one of these prunings."""
    return any(run.get(key) for run in prunings for key in ("bits", "grid", "head_grid"))


def dense_model_of(report: PruningReport) -> str | None:
    """Return the model before a pruning and all earlier ones of it, `None` if it is not recorded.

    The search ends at a model whose vocabulary was cut, since the one before has another.

    Raises:
        FormatError: An earlier report is damaged, or of another version.
    """
    model: str | None = report.config.get("base_model")
    passed: set[str] = set()  # a directory that was overwritten may name a later one
    while model is not None and model not in passed and (file := Path(model) / NAME).is_file():
        passed.add(model)
        earlier = PruningReport.load(file)
        if earlier.vocabulary or earlier.config.get("base_model") is None:
            break
        model = earlier.config["base_model"]
    return model


_WIDTH = 80


def listing(layers: Iterable[LayerReport], totals: dict[str, Any]) -> str:
    """Return the layers of a report with their losses, in 80 columns, and why others are dense."""
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
