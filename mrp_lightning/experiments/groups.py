"""Runs grouped by model, and within a model by configuration: which ones are compared."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mrp_lightning.experiments.runs import CALIBRATION, RunDirectory
from mrp_lightning.experiments.trials import Trial
from mrp_lightning.records.evaluation import Evaluation
from mrp_lightning.records.report import was_pruned

_BASE_MODEL = "base_model"
"""The argument with the source of the model; sweeps have their own names of models."""

_NO_LABEL = {"method", "pattern", "sparsity", "bits", "walk"}
"""Keys of a report's configuration that the setting includes, or that a run adds by itself."""


@dataclass(frozen=True, eq=False)
class RunGroup:
    """The runs of one configuration, which differ only in the seed of their calibration set.

    An incomplete run is a group of its own, since means over fewer layers are not comparable; so is
    a copy of a run in another format. The label is the recipe or method, with the options by which
    it differs from groups of the same method.
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
        structure = _structure(self.runs[0])
        fewer = f" fewer {structure}" if structure else ""
        return f"{self.trial.setting}{fewer}" if self.trial.method else ""


@dataclass(frozen=True, eq=False)
class ModelRuns:
    """The dense run of a model, and its pruned runs.

    Attributes:
        dense: The run of the dense model, or a stand-in with the scores that pruned runs recorded
            of it; `None` without either.
    """

    name: str
    dense: RunDirectory | None
    groups: Sequence[RunGroup]

    @cached_property
    def originals(self) -> list[RunGroup]:
        """The groups without copies of a run in another format."""
        return [group for group in self.groups if not group.runs[0].exported] or [*self.groups]

    @cached_property
    def given(self) -> str:
        """The label of the dense model: `before`, if it was pruned in an earlier run."""
        reports = [run.report for group in self.groups for run in group.runs if run.report]
        earlier = [report.provenance.get("pruned_before", []) for report in reports]
        return "before" if any(map(was_pruned, earlier)) else "dense"

    @cached_property
    def rows(self) -> list[RunGroup]:
        """The groups of runs, after one of the dense model alone, if it was evaluated."""
        return [*([RunGroup([self.dense], self.given)] if self.dense else []), *self.groups]

    @property
    def runs(self) -> list[RunDirectory]:
        """All runs, the dense one first."""
        return [run for group in self.rows for run in group.runs]

    @property
    def settings(self) -> Counter[str]:
        """The settings of the originals, each with its number of groups."""
        return Counter(group.setting for group in self.originals)


def find_models(runs: Sequence[RunDirectory]) -> list[ModelRuns]:
    """Group runs by model, the pruned ones first.

    The runs of a sweep name their model. Others are of one model if they were pruned from the same
    source, their layers have equal shapes, and they were evaluated on no different texts or tasks
    of one name. Its dense run has its source and its texts, too, and of several the name `dense`.
    Each of the other dense runs is a model of its own.
    """
    dense = [run for run in runs if run.report is None]
    clusters: list[list[RunDirectory]] = []
    for run in runs:
        if run.report is None:
            continue
        for cluster in clusters:
            if _is_of(run, cluster):
                cluster.append(run)
                break
        else:
            clusters.append([run])
    models, used = [], []
    for cluster in clusters:
        # Models of unknown sources are distinguished by their layers, which a dense run lacks.
        is_known = len(clusters) == 1 or _source(cluster[0]) != ("", "")
        candidates = [run for run in dense if is_known and _is_of(run, cluster)]
        candidates = [run for run in candidates if run.directory.name == "dense"] or candidates
        base = candidates[0] if len(candidates) == 1 else None
        used.append(base)
        models.append(ModelRuns(_name(cluster), base or _recorded(cluster), _groups(cluster)))
    names = Counter(model.name for model in models)
    models = [
        replace(model, name=f"{model.name}, {model.groups[0].runs[0].name}")
        if names[model.name] > 1
        else model
        for model in models
    ]
    return [*models, *(ModelRuns(_name([run]), run, []) for run in dense if run not in used)]


def _source(run: RunDirectory) -> tuple[str, str]:
    """Return the directory of a run's sweep and the model there; without a sweep "" and the source.

    The source is a hub id or a path, and empty where it is not known.
    """
    if run.finished:
        trial = run.trial
        return str(run.directory.absolute().parents[len(trial.directory.parts) - 1]), trial.model
    source = str((run.config.get(_BASE_MODEL) if run.report else run.evaluation.model) or "")
    return "", str(Path(source).resolve()) if source and Path(source).exists() else source


def _recorded(cluster: Sequence[RunDirectory]) -> RunDirectory | None:
    """Return a stand-in for the dense run, from the `dense` scores that `prune` stores."""
    # Each run has those of its own text; runs of one cluster agree where they share a text.
    perplexity = {text: of for run in cluster for text, of in run.evaluation.dense.items()}
    if not perplexity:
        return None
    first = cluster[0]
    scores = Evaluation(perplexity=perplexity, model=first.config.get(_BASE_MODEL))
    return RunDirectory(first.directory, f"{first.name}, before", None, scores)


def _is_of(run: RunDirectory, cluster: Sequence[RunDirectory]) -> bool:
    """Return whether a run is of the model of a cluster, by source, texts and layers."""
    if _source(run) != _source(cluster[0]):
        return False
    if run.finished:
        return True
    # Runs may prune different layers, so that only shared ones can disagree.
    shapes = {layer.name: layer.shape for other in cluster for layer in other.layers}
    shared = [layer for layer in run.layers if layer.name in shapes]
    is_same = run.report is None or bool(shared)
    is_same &= all(shapes[layer.name] == layer.shape for layer in shared)
    return is_same and all(_same_texts(run, other) for other in cluster)


def _same_texts(run: RunDirectory, other: RunDirectory) -> bool:
    """Return whether texts and tasks of one name have one content, as far as it is known.

    Two files may be called test.txt. Texts of other numbers of windows or samples are comparable:
    one may be the start of the other, and tables name the numbers.
    """
    first, second = run.evaluation, other.evaluation
    kinds = [
        (first.perplexity, second.perplexity, ("windows",)),
        (first.zeroshot, second.zeroshot, ("samples", "num_fewshot")),
    ]
    for scores, others, sizes in kinds:
        for name in scores.keys() & others.keys():
            one, two = scores[name], others[name]
            is_comparable = all(one.get(size) == two.get(size) for size in sizes)
            if is_comparable and len({one.get("checksum"), two.get("checksum")} - {None}) > 1:
                return False
    return True


def _name(runs: Sequence[RunDirectory]) -> str:
    """Return the name of a model: in its sweep, a hub id, or the last part of a path."""
    if source := _source(runs[0])[1]:
        return Path(source).name if Path(source).is_absolute() else source
    directory = runs[0].directory.resolve()
    return directory.name if len(runs) == 1 else directory.parent.name


def _groups(runs: Sequence[RunDirectory]) -> list[RunGroup]:
    """Return the groups of a model, in the order of their first runs."""
    options = {run: _options(run) for run in runs}
    groups: dict[tuple[Any, ...], list[RunDirectory]] = {}
    for run in runs:
        key = (run.trial.setting, _label(run), *sorted(options[run].items()))
        groups.setdefault(key, []).append(run)
    run_groups = []
    for (_, label, *own), of in groups.items():
        alike = [options[run] for run in runs if _label(run) == label]
        varied = [f"{key} {x}" for key, x in own if any(x != other.get(key) for other in alike)]
        run_groups.append(RunGroup(of, ", ".join([label, *varied])))
    return run_groups


def _structure(run: RunDirectory) -> str | None:
    """Return the units that a run removed, unless a sweep names what it did."""
    return None if run.finished else run.config.get("structure")


def _label(run: RunDirectory) -> str:
    """Return the recipe or method of a run, the option that its sweep varied, and what followed."""
    changed = run.trial.changed
    varied = f"{changed.option} {changed.value_text}" if changed else None
    state = None if run.complete else "incomplete"
    # A method chooses weights and other units, no blocks.
    of_blocks = run.report is not None and "removed" in run.report.narrowed
    by = "least change of the output" if of_blocks and not run.finished else run.trial.label
    trained = None if run.report is None else run.report.provenance.get("trained")
    after = f"trained for {trained['steps']:,} steps" if trained else None
    return ", ".join(filter(None, [by, varied, after, run.exported, state]))


def _options(run: RunDirectory) -> dict[str, str]:
    """Return the arguments that may distinguish a run from others of the same setting."""
    left_out = {*_NO_LABEL}
    if run.finished:  # a sweep has its own models, and refuses runs of other data
        left_out |= {_BASE_MODEL, *CALIBRATION}
    return {key: plain(value) for key, value in run.config.items() if key not in left_out}


def plain(value: Any) -> str:
    """Return a value of the configuration as YAML writes it."""
    return value if isinstance(value, str) else json.dumps(value)
