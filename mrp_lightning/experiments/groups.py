"""Runs grouped by model, and within a model by configuration: which ones are compared."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mrp_lightning.experiments.runs import CALIBRATION, RunDirectory
from mrp_lightning.experiments.trials import Trial, has_blocks
from mrp_lightning.records.evaluation import Evaluation

_BASE_MODEL = "base_model"
"""The argument with the source of the model; sweeps have their own names of models."""

_NO_LABEL = ("method", "pattern", "sparsity", "bits", "walk")
"""Keys of a report's configuration that the setting includes, or that a run adds by itself."""


@dataclass(frozen=True, eq=False)
class RunGroup:
    """The runs of one configuration, which differ only in the seed of their calibration set.

    An incomplete run is a group of its own, since means over fewer layers are not comparable; so is
    a copy of a run in another format. The label is the recipe or method, with the options by which
    it differs from groups of the same setting.
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
        dense: The run of the dense model, or a stand-in with the scores that pruned runs recorded
            of it; `None` without either.
        doubts: Ambiguities of the directories, each a sentence.
    """

    name: str
    dense: RunDirectory | None
    groups: Sequence[RunGroup]
    doubts: Sequence[str] = ()

    @cached_property
    def originals(self) -> list[RunGroup]:
        """The groups without copies of a run in another format."""
        return [group for group in self.groups if not group.runs[0].exported] or [*self.groups]

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
    """Group runs by model, the pruned ones first.

    The runs of a sweep name their model. Others are of one model if they were pruned from the same
    source, their layers have equal shapes, and they were evaluated on no different texts or tasks
    of one name. The dense run of a model has its source, too; if there is but one model, a run of
    an unknown source will do. Each of the other dense runs is a model of its own.
    """
    dense = [run for run in runs if run.report is None]
    clusters: list[list[RunDirectory]] = []
    for run in runs:
        if run.report is None:
            continue
        for cluster in clusters:
            if _source(cluster[0]) == _source(run) and _agree(run, cluster):
                cluster.append(run)
                break
        else:
            clusters.append([run])
    models, used = [], set()
    for cluster in clusters:
        candidates = [run for run in dense if _may_be_base(run, cluster, len(clusters) == 1)]
        used.update(candidates)
        base, doubt = _base_of(cluster, candidates)
        models.append(ModelRuns(_name(cluster), base, _groups(cluster), [doubt] if doubt else []))
    names = Counter(model.name for model in models)
    models = [
        replace(model, name=f"{model.name}, {model.groups[0].runs[0].name}")
        if names[model.name] > 1
        else model
        for model in models
    ]
    return [*models, *(ModelRuns(_name([run]), run, []) for run in dense if run not in used)]


_UNKNOWN = ("", "")


def _source(run: RunDirectory) -> tuple[str, str]:
    """Return the directory of a run's sweep and the model there; without a sweep "" and the source.

    The source is a hub id or a path, and empty where it is not known.
    """
    if run.finished:
        trial = run.trial
        return str(run.directory.absolute().parents[len(trial.directory.parts) - 1]), trial.model
    source = str((run.config.get(_BASE_MODEL) if run.report else run.evaluation.model) or "")
    return "", str(Path(source).resolve()) if source and Path(source).exists() else source


def _may_be_base(dense: RunDirectory, cluster: Sequence[RunDirectory], is_alone: bool) -> bool:
    """Return whether a dense run may be that of a cluster: of its source, as far as it is known."""
    sources = _source(dense), _source(cluster[0])
    if _UNKNOWN in sources:
        return is_alone
    return sources[0] == sources[1]


def _base_of(
    cluster: Sequence[RunDirectory], candidates: Sequence[RunDirectory]
) -> tuple[RunDirectory | None, str]:
    """Return the dense run of a cluster among those of its source, or why there is none."""
    comparable = [run for run in candidates if _same_texts(run, cluster[0])]
    comparable = [run for run in comparable if run.directory.name == "dense"] or comparable
    if len(comparable) == 1:
        return comparable[0], ""
    if recorded := _dense_scores_of(cluster):
        return recorded, ""
    names = ", ".join(run.name for run in comparable or candidates)
    if comparable:
        return None, f"Several runs may be of the dense model ({names}): there is no “before”."
    other = f"{names} was evaluated on other texts or tasks: there is no “before”."
    return None, other if candidates else ""


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
    """Return whether a run of a cluster's source is of its model, by texts and layers."""
    if run.finished:
        return True
    # Runs may prune different layers, so that only shared ones can disagree.
    shapes = {layer.name: layer.shape for other in cluster for layer in other.layers}
    shared = [layer for layer in run.layers if layer.name in shapes]
    is_same = bool(shared) and all(shapes[layer.name] == layer.shape for layer in shared)
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
    _, source = _source(runs[0])
    if source:
        is_path = Path(source).is_absolute() or source.count("/") > 1
        return Path(source).name if is_path and not runs[0].finished else source
    directory = runs[0].directory.resolve()
    return directory.name if len(runs) == 1 else directory.parent.name


def _groups(runs: Sequence[RunDirectory]) -> list[RunGroup]:
    """Return the groups of a model, in the order of their first runs."""
    groups: dict[str, list[RunDirectory]] = {}
    for run in runs:
        key = [run.trial.recipe, str(run.trial.changed), run.complete, run.exported, _config(run)]
        groups.setdefault(json.dumps(key, sort_keys=True), []).append(run)
    labels = {key: _label(of[0], runs) for key, of in groups.items()}
    # A label has to be unique within its setting, as tables and pictures use it as a key.
    names = Counter((of[0].trial.setting, labels[key]) for key, of in groups.items())
    return [
        RunGroup(of, f"{label} ({of[0].name})" if names[of[0].trial.setting, label] > 1 else label)
        for label, of in zip(labels.values(), groups.values(), strict=True)
    ]


def _label(run: RunDirectory, runs: Sequence[RunDirectory]) -> str:
    """Return the recipe or method of a run, and what distinguishes it from others of that."""
    trial, own = run.trial, _options(run)
    same = (trial.recipe, trial.changed)
    alike = [_options(x) for x in runs if (x.trial.recipe, x.trial.changed) == same]
    parts = [trial.label]
    parts += [f"{trial.changed.option} {trial.changed.value_text}"] if trial.changed else []
    parts += [f"{key} {own[key]}" for key in own if len({x[key] for x in alike if key in x}) > 1]
    parts += [run.exported or "", "" if run.complete else "incomplete"]
    return ", ".join(filter(None, parts))


def _config(run: RunDirectory) -> dict[str, Any]:
    """Return the arguments of a run; a sweep has its own models, and refuses runs of other data."""
    left_out = (_BASE_MODEL, *CALIBRATION) if run.finished else ()
    return {key: value for key, value in run.config.items() if key not in left_out}


def _options(run: RunDirectory) -> dict[str, str]:
    """Return the arguments that may distinguish a run from others of the same setting."""
    left_out = {*_NO_LABEL, *(() if has_blocks(str(run.trial.method)) else ("block_size",))}
    return {key: plain(value) for key, value in _config(run).items() if key not in left_out}


def plain(value: Any) -> str:
    """Return a value of the configuration as YAML writes it."""
    return value if isinstance(value, str) else json.dumps(value)
