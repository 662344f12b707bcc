"""Finding runs on disk and reading what they say: the one reader that tables and pages share."""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from mrp_lightning.errors import FormatError
from mrp_lightning.experiments.trials import Trial, method_rank
from mrp_lightning.files import save_ours
from mrp_lightning.journal.journal import find_journal, unfinished_report
from mrp_lightning.json_files import as_json, read_as, read_json
from mrp_lightning.records import evaluation as records
from mrp_lightning.records import report
from mrp_lightning.records.evaluation import Evaluation
from mrp_lightning.records.report import LayerReport, PruningReport

log = logging.getLogger(__name__)

EXPORT = "export_report.json"
TRIAL = "run.json"
"""Written last by a sweep: a directory that has it holds a finished run."""

_FORMAT_VERSION = 1


@dataclass(frozen=True)
class FinishedTrial:
    """The content of `run.json`: what a sweep did in a directory.

    Attributes:
        trial: Which of its trials it was.
        machine: What it was made on.
        config: The configuration by dotted key, defaults included.
    """

    trial: Trial
    machine: str
    config: Mapping[str, Any]

    def save(self, directory: Path) -> None:
        """Write `run.json` into a directory."""
        content = {
            "format_version": _FORMAT_VERSION,
            "run": self.trial.to_dict(),
            "machine": self.machine,
            "config": self.config,
        }
        save_ours(directory / TRIAL, as_json(content))

    @classmethod
    def load(cls, path: Path) -> "FinishedTrial":
        """Read a `run.json`.

        Raises:
            FormatError: It is damaged, or of a newer version of mrp-lightning.
        """
        found = read_as(_Content, path, "make the run again", _FORMAT_VERSION)
        trial = Trial.from_dict(found.run, f"`run` of {path}")
        return cls(trial, found.machine, found.config)


@dataclass(kw_only=True)
class _Content:
    """The content of `run.json`."""

    run: dict[str, Any]
    machine: str
    config: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Run:
    """A directory with `pruning_report.json`, `evaluation.json`, or both.

    Attributes:
        directory: Where it lies.
        name: Its path from the directory that was searched.
        report: What was pruned; `None` for a dense model.
        evaluation: What the model can do; empty where that was not measured.
        finished: What a sweep says of it, if a sweep made the run.
        exported: What `export_report.json` calls the format of the weights, if there is one.
        weight_bytes: Size of the safetensors files in bytes; `None` where there are none.
        files: The files that the page keeps as raw data, by name.
        unfinished: How far a run is that has left a journal, `None` for all others.
    """

    directory: Path
    name: str
    report: PruningReport | None
    evaluation: Evaluation
    finished: FinishedTrial | None = None
    exported: str | None = None
    weight_bytes: int | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    unfinished: str | None = None

    @cached_property
    def trial(self) -> Trial:
        """The trial of its sweep, or what its report tells of one."""
        if self.finished:
            return self.finished.trial
        return Trial.of_report(self.report.config) if self.report else Trial("")

    @property
    def layers(self) -> Sequence[LayerReport]:
        """All layers, pruned and left dense."""
        return self.report.layers if self.report else []

    @property
    def pruned(self) -> Sequence[LayerReport]:
        """The pruned layers, in the order in which they were pruned."""
        return self.report.pruned if self.report else []

    @property
    def config(self) -> Mapping[str, Any]:
        """The arguments of the pruning."""
        return self.report.config if self.report else {}

    @property
    def is_beside(self) -> bool:
        """Whether it was found beside what was searched."""
        return self.name.startswith("../")

    @property
    def complete(self) -> bool:
        """Whether pruning came to its end."""
        return self.report is None or self.report.complete


def find_runs(root: Path) -> list[Run]:
    """The runs in a directory and beneath it, dense ones first, then by setting, method and name.

    Hidden directories are passed over. A journal, or the directory that an unfinished run will
    write, is that run alone. If all runs are pruned, the dense ones beside `root` are added.

    Raises:
        FileNotFoundError: There are none.
        FormatError: A file of a run is damaged, or of a newer version of mrp-lightning.
    """
    if (journal := find_journal(root)) is not None:
        return [_unfinished(journal)]
    if not root.is_dir():
        raise FileNotFoundError(f"`RUN_DIR`: {root} is no directory.")
    runs = [read_run(directory, _name(directory, root)) for directory in sorted(_below(root))]
    if not runs:
        raise FileNotFoundError(
            f"`RUN_DIR`: no {report.NAME} and no {records.NAME} in {root} or beneath it. A run "
            "with `save_dir` writes the first, `zeroshot` and `test` the second."
        )
    beside = _dense_beside(root) if all(run.report for run in runs) else ()
    return sorted([*runs, *beside], key=_rank)


def read_run(directory: Path, name: str) -> Run:
    """Read one run.

    Raises:
        FormatError: A file is damaged, or of a newer version of mrp-lightning.
    """
    names = (report.NAME, records.NAME)
    files = {n: (directory / n).read_bytes() for n in names if (directory / n).is_file()}
    trial = directory / TRIAL
    exported = None
    if (directory / EXPORT).is_file():
        exported = str(read_json(directory / EXPORT, "export again").get("format"))
    weights = [file.stat().st_size for file in directory.glob("*.safetensors")]
    return Run(
        directory=directory,
        name=name,
        report=PruningReport.load(directory / report.NAME) if report.NAME in files else None,
        evaluation=records.read(directory) if records.NAME in files else Evaluation(),
        finished=FinishedTrial.load(trial) if trial.is_file() else None,
        exported=exported,
        weight_bytes=sum(weights) or None,
        files=files,
    )


def _unfinished(journal: Path) -> Run:
    found, progress = unfinished_report(journal)
    return Run(
        directory=journal,
        name=journal.resolve().name.removeprefix(".").removesuffix(".partial"),
        report=found,
        evaluation=Evaluation(),
        files={report.NAME: as_json(found.to_dict()).encode()},
        unfinished=progress,
    )


def is_dense_run(directory: Path) -> bool:
    """Whether a directory holds the evaluation of a model that is not pruned."""
    return (directory / records.NAME).is_file() and not (directory / report.NAME).exists()


def _dense_beside(root: Path) -> Iterator[Run]:
    """Dense runs beside what was asked for; the page is made without those that are damaged."""
    try:
        beside = sorted(root.absolute().parent.iterdir())
    except OSError as error:
        log.warning("Dense runs beside %s are not compared with. %s", root, error)
        return
    for directory in beside:
        try:
            if directory.is_dir() and is_dense_run(directory):
                yield read_run(directory, f"../{directory.name}")
        except (FormatError, OSError) as error:
            log.warning("%s is not compared with. %s", directory, error)


def _below(root: Path) -> Iterator[Path]:
    for where, directories, files in os.walk(root):
        directories[:] = [name for name in directories if not name.startswith(".")]
        if report.NAME in files or records.NAME in files:
            yield Path(where)


def _name(directory: Path, root: Path) -> str:
    relative = directory.relative_to(root).as_posix()
    return directory.resolve().name if relative == "." else relative


def _rank(run: Run) -> tuple[Any, ...]:
    trial = run.trial
    if trial.method is None:
        return (0.0,)
    setting = (trial.sparsity, ":" in trial.setting, trial.setting)
    method = (method_rank(trial.method), trial.recipe or "")
    return *setting, *method, not run.complete, run.exported or ""
