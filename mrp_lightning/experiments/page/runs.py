"""Finding runs on disk and reading what they say."""

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from mrp_lightning.errors import FormatError, PatternError
from mrp_lightning.evaluation import records
from mrp_lightning.evaluation.records import Evaluation
from mrp_lightning.pruning.report import FORMAT_VERSION
from mrp_lightning.solver.patterns import make_pattern

log = logging.getLogger(__name__)

PRUNING = "pruning_report.json"
EXPORT = "export_report.json"

Layer = Mapping[str, Any]
"""A row of `pruning_report.json`; see `walk.report.LayerReport`."""

_NUMBERS = (
    *("sparsity", "loss", "relative_loss", "damping", "iterations", "gap", "seconds", "tokens"),
    *("dead_inputs", "shared_hessian", "peak_memory", "raised_damping"),
)
_TOTALS = ("layers", "skipped", "weights", "removed", "sparsity", "relative_loss", "seconds")


@dataclass(frozen=True, eq=False)
class Run:
    """A directory with `pruning_report.json`, `evaluation.json`, or both.

    Attributes:
        directory: Where it lies.
        name: Its path from the directory that was searched.
        pruning: What was pruned, `None` for a dense model.
        evaluation: What the model can do; empty where that was not measured.
        exported: What `export_report.json` calls the format of the weights, if there is one.
        weight_bytes: Of the safetensors files, `None` where there are none.
        files: The files that were read.
    """

    directory: Path
    name: str
    pruning: Mapping[str, Any] | None
    evaluation: Evaluation
    exported: str | None = None
    weight_bytes: int | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)

    @cached_property
    def layers(self) -> Sequence[Layer]:
        """All layers, pruned and left dense."""
        return self.pruning["layers"] if self.pruning else []

    @cached_property
    def pruned(self) -> Sequence[Layer]:
        """The pruned layers, in the order in which they were pruned."""
        return [layer for layer in self.layers if layer.get("skipped") is None]

    @property
    def totals(self) -> Mapping[str, Any]:
        """As in the report."""
        return self.pruning["totals"] if self.pruning else {}

    @property
    def config(self) -> Mapping[str, Any]:
        """As in the report."""
        return self.pruning["config"] if self.pruning else {}

    @property
    def versions(self) -> Mapping[str, str]:
        """Of the libraries that pruned, or else that evaluated."""
        return self.pruning["versions"] if self.pruning else self.evaluation.versions

    @property
    def is_beside(self) -> bool:
        """Whether it was found beside what was searched."""
        return self.name.startswith("../")

    @property
    def complete(self) -> bool:
        """Whether pruning came to its end."""
        return self.pruning is None or bool(self.totals.get("complete"))


def find_runs(root: Path) -> list[Run]:
    """The runs in a directory and beneath it, by name; hidden directories are passed over.

    If all of them are pruned, the dense runs beside `root` are returned too.

    Raises:
        FileNotFoundError: There are none.
        FormatError: A file of a run is damaged, or of a newer version of mrp-lightning.
    """
    if not root.is_dir():
        raise FileNotFoundError(f"`RUN_DIR`: {root} is no directory.")
    runs = [read_run(directory, _name(directory, root)) for directory in sorted(_below(root))]
    if not runs:
        raise FileNotFoundError(
            f"`RUN_DIR`: no {PRUNING} and no {records.NAME} in {root} or beneath it. A run with "
            "`save_dir` writes the first, `zeroshot` and `test` the second."
        )
    if all(run.pruning for run in runs):
        runs += _dense_beside(root)
    return runs


def _dense_beside(root: Path) -> Iterator[Run]:
    """What is beside was not asked for: where it is damaged, the page is made without it."""
    for directory in sorted(root.absolute().parent.iterdir()):
        if directory.is_dir() and is_dense_run(directory):
            try:
                yield read_run(directory, f"../{directory.name}")
            except FormatError as error:
                log.warning("%s is not compared with. %s", directory, error)


def is_dense_run(directory: Path) -> bool:
    """Whether a directory holds the evaluation of a model that is not pruned."""
    return (directory / records.NAME).is_file() and not (directory / PRUNING).exists()


def read_run(directory: Path, name: str) -> Run:
    """Read one run.

    Raises:
        FormatError: A file is damaged, or of a newer version of mrp-lightning.
    """
    names = (PRUNING, records.NAME)
    files = {n: (directory / n).read_bytes() for n in names if (directory / n).is_file()}
    found = records.read(directory) if records.NAME in files else Evaluation()
    _check_evaluation(directory / records.NAME, found)
    weights = [file.stat().st_size for file in directory.glob("*.safetensors")]
    return Run(
        directory=directory,
        name=name,
        pruning=_read_pruning(directory / PRUNING) if PRUNING in files else None,
        evaluation=found,
        exported=_exported(directory / EXPORT),
        weight_bytes=sum(weights) or None,
        files=files,
    )


def _below(root: Path) -> Iterator[Path]:
    for where, directories, files in os.walk(root):
        directories[:] = [name for name in directories if not name.startswith(".")]
        if PRUNING in files or records.NAME in files:
            yield Path(where)


def _name(directory: Path, root: Path) -> str:
    relative = directory.relative_to(root).as_posix()
    return directory.resolve().name if relative == "." else relative


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise FormatError(f"{path} is not JSON ({error}). Delete it, or prune again.") from error


def _read_pruning(path: Path) -> Mapping[str, Any]:
    content = _read_json(path)
    version = content.get("format_version") if isinstance(content, dict) else None
    if version != FORMAT_VERSION:
        raise FormatError(
            f"{path}: `format_version` is {version!r}, but this version of mrp-lightning reads "
            f"{FORMAT_VERSION}. Use the version that wrote it, or prune again."
        )
    kinds = {"layers": list, "totals": dict, "versions": dict, "config": dict}
    wrong = [key for key, kind in kinds.items() if not isinstance(content.get(key), kind)]
    problems = [f"`{key}` is missing or no {kinds[key].__name__}" for key in wrong]
    if not wrong:
        totals, config = content["totals"], content["config"]
        try:
            make_pattern(config.get("sparsity"), config.get("pattern"))
        except PatternError as error:
            problems.append(f"`config`: {error}")
        if not isinstance(config.get("method"), str):
            problems.append(f"`config.method` is {config.get('method')!r}")
        problems += [
            f"`totals.{k}` is missing" for k in _TOTALS if not _is_number(totals.get(k, k))
        ]
        problems += [
            f"`layers[{i}]`: {problem}"
            for i, layer in enumerate(content["layers"])
            for problem in _layer_problems(layer)
        ]
    if problems:
        more = f"\n  and {len(problems) - 5} more" if len(problems) > 5 else ""
        listed = "\n".join(f"  {problem}" for problem in problems[:5])
        raise FormatError(f"{path} is no report of a pruning run:\n{listed}{more}")
    return content


def _layer_problems(layer: Any) -> Iterator[str]:
    if not isinstance(layer, dict):
        yield f"expected an object, got {layer!r}"
        return
    if not isinstance(layer.get("name"), str):
        yield f"`name` is {layer.get('name')!r}"
    shape = layer.get("shape")
    sizes = shape if isinstance(shape, list) else []
    plain = all(isinstance(size, int) and size > 0 for size in sizes)
    if not plain or len(sizes) < (1 if layer.get("skipped") else 2):
        yield f"`shape` is {shape!r}"
    skipped = layer.get("skipped")
    if skipped is not None and not isinstance(skipped, str):
        yield f"`skipped` is {skipped!r}"
    for key in _NUMBERS:
        if not _is_number(layer.get(key)):
            yield f"`{key}` is {layer[key]!r}"


def _check_evaluation(path: Path, content: Evaluation) -> None:
    for section in ("perplexity", "zeroshot"):
        for name, figures in getattr(content, section).items():
            if not isinstance(figures, dict) or not all(map(_is_number, figures.values())):
                raise FormatError(
                    f"{path}: expected numbers by name in `{section}.{name}`, got {figures!r}. "
                    "Delete the file and evaluate the model again."
                )


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _exported(path: Path) -> str | None:
    if not path.is_file():
        return None
    content = _read_json(path)
    return str(content.get("format")) if isinstance(content, dict) else None
