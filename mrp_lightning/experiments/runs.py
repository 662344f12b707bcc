"""Runs on disk: their reports, evaluations and trials."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mrp_lightning.experiments.trials import Trial, method_rank
from mrp_lightning.records import evaluation as records
from mrp_lightning.records import report
from mrp_lightning.records.evaluation import Evaluation
from mrp_lightning.records.report import PruningReport, is_of_vocabulary_alone
from mrp_lightning.records.rows import LayerReport
from mrp_lightning.storage.files import save_ours, visible_files
from mrp_lightning.storage.json_files import as_json, read_as, read_json

TRIAL = "run.json"
"""The name of the file that a sweep writes last: a directory with it holds a finished run."""

_EXPORT = "export_report.json"
_FORMAT_VERSION = 1
CALIBRATION = {"calibration": "source", "sequence_length": "sequence_length", "bos": "bos"}
"""Names of arguments of the calibration text, with their keys in `data` of the provenance."""


@dataclass(frozen=True)
class FinishedTrial:
    """The content of `run.json`."""

    run: Trial
    machine: str
    config: dict[str, Any]  # by dotted key, defaults included
    inputs: dict[str, str]  # digests of the files that the run read; see `running.digests`

    def save(self, directory: Path) -> None:
        """Write `run.json` into a directory."""
        content = {"format_version": _FORMAT_VERSION, **asdict(self)}
        save_ours(directory / TRIAL, as_json(content))

    @classmethod
    def load(cls, path: Path) -> "FinishedTrial":
        """Read a `run.json`; raise a FormatError if it is damaged, or of a newer version."""
        return read_as(cls, path, "make the run again", _FORMAT_VERSION)


@dataclass(frozen=True, eq=False)
class RunDirectory:
    """A directory with `pruning_report.json`, `evaluation.json`, or both.

    Attributes:
        directory: The path of the directory.
        name: The name for a reader: the path relative to the searched directory or the sweep's.
        report: The report of the pruning; `None` for a dense model.
        evaluation: The scores of the model; empty if nothing was measured.
        finished: The content of `run.json`, if a sweep made the run.
        exported: The format of the weights in `export_report.json`, if there is one.
        weight_bytes: Size of the safetensors files, if there are any.
    """

    directory: Path
    name: str
    report: PruningReport | None
    evaluation: Evaluation
    finished: FinishedTrial | None = None
    exported: str | None = None
    weight_bytes: int | None = None

    @cached_property
    def trial(self) -> Trial:
        """The trial of the run: of its sweep, or as its report describes it."""
        if self.finished:
            return self.finished.run
        return Trial.of_report(self.report.config) if self.report else Trial("")

    @property
    def layers(self) -> Sequence[LayerReport]:
        """All layers, pruned and left dense."""
        return self.report.layers if self.report else []

    @property
    def pruned_layers(self) -> Sequence[LayerReport]:
        """The pruned layers, in the order in which they were pruned."""
        return self.report.pruned if self.report else []

    @property
    def config(self) -> Mapping[str, Any]:
        """The arguments of the pruning, and of its calibration text but for the seed."""
        if self.report is None:
            return {}
        data: Mapping[str, Any] = self.report.provenance.get("data") or {}
        calibration = {name: data[key] for name, key in CALIBRATION.items() if key in data}
        return {**self.report.config, **calibration}

    @property
    def complete(self) -> bool:
        """Whether the pruning finished; true of a dense model."""
        return self.report is None or self.report.complete


def common_parent(directories: Sequence[Path]) -> Path:
    """Return the nearest directory that is, or contains, all of the directories."""
    if len(directories) == 1:
        return directories[0]
    return Path(os.path.commonpath([directory.resolve() for directory in directories]))


def find_runs(*roots: Path) -> list[RunDirectory]:
    """Return the runs in and below directories, dense ones first, sorted by setting and method.

    Hidden directories are skipped.

    Raises:
        FileNotFoundError: One of the directories does not exist, or holds no run.
        FormatError: A file of a run is damaged, or of a newer version of mrp-lightning.
    """
    parent = common_parent(roots)
    paths: set[Path] = set()
    for root in roots:
        if not root.is_dir():
            raise FileNotFoundError(f"`RUN_DIR`: {root} is no directory.")
        names = (report.NAME, records.NAME)
        # Hidden directories hold incomplete runs.
        runs_beneath = {file.parent for file in visible_files(root) if file.name in names}
        if not runs_beneath:
            raise FileNotFoundError(
                f"`RUN_DIR`: no {report.NAME} and no {records.NAME} in {root} or beneath it. A run "
                "with `save_dir` writes the first, `zeroshot` and `test` the second."
            )
        # Several roots may overlap. Their paths are resolved, so that each run counts once.
        paths |= {run if len(roots) == 1 else run.resolve() for run in runs_beneath}
    runs = [read_run(directory, _name(directory, parent)) for directory in sorted(paths)]
    return sorted(runs, key=_rank)


def read_run(directory: Path, name: str) -> RunDirectory:
    """Read one run; raise a FormatError if a file is damaged, or of a newer version."""
    pruned, scores, trial = (directory / name for name in (report.NAME, records.NAME, TRIAL))
    exported = None
    if (directory / _EXPORT).is_file():
        exported = str(read_json(directory / _EXPORT, "export again").get("format"))
    pruning = PruningReport.load(pruned) if pruned.is_file() else None
    # A model with a smaller vocabulary is dense: its report has no figures of a pruning.
    if pruning is not None and is_of_vocabulary_alone(pruning.config):
        pruning = None
    return RunDirectory(
        directory=directory,
        name=name,
        report=pruning,
        evaluation=records.read(directory) if scores.is_file() else Evaluation(),
        finished=FinishedTrial.load(trial) if trial.is_file() else None,
        exported=exported,
        weight_bytes=sum(f.stat().st_size for f in directory.glob("*.safetensors")) or None,
    )


def _name(directory: Path, root: Path) -> str:
    relative = directory.relative_to(root).as_posix()
    return directory.resolve().name if relative == "." else relative


def _rank(run: RunDirectory) -> tuple[Any, ...]:
    trial = run.trial
    if trial.method is None:
        return (0.0,)
    setting = (trial.sparsity, ":" in trial.setting, trial.setting)
    method = (method_rank(trial.method), trial.recipe or "")
    return *setting, *method, not run.complete, run.exported or ""
