"""Runs on disk, grouped by model, and within a model by configuration."""

import json
import logging
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isclose
from pathlib import Path
from typing import Any

from mrp_lightning.errors import FormatError, OptionError
from mrp_lightning.experiments.trials import Trial, has_blocks, method_rank
from mrp_lightning.files import save_ours
from mrp_lightning.journal.journal import find_journal, unfinished_report
from mrp_lightning.json_files import as_json, read_as, read_json
from mrp_lightning.records import evaluation as records
from mrp_lightning.records import report
from mrp_lightning.records.evaluation import Evaluation
from mrp_lightning.records.report import LayerReport, PruningReport

log = logging.getLogger(__name__)

TRIAL = "run.json"
"""The name of the file that a sweep writes last: a directory with it holds a finished run."""

_EXPORT = "export_report.json"
_FORMAT_VERSION = 1
_BASE_MODEL = "base_model"
"""The argument with the source of the model; sweeps have their own names of models."""

_CALIBRATION = {"calibration": "source", "sequence_length": "sequence_length", "bos": "bos"}
"""Arguments of the calibration text, by name: the keys in the provenance of a report."""

_NO_LABEL = ("method", "pattern", "sparsity", "bits", "walk")
"""Keys of a report's configuration that the setting includes, or that a run adds by itself."""


@dataclass(frozen=True)
class FinishedTrial:
    """The content of `run.json`.

    Attributes:
        trial: The trial of the sweep.
        machine: A description of the machine of the run.
        config: The configuration by dotted key, defaults included.
        inputs: Digests of the files that the run read, by what they are; see `inputs.digests`. None
            in a file that an earlier version wrote.
    """

    trial: Trial
    machine: str
    config: Mapping[str, Any]
    inputs: Mapping[str, str] = field(default_factory=dict)

    def save(self, directory: Path) -> None:
        """Write `run.json` into a directory."""
        content = {
            "format_version": _FORMAT_VERSION,
            "run": self.trial.to_dict(),
            "machine": self.machine,
            "config": self.config,
            "inputs": self.inputs,
        }
        save_ours(directory / TRIAL, as_json(content))

    @classmethod
    def load(cls, path: Path) -> "FinishedTrial":
        """Read a `run.json`.

        Raises:
            FormatError: The file is damaged, or of a newer version of mrp-lightning.
        """
        content = read_as(_TrialContent, path, "make the run again", _FORMAT_VERSION)
        trial = Trial.from_dict(content.run, f"`run` of {path}")
        return cls(trial, content.machine, content.config, content.inputs)


@dataclass(kw_only=True)
class _TrialContent:
    """The JSON of `run.json`."""

    run: dict[str, Any]
    machine: str
    config: dict[str, Any]
    inputs: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class RunDirectory:
    """A directory with `pruning_report.json`, `evaluation.json`, or both.

    Attributes:
        directory: The path of the directory.
        name: The path relative to the searched directory.
        report: The report of the pruning; `None` for a dense model.
        evaluation: The scores of the model; empty if nothing was measured.
        finished: The content of `run.json`, if a sweep made the run.
        exported: The format of the weights in `export_report.json`, if there is one.
        weight_bytes: Size of the safetensors files in bytes; `None` if there are none.
        files: The content of the files, by name.
        unfinished: The progress of an unfinished run with a journal, `None` for all others.
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
        """The trial of the run: of its sweep, or as its report describes it."""
        if self.finished:
            return self.finished.trial
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
        calibration = {name: data[key] for name, key in _CALIBRATION.items() if key in data}
        return {**self.report.config, **calibration}

    @property
    def complete(self) -> bool:
        """Whether the pruning finished."""
        return self.report is None or self.report.complete


def common_parent(directories: Sequence[Path]) -> Path:
    """Return the nearest directory that is, or contains, all of the directories."""
    if len(directories) == 1:
        return directories[0]
    return Path(os.path.commonpath([directory.resolve() for directory in directories]))


def find_runs(*roots: Path) -> list[RunDirectory]:
    """Return the runs in and below directories, dense ones first, sorted by setting and method.

    Hidden directories are skipped. A journal, or the directory that an unfinished run will write,
    stands for that run, which is reported alone. If all runs are pruned, dense runs next to a
    single root are added.

    Raises:
        FileNotFoundError: There are no runs.
        FormatError: A file of a run is damaged, or of a newer version of mrp-lightning.
        OptionError: One of several directories belongs to an unfinished run.
    """
    unfinished = [journal for root in roots if (journal := find_journal(root)) is not None]
    if unfinished:
        if len(roots) > 1:
            raise OptionError(
                f"{unfinished[0]} is the journal of an unfinished run, which is reported alone.",
                "RUN_DIR",
            )
        return [_unfinished(unfinished[0])]
    parent = common_parent(roots)
    paths: set[Path] = set()
    for root in roots:
        if not root.is_dir():
            raise FileNotFoundError(f"`RUN_DIR`: {root} is no directory.")
        runs_beneath = _directories_of_runs(root)
        if not runs_beneath:
            raise FileNotFoundError(
                f"`RUN_DIR`: no {report.NAME} and no {records.NAME} in {root} or beneath it. A run "
                "with `save_dir` writes the first, `zeroshot` and `test` the second."
            )
        # Several roots may overlap. Their paths are resolved, so that each run counts once.
        paths |= {path if len(roots) == 1 else path.resolve() for path in runs_beneath}
    runs = [read_run(directory, _name(directory, parent)) for directory in sorted(paths)]
    if all(run.report for run in runs) and len(roots) == 1:
        runs += _dense_next_to(roots[0])
    return sorted(runs, key=_rank)


def _directories_of_runs(root: Path) -> list[Path]:
    """Return the directories at and beneath a root that hold a run, without hidden ones."""
    directories_of_runs = []
    for path, directories, files in os.walk(root):
        # `os.walk` goes down the list that it yielded, so this very list has to change. Hidden
        # directories are journals and staging areas of runs that are not complete.
        directories[:] = [name for name in directories if not name.startswith(".")]
        if report.NAME in files or records.NAME in files:
            directories_of_runs.append(Path(path))
    return directories_of_runs


def read_run(directory: Path, name: str) -> RunDirectory:
    """Read one run.

    Raises:
        FormatError: A file is damaged, or of a newer version of mrp-lightning.
    """
    names = (report.NAME, records.NAME)
    # The bytes are kept for the archive of the page, and to recognise copies.
    files = {n: (directory / n).read_bytes() for n in names if (directory / n).is_file()}
    trial, exported = directory / TRIAL, None
    if (directory / _EXPORT).is_file():
        exported = str(read_json(directory / _EXPORT, "export again").get("format"))
    return RunDirectory(
        directory=directory,
        name=name,
        report=PruningReport.load(directory / report.NAME) if report.NAME in files else None,
        evaluation=records.read(directory) if records.NAME in files else Evaluation(),
        finished=FinishedTrial.load(trial) if trial.is_file() else None,
        exported=exported,
        weight_bytes=sum(f.stat().st_size for f in directory.glob("*.safetensors")) or None,
        files=files,
    )


def _unfinished(journal: Path) -> RunDirectory:
    content, progress = unfinished_report(journal)
    return RunDirectory(
        directory=journal,
        name=journal.resolve().name.removeprefix(".").removesuffix(".partial"),
        report=content,
        evaluation=Evaluation(),
        files={report.NAME: as_json(content.to_dict()).encode()},
        unfinished=progress,
    )


def _name(directory: Path, root: Path) -> str:
    relative = directory.relative_to(root).as_posix()
    return directory.resolve().name if relative == "." else relative


def is_dense_run(directory: Path) -> bool:
    """Return whether a directory holds the evaluation of a model that is not pruned."""
    return (directory / records.NAME).is_file() and not (directory / report.NAME).exists()


def _dense_next_to(root: Path) -> Iterator[RunDirectory]:
    """Yield the dense runs next to a directory; damaged ones are skipped with a warning."""
    try:
        siblings = sorted(root.absolute().parent.iterdir())
    except OSError as error:
        log.warning("Dense runs beside %s are not compared with. %s", root, error)
        return
    for directory in siblings:
        try:
            if directory.is_dir() and is_dense_run(directory):
                yield read_run(directory, f"../{directory.name}")
        except (FormatError, OSError) as error:
            log.warning("%s is not compared with. %s", directory, error)


def _rank(run: RunDirectory) -> tuple[Any, ...]:
    trial = run.trial
    if trial.method is None:
        return (0.0,)
    setting = (trial.sparsity, ":" in trial.setting, trial.setting)
    method = (method_rank(trial.method), trial.recipe or "")
    return *setting, *method, not run.complete, run.exported or ""


@dataclass(frozen=True, eq=False)
class RunGroup:
    """The runs of one configuration, which differ only in the seed of their calibration set.

    An incomplete run is a group of its own, since means over fewer layers are not comparable; so is
    a copy of a run in another format.

    Attributes:
        runs: The runs, at least one.
        label: The recipe or method, and the options by which it differs from groups of the same
            setting.
    """

    runs: Sequence[RunDirectory]
    label: str

    @cached_property
    def trial(self) -> Trial:
        """The trial of the runs, without a seed."""
        return replace(self.runs[0].trial, seed=None)

    @property
    def setting(self) -> str:
        """The sparsity and bits, such as `2:4` and `50%+4bit`; empty for the dense model."""
        return self.trial.setting if self.trial.method else ""

    @property
    def method(self) -> str | None:
        """The canonical name of the method; `None` for the dense model."""
        return self.trial.method


@dataclass(frozen=True, eq=False)
class ModelRuns:
    """The dense run of a model, and its pruned runs.

    Attributes:
        name: The name of the model.
        dense: The evaluation of the dense model, if there is one.
        groups: The pruned runs, in the order of the runs.
        doubts: Ambiguities of the directories, each a sentence.
    """

    name: str
    dense: RunDirectory | None
    groups: Sequence[RunGroup]
    doubts: Sequence[str] = ()

    @cached_property
    def originals(self) -> list[RunGroup]:
        """The groups without copies of a run in another format."""
        seen: set[bytes] = set()
        copies = set()
        # A copy has the report of its original, byte by byte. Originals come first, so that the
        # copies are the ones that are left out.
        for group in sorted(self.groups, key=lambda g: g.runs[0].exported is not None):
            reports = {run.files[report.NAME] for run in group.runs if report.NAME in run.files}
            if reports and reports <= seen:
                copies.add(group)
            seen |= reports
        return [group for group in self.groups if group not in copies]

    @cached_property
    def rows(self) -> list[RunGroup]:
        """The groups of runs, after one of the dense model alone, if it was evaluated."""
        return [*([RunGroup([self.dense], "dense")] if self.dense else []), *self.groups]

    @property
    def runs(self) -> list[RunDirectory]:
        """All runs, the dense one first."""
        return [run for group in self.rows for run in group.runs]

    def by_setting(self, groups: Iterable[RunGroup] | None = None) -> dict[str, list[RunGroup]]:
        """Return the groups (default: the originals) by setting."""
        by_setting: dict[str, list[RunGroup]] = {}
        for group in self.originals if groups is None else groups:
            by_setting.setdefault(group.setting, []).append(group)
        return by_setting


def find_models(runs: Sequence[RunDirectory]) -> list[ModelRuns]:
    """Group runs by model: runs of one model have the same dense run, and layers of equal shapes.

    The dense run of a pruned run is the one next to it, or the nearest one in a directory above.
    Without dense runs, models are distinguished by their directories. The runs of a sweep name
    their model. Runs that were evaluated on different texts of one name are not compared.
    """
    dense = [run for run in runs if run.report is None]
    nearest = {run: _nearest(run, dense) for run in runs if run.report is not None}
    clusters: list[list[RunDirectory]] = []
    for run, near in nearest.items():
        for cluster in clusters:
            # Equal shapes alone do not make one model: two finetunings have them. So the nearest
            # dense run, or else the directory, has to agree, too.
            is_near = nearest[cluster[0]] == near and (near or _home(cluster[0]) == _home(run))
            if is_near and _agree(run, cluster):
                cluster.append(run)
                break
        else:
            clusters.append([run])
    models = []
    for cluster in clusters:
        near = nearest[cluster[0]]
        base = near[0] if len(near) == 1 else None
        doubts = []
        if len(near) > 1:
            names = ", ".join(candidate.name for candidate in near)
            doubts = [f"Several dense models are as near ({names}): there is no “before”."]
        elif base and sum(nearest[other[0]] == near for other in clusters) > 1:
            several = "runs of several models, or evaluated on several texts of one name"
            doubts = [f"{base.name} stands beside {several}: there is no “before”."]
            base = None
        elif base and not _same_texts(base, cluster[0]):
            doubts = [f"{base.name} was evaluated on other text: there is no “before”."]
            base = None
        elif not near:
            base = _dense_scores_of(cluster)
        name = _model_name(cluster, base, alone=len(clusters) == 1)
        models.append(ModelRuns(name, base, _groups(cluster), doubts))
    models = list(_with_different_names(models))
    # Dense models without pruned runs.
    used = {candidate for near in nearest.values() for candidate in near}
    unused = [run for run in dense if run not in used]
    unused = [run for run in unused if not (clusters and run.name.startswith("../"))]
    return [*models, *(ModelRuns(_dense_name(run), run, []) for run in unused)]


def _home(run: RunDirectory) -> Path:
    return run.directory.absolute().parent


def _dense_scores_of(cluster: Sequence[RunDirectory]) -> RunDirectory | None:
    """Return a stand-in for the dense run, from the `dense` scores that `prune` stores."""
    measured = [run for run in cluster if run.evaluation.dense]
    if not measured:
        return None
    first = measured[0]
    # Each run has those of its own text; runs of one cluster agree where they share a text.
    perplexity = {text: of for run in measured for text, of in run.evaluation.dense.items()}
    scores = Evaluation(perplexity=perplexity, model=first.config.get(_BASE_MODEL))
    return RunDirectory(first.directory, f"{first.name}, before", None, scores)


def _with_different_names(models: Sequence[ModelRuns]) -> Iterator[ModelRuns]:
    """Yield models, those of one name with their first directory in it."""
    names = Counter(model.name for model in models)
    for model in models:
        alone = names[model.name] == 1 or not model.groups
        name = model.name if alone else f"{model.name}, {model.groups[0].runs[0].name}"
        yield replace(model, name=name)


def _nearest(run: RunDirectory, dense: Sequence[RunDirectory]) -> tuple[RunDirectory, ...]:
    """Return the dense runs in the nearest directory, preferably the one called `dense`."""
    candidates = [candidate for candidate in dense if _may_be_base(candidate, run)]
    for parent in run.directory.absolute().parents:
        next_to = [candidate for candidate in candidates if _home(candidate) == parent]
        if next_to:
            return tuple([c for c in next_to if c.directory.name == "dense"] or next_to)
    return ()


def _may_be_base(dense: RunDirectory, run: RunDirectory) -> bool:
    """Return whether a dense run may be the source of a pruned one: their sources do not differ."""
    if dense.finished and run.finished:
        return dense.trial.model == run.trial.model
    sources = [dense.evaluation.model, run.config.get(_BASE_MODEL)]
    if None in sources or sources[0] == sources[1]:
        return True
    paths = [Path(str(source)) for source in sources]
    return all(path.exists() for path in paths) and paths[0].samefile(paths[1])


def _agree(run: RunDirectory, cluster: Sequence[RunDirectory]) -> bool:
    """Return whether layers that a run and the cluster share have equal shapes, and texts agree."""
    if run.finished and cluster[0].finished:
        return run.trial.model == cluster[0].trial.model
    if not all(_same_texts(run, other) for other in cluster):
        return False
    shapes = {layer.name: layer.shape for layer in run.layers}
    for other in cluster:
        # Runs may prune different layers, so that only shared ones can disagree. The first run that
        # shares any decides, since all runs of a cluster agree with each other.
        if shared := [layer for layer in other.layers if layer.name in shapes]:
            return all(shapes[layer.name] == layer.shape for layer in shared)
    return False


def _same_texts(run: RunDirectory, other: RunDirectory) -> bool:
    """Return whether texts of one name have one content, and the dense model one perplexity.

    Two finetunings of one model have equal shapes, and two files called test.txt one name.
    """
    for text in run.evaluation.perplexity.keys() & other.evaluation.perplexity.keys():
        scores = [each.evaluation.perplexity[text] for each in (run, other)]
        # Numbers of windows that differ are a note of the page: one may be the start of the other.
        if scores[0].get("windows") != scores[1].get("windows"):
            continue
        checksums = {of["checksum"] for of in scores if of.get("checksum") is not None}
        dense = [each.evaluation.dense.get(text, {}).get("perplexity") for each in (run, other)]
        if len(checksums) > 1 or (
            dense[0] and dense[1] and not isclose(dense[0], dense[1], rel_tol=_ROUNDING)
        ):
            return False
    return True


_ROUNDING = 2e-3
"""Relative: perplexities of one model that differ by other threads, kernels or devices."""


def _model_name(cluster: Sequence[RunDirectory], dense: RunDirectory | None, *, alone: bool) -> str:
    if cluster[0].finished:
        return cluster[0].trial.model
    if dense is not None and dense.evaluation.model:
        return _dense_name(dense)
    directory = cluster[0].directory.resolve()
    return directory.name if alone and len(cluster) == 1 else directory.parent.name


def _dense_name(run: RunDirectory) -> str:
    """Return the name of a dense model: in its sweep, a hub id, or the last part of its path."""
    source = run.evaluation.model
    if run.finished or not source:
        return run.trial.model or run.directory.resolve().name
    return Path(source).name if Path(source).is_absolute() or source.count("/") > 1 else source


def _groups(runs: Sequence[RunDirectory]) -> list[RunGroup]:
    """Return the groups of a model, in the order of their first runs."""
    groups: dict[str, list[RunDirectory]] = {}
    alike: dict[str, list[str]] = {}  # by recipe and changed option: the keys of their groups
    for run in runs:
        recipe = json.dumps([run.trial.recipe, str(run.trial.changed)])
        # A sweep has its own names of models, and refuses runs with other data.
        left_out = (_BASE_MODEL, *_CALIBRATION) if run.finished else ()
        config = {key: value for key, value in run.config.items() if key not in left_out}
        key = recipe + json.dumps([run.complete, run.exported, config], sort_keys=True)
        if key not in groups:
            alike.setdefault(recipe, []).append(key)
        groups.setdefault(key, []).append(run)
    labels: dict[str, str] = {}
    for keys in alike.values():
        options = {key: _options(groups[key][0]) for key in keys}
        differing = _differing(options.values())
        labels |= {key: _label(groups[key][0], options[key], differing) for key in keys}
    # A label has to be unique within its setting, as tables and pictures use it as a key.
    names = Counter((members[0].trial.setting, labels[key]) for key, members in groups.items())
    for (
        key,
        members,
    ) in groups.items():  # labels omit options that a run lacks
        if names[members[0].trial.setting, labels[key]] > 1:
            labels[key] += f" ({members[0].name})"
    return [RunGroup(members, labels[key]) for key, members in groups.items()]


def _options(run: RunDirectory) -> dict[str, str]:
    """Return the arguments that may distinguish a run from others of the same setting."""
    left_out = {*_NO_LABEL, *((_BASE_MODEL, *_CALIBRATION) if run.finished else [])}
    left_out |= set() if has_blocks(str(run.trial.method)) else {"block_size"}
    return {key: plain(value) for key, value in run.config.items() if key not in left_out}


def _differing(options: Collection[Mapping[str, str]]) -> list[str]:
    """Return the options that have different values in several configurations."""
    values: dict[str, set[str]] = {}
    for config in options:
        for key, value in config.items():
            values.setdefault(key, set()).add(value)
    return [key for key, different in values.items() if len(different) > 1]


def _label(run: RunDirectory, options: Mapping[str, str], differing: Sequence[str]) -> str:
    changed = run.trial.changed
    parts = [run.trial.label]
    parts += [f"{changed.option} {changed.value_text}"] if changed else []
    parts += [f"{key} {options[key]}" for key in differing if key in options]
    parts += [run.exported] if run.exported else []
    parts += [] if run.complete else ["incomplete"]
    return ", ".join(parts)


def plain(value: Any) -> str:
    """Return a value of the configuration as YAML writes it."""
    return value if isinstance(value, str) else json.dumps(value)
