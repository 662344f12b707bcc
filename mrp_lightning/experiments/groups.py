"""Runs grouped by model, and within a model by configuration: which ones are compared."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isclose
from pathlib import Path
from typing import Any

from mrp_lightning.experiments.runs import CALIBRATION, RunDirectory
from mrp_lightning.experiments.trials import Trial, has_blocks
from mrp_lightning.records.evaluation import Evaluation

_BASE_MODEL = "base_model"
"""The argument with the source of the model; sweeps have their own names of models."""

_NO_LABEL = ("method", "pattern", "sparsity", "bits", "walk")
"""Keys of a report's configuration that the setting includes, or that a run adds by itself."""

_ROUNDING = 2e-3
"""The largest relative difference of one model's perplexities between threads, kernels, devices."""


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
        dense: The run of the dense model, or a stand-in with the scores that pruned runs recorded
            of it; `None` without either.
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
        seen: set[str] = set()
        copies = set()
        # A copy has the report of its original. Originals come first, so that the copies are the
        # ones that are left out.
        for group in sorted(self.groups, key=lambda g: g.runs[0].exported is not None):
            reports = {json.dumps(run.report.to_dict()) for run in group.runs if run.report}
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
    Without dense runs, models are distinguished by the directories that hold their runs. The runs
    of a sweep name their model. Runs that were evaluated on different texts or tasks of one name
    are not compared. Dense runs without a pruned one come last, each as a model; if any run is
    pruned, those from next to the root (`../NAME`) are left out.
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
        rivals = sum(nearest[other[0]] == near for other in clusters)
        base, doubt = _base_of(cluster, near, rivals)
        name = _model_name(cluster, base, alone=len(clusters) == 1)
        models.append(ModelRuns(name, base, _groups(cluster), [doubt] if doubt else []))
    names = Counter(model.name for model in models)
    models = [
        replace(model, name=f"{model.name}, {model.groups[0].runs[0].name}")
        if names[model.name] > 1
        else model
        for model in models
    ]
    used = {candidate for near in nearest.values() for candidate in near}
    alone = [run for run in dense if run not in used]
    alone = [run for run in alone if not (clusters and run.name.startswith("../"))]
    return [*models, *(ModelRuns(_dense_name(run), run, []) for run in alone)]


def _home(run: RunDirectory) -> Path:
    return run.directory.absolute().parent


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
    first, second = dense.evaluation.model, run.config.get(_BASE_MODEL)
    if None in (first, second) or first == second:
        return True
    paths = Path(str(first)), Path(str(second))
    return all(path.exists() for path in paths) and paths[0].samefile(paths[1])


def _base_of(
    cluster: Sequence[RunDirectory], near: Sequence[RunDirectory], rivals: int
) -> tuple[RunDirectory | None, str]:
    """Return the dense run of a cluster, and why there is none; `rivals` have the same nearest."""
    if len(near) > 1:
        names = ", ".join(candidate.name for candidate in near)
        return None, f"Several dense models are as near ({names}): there is no “before”."
    if not near:
        return _dense_scores_of(cluster), ""
    (base,) = near
    if rivals > 1:
        several = "runs of several models, or on several texts or tasks of one name"
        return None, f"{base.name} stands beside {several}: there is no “before”."
    if not _same_texts(base, cluster[0]):
        return None, f"{base.name} was evaluated on other texts or tasks: there is no “before”."
    return base, ""


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


def _agree(run: RunDirectory, cluster: Sequence[RunDirectory]) -> bool:
    """Return whether a run is of a cluster's model: by name in sweeps, else by texts and layers."""
    if run.finished and cluster[0].finished:
        return run.trial.model == cluster[0].trial.model
    # Runs may prune different layers, so that only shared ones can disagree.
    shapes = {layer.name: layer.shape for other in cluster for layer in other.layers}
    shared = [layer for layer in run.layers if layer.name in shapes]
    is_same = bool(shared) and all(shapes[layer.name] == layer.shape for layer in shared)
    return is_same and all(_same_texts(run, other) for other in cluster)


def _same_texts(run: RunDirectory, other: RunDirectory) -> bool:
    """Return whether texts and tasks of one name have one content and the same dense perplexity.

    Two finetunings of one model have equal shapes, and two files called test.txt one name. Other
    numbers of windows or samples are a note of the page: one may be the start of the other's text.
    """
    first, second = run.evaluation, other.evaluation
    kinds = [
        (first.perplexity, second.perplexity, ("windows",)),
        (first.zeroshot, second.zeroshot, ("samples", "num_fewshot")),
    ]
    for scores, others, sizes in kinds:
        for name in scores.keys() & others.keys():
            pair = scores[name], others[name]
            if any(pair[0].get(size) != pair[1].get(size) for size in sizes):
                continue
            if len({of["checksum"] for of in pair if of.get("checksum") is not None}) > 1:
                return False
            dense = [each.dense.get(name, {}).get("perplexity") for each in (first, second)]
            if dense[0] and dense[1] and not isclose(dense[0], dense[1], rel_tol=_ROUNDING):
                return False
    return True


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
    for run in runs:
        key = [run.trial.recipe, str(run.trial.changed), run.complete, run.exported, _config(run)]
        groups.setdefault(json.dumps(key, sort_keys=True), []).append(run)
    members = list(groups.values())
    labels = []
    for of in members:
        # Options that differ among the groups of one recipe are in the label.
        trial = of[0].trial
        alike = [
            _options(other[0])
            for other in members
            if (other[0].trial.recipe, other[0].trial.changed) == (trial.recipe, trial.changed)
        ]
        values = {key: {one[key] for one in alike if key in one} for one in alike for key in one}
        own = _options(of[0])
        labels.append(_label(of[0], [f"{k} {own[k]}" for k in own if len(values[k]) > 1]))
    # A label has to be unique within its setting, as tables and pictures use it as a key; labels
    # omit options that a run lacks.
    names = Counter((of[0].trial.setting, label) for of, label in zip(members, labels, strict=True))
    return [
        RunGroup(of, f"{label} ({of[0].name})" if names[of[0].trial.setting, label] > 1 else label)
        for of, label in zip(members, labels, strict=True)
    ]


def _config(run: RunDirectory) -> dict[str, Any]:
    """Return the arguments of a run; a sweep has its own models, and refuses runs of other data."""
    left_out = (_BASE_MODEL, *CALIBRATION) if run.finished else ()
    return {key: value for key, value in run.config.items() if key not in left_out}


def _options(run: RunDirectory) -> dict[str, str]:
    """Return the arguments that may distinguish a run from others of the same setting."""
    left_out = {*_NO_LABEL, *(() if has_blocks(str(run.trial.method)) else ("block_size",))}
    return {key: plain(value) for key, value in _config(run).items() if key not in left_out}


def _label(run: RunDirectory, options: Sequence[str]) -> str:
    changed = run.trial.changed
    parts = [run.trial.label]
    parts += [f"{changed.option} {changed.value_text}"] if changed else []
    parts += [*options, *([run.exported] if run.exported else [])]
    parts += [] if run.complete else ["incomplete"]
    return ", ".join(parts)


def plain(value: Any) -> str:
    """Return a value of the configuration as YAML writes it."""
    return value if isinstance(value, str) else json.dumps(value)
