"""What a run did to each layer, and the file that says so."""

import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from os import PathLike
from pathlib import Path
from typing import Any, get_args, get_type_hints

from mrp_lightning.environment import versions
from mrp_lightning.errors import FormatError, PatternError
from mrp_lightning.files import as_json, check_version, read_json, save_text
from mrp_lightning.solver.patterns import make_pattern

log = logging.getLogger(__name__)

NAME = "pruning_report.json"
FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """What was done to one layer. The measures of a layer that was left dense are `None`.

    Attributes:
        name: The name of the layer in the checkpoint.
        shape: The shape of the weight, (rows, columns).
        method: The mask and the compensation, such as `SM`.
        sparsity: The fraction of the weights that are removed, between 0 and 1.
        loss: The mean over the calibration tokens of ‖(w + δ)x − wx‖², summed over all rows.
        relative_loss: `loss` divided by the mean over the tokens of ‖wx‖².
        damping: The λ that was added to the diagonal of the Hessian.
        iterations: The number of iterations of the exact compensation.
        gap: The certified distance to the optimal loss, relative to that loss.
        seconds: The time that pruning the layer took. The first of the layers that share an input
            pays for preparing the Hessian.
        tokens: The number of calibration tokens that the layer saw.
        dead_inputs: The number of input features that were 0 in every token.
        skipped: The reason why the layer was left dense, `None` if it is pruned.
        already_pruned: Whether the weight had the pattern before it was pruned.
        shared_hessian: The share of all experts' Hessian, between 0 and 1, in the Hessian by which
            an expert was pruned. It is above 0 where the expert saw too few tokens, and `loss` is
            then measured by that mixture. It is `None` for layers that are not experts.
        raised_damping: The fraction of the Hessian's mean diagonal that was added, where more was
            needed than was asked for. It is `None` where what was asked for was enough.
        peak_memory: The most memory, in bytes, that was allocated on the GPU while the layer was
            pruned. It is `None` on other devices.
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
    shared_hessian: float | None = None
    raised_damping: float | None = None
    peak_memory: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """The layer's row of `pruning_report.json`."""
        row = asdict(self) | {"shape": list(self.shape)}
        for key in ("already_pruned", "shared_hessian", "raised_damping", "peak_memory"):
            if row[key] is None or row[key] is False:
                del row[key]
        return row

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> "LayerReport":
        """Read a row of `pruning_report.json`. What an older version did not write is `None`."""
        known = {f.name: row[f.name] for f in fields(cls) if f.name in row}
        return cls(**known | {"shape": tuple(row["shape"])})


@dataclass
class PruningReport:
    """All layers of a run, in the order in which they were pruned.

    Attributes:
        config: The arguments of the run.
        layers: The layers, both those that are pruned and those that were left dense.
        seconds: The wall-clock time of the walk.
        complete: Whether all was done that was asked for. If it was not, `layers` says which layers
            are pruned, and all others are untouched.
        versions: The versions of the libraries that pruned, by name.
        stored_totals: The `totals` of the file from which the report was read, `None` for a report
            that is being made.
        provenance: The `command` that pruned, and what calibrated: the `data`, with its `source`,
            `samples`, `sequence_length` and `seed`, as far as they are known.
        model_weights: The number of all weights of the model, those in no layer too; `None` for a
            report that an older version wrote.
        files: The names of all files that were written with the report, relative to its directory.
    """

    config: dict[str, Any]
    layers: list[LayerReport] = field(default_factory=list)
    seconds: float = 0.0
    complete: bool = False
    versions: dict[str, str] = field(default_factory=versions)
    stored_totals: dict[str, Any] | None = field(default=None, compare=False)
    files: list[str] = field(default_factory=list)
    provenance: dict[str, Any] = field(default_factory=dict)
    model_weights: int | None = None

    def skip(self, name: str, shape: tuple[int, ...], reason: str) -> None:
        """Add a layer that is left dense, and why."""
        log.info("%s is left dense: %s", name, reason)
        self.layers.append(LayerReport(name=name, shape=shape, skipped=reason))

    @property
    def pruned(self) -> list[LayerReport]:
        """The layers that are pruned."""
        return [row for row in self.layers if row.skipped is None]

    @property
    def relative_loss(self) -> float | None:
        """The mean of `relative_loss` over the pruned layers, `None` if there are none."""
        losses = [row.relative_loss for row in self.pruned if row.relative_loss is not None]
        return sum(losses) / len(losses) if losses else None

    @property
    def totals(self) -> dict[str, Any]:
        """Sums and means over the layers; those of a file that was read are as it states them."""
        if self.stored_totals is not None:
            return self.stored_totals
        weights = sum(row.shape[0] * row.shape[1] for row in self.pruned)
        zeros = sum((row.sparsity or 0) * row.shape[0] * row.shape[1] for row in self.pruned)
        of_model = self.model_weights
        peaks = [row.peak_memory for row in self.pruned if row.peak_memory is not None]
        return {
            "complete": self.complete,
            "layers": len(self.pruned),
            "skipped": len(self.layers) - len(self.pruned),
            "already_pruned": sum(row.already_pruned for row in self.pruned),
            "weights": weights,
            "removed": round(zeros),
            "sparsity": zeros / weights if weights else 0.0,
            **({"model_weights": of_model, "share": weights / of_model} if of_model else {}),
            "relative_loss": self.relative_loss,
            "seconds": self.seconds,
            **({"peak_memory": max(peaks)} if peaks else {}),
        }

    def to_dict(self) -> dict[str, Any]:
        """The content of `pruning_report.json`."""
        return {
            "format_version": FORMAT_VERSION,
            "layers": [row.to_dict() for row in self.layers],
            "totals": self.totals,
            "versions": self.versions,
            "config": self.config,
            **({"provenance": self.provenance} if self.provenance else {}),
            **({"files": self.files} if self.files else {}),
        }

    def save(self, directory: str | PathLike[str]) -> Path:
        """Write `pruning_report.json` into a directory, and return its path."""
        path = Path(directory) / NAME
        save_text(path, as_json(self.to_dict()))
        return path

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "PruningReport":
        """Read a `pruning_report.json`, also one of an older run.

        Args:
            path: The file.

        Returns:
            The report, with `totals`, `versions` and `config` as they are stored.

        Raises:
            FileNotFoundError: There is no such file.
            FormatError: It is damaged, or of a newer version of mrp-lightning; all problems are
                listed.
        """
        return cls.from_dict(read_json(path, "prune again", FORMAT_VERSION), str(path))

    @classmethod
    def from_dict(cls, content: Any, source: str) -> "PruningReport":
        """Read what `to_dict` gave, also in an older version.

        Args:
            content: The report as plain containers.
            source: Where it comes from, for messages.

        Raises:
            FormatError: It is damaged, or of a newer version of mrp-lightning; all problems are
                listed.
        """
        check_version(content, source, FORMAT_VERSION, "prune again")
        problems = list(_problems(content))
        if problems:
            listed = "\n".join(f"  {problem}" for problem in problems)
            raise FormatError(
                f"{source} is no report of a pruning run. Delete it, or prune again.\n{listed}"
            )
        totals = content["totals"]
        return cls(
            config=content["config"],
            layers=[LayerReport.from_dict(row) for row in content["layers"]],
            seconds=totals["seconds"] or 0.0,
            complete=totals.get("complete", False),
            versions=content["versions"],
            stored_totals=totals,
            files=content.get("files", []),
            provenance=content.get("provenance", {}),
            model_weights=totals.get("model_weights"),
        )


_SECTIONS = {"layers": list, "totals": dict, "versions": dict, "config": dict}
_TOTALS = ("layers", "skipped", "weights", "removed", "sparsity", "relative_loss", "seconds")
_JSON_NAMES = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    type(None): "null",
}


def _problems(content: dict[str, Any]) -> Iterator[str]:
    """What in a `pruning_report.json` is not as this version writes it."""
    wrong = [key for key, kind in _SECTIONS.items() if not isinstance(content.get(key), kind)]
    yield from (f"`{key}` is missing or no {_SECTIONS[key].__name__}" for key in wrong)
    if wrong:
        return
    config, totals, files = content["config"], content["totals"], content.get("files", [])
    if not isinstance(files, list) or not all(isinstance(name, str) for name in files):
        yield f"`files` is {files!r}, expected a list of names"
    try:
        make_pattern(config.get("sparsity"), config.get("pattern"))
    except PatternError as error:
        yield f"`config`: {error}"
    if not isinstance(content.get("provenance", {}), dict):
        yield f"`provenance` is {content['provenance']!r}, expected an object"
    yield from _wrong_type("totals.model_weights", totals.get("model_weights"), int | None)
    yield from _wrong_type("config.method", config.get("method"), str)
    for key in _TOTALS:
        if key in totals:
            yield from _wrong_type(f"totals.{key}", totals[key], float | None)
        else:
            yield f"`totals.{key}` is missing"
    yield from _wrong_type("totals.complete", totals.get("complete", False), bool)
    for library, version in content["versions"].items():
        yield from _wrong_type(f"versions.{library}", version, str)
    for i, row in enumerate(content["layers"]):
        yield from (f"`layers[{i}]`: {problem}" for problem in _row_problems(row))


def _row_problems(row: Any) -> Iterator[str]:
    if not isinstance(row, dict):
        yield f"expected an object, got {row!r}"
        return
    for key, kind in get_type_hints(LayerReport).items():
        if key != "shape":
            missing = getattr(LayerReport, key, None)
            yield from _wrong_type(key, row.get(key, missing), kind)
    shape = row.get("shape")
    sizes = shape if isinstance(shape, list) else []
    positive = all(type(size) is int and size > 0 for size in sizes)
    if not positive or len(sizes) < (1 if row.get("skipped") else 2):
        yield f"`shape` is {shape!r}, expected a list of positive integers, the rows first"


def _wrong_type(key: str, value: Any, kind: Any) -> Iterator[str]:
    kinds = get_args(kind) or (kind,)
    # In JSON 1 and 1.0 are one number, but a bool, which Python counts among the integers, is none.
    allowed = (*kinds, int) if float in kinds else kinds
    if not (bool in kinds if isinstance(value, bool) else isinstance(value, allowed)):
        expected = " or ".join(_JSON_NAMES[kind] for kind in kinds)
        yield f"`{key}` is {value!r}, expected {expected}"
