"""Runs grouped by model, and within a model by configuration: which ones are compared."""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isclose
from pathlib import Path
from typing import Any

from mrp_lightning.experiments.runs import CALIBRATION, RunDirectory
from mrp_lightning.experiments.trials import Trial, has_blocks
from mrp_lightning.records import report
from mrp_lightning.records.evaluation import Evaluation, Scores

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
        base = near[0] if len(near) == 1 else None
        doubts = []
        if len(near) > 1:
            names = ", ".join(candidate.name for candidate in near)
            doubts = [f"Several dense models are as near ({names}): there is no “before”."]
        elif base and sum(nearest[other[0]] == near for other in clusters) > 1:
            several = "runs of several models, or on several texts or tasks of one name"
            doubts = [f"{base.name} stands beside {several}: there is no “before”."]
            base = None
        elif base and not _same_texts(base, cluster[0]):
            doubts = [f"{base.name} was evaluated on other texts or tasks: there is no “before”."]
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
    """Yield models; to a name that several have, that of the model's first run is added."""
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
    """Return whether a run is of a cluster's model: by name in sweeps, else by texts and layers."""
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
    """Return whether texts and tasks of one name have one content and the same dense perplexity.

    Two finetunings of one model have equal shapes, and two files called test.txt one name.
    """
    first, second = run.evaluation, other.evaluation
    texts = list(_of_one_size(first.perplexity, second.perplexity, "windows"))
    tasks = list(_of_one_size(first.zeroshot, second.zeroshot, "samples", "num_fewshot"))
    for _, scores in [*texts, *tasks]:
        checksums = {of["checksum"] for of in scores if of.get("checksum") is not None}
        if len(checksums) > 1:
            return False
    for text, _ in texts:
        dense = [each.dense.get(text, {}).get("perplexity") for each in (first, second)]
        if dense[0] and dense[1] and not isclose(dense[0], dense[1], rel_tol=_ROUNDING):
            return False
    return True


def _of_one_size(
    first: Mapping[str, Scores], second: Mapping[str, Scores], *sizes: str
) -> Iterator[tuple[str, tuple[Scores, Scores]]]:
    """Yield the scores of each text or task that two runs share, measured on as many samples.

    Other sizes are a note of the page: one measurement may be on the start of the other's text.
    """
    for name in first.keys() & second.keys():
        if all(first[name].get(size) == second[name].get(size) for size in sizes):
            yield name, (first[name], second[name])


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
        left_out = (_BASE_MODEL, *CALIBRATION) if run.finished else ()
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
    left_out = {*_NO_LABEL, *((_BASE_MODEL, *CALIBRATION) if run.finished else [])}
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
