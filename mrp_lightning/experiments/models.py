"""Runs that can be compared: models, and the results of each, the runs of one trial.

The runs of one trial have the same configuration, and differ in the seed of their calibration set.
An incomplete run is a result of its own, because means over other layers are not comparable. So is
a copy of a run in another format.
"""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mrp_lightning.experiments.runs import Run
from mrp_lightning.experiments.trials import Trial, has_blocks
from mrp_lightning.records.evaluation import Evaluation
from mrp_lightning.records.report import NAME

_TOLD_OTHERWISE = ("method", "pattern", "sparsity", "bits")
_FOUND_OUT = ("walk",)
"""Keys of a report's configuration that the run found out by itself; it was not told them."""

_BASE_MODEL = "base_model"
"""The key that says where the model was. Runs of a sweep say of which of its models they are."""


@dataclass(frozen=True, eq=False)
class Result:
    """The runs of one trial, whatever their seeds: a row of the tables, a line of the pictures.

    Attributes:
        runs: At least one.
        label: The recipe or method, and what else tells it from results of the same setting.
    """

    runs: Sequence[Run]
    label: str

    @cached_property
    def trial(self) -> Trial:
        """The trial of its runs, without a seed."""
        return replace(self.runs[0].trial, seed=None)

    @property
    def setting(self) -> str:
        """What was pruned to, such as `2:4` and `50%+4bit`; empty for the dense model."""
        return self.trial.setting if self.trial.method else ""

    @property
    def method(self) -> str | None:
        """The canonical name of the method; `None` for the dense model."""
        return self.trial.method


@dataclass(frozen=True, eq=False)
class Model:
    """A dense model, and what it was pruned to.

    Attributes:
        name: What the model is called.
        dense: Its evaluation before pruning, if there is one.
        results: In the order of the runs.
        doubts: What could not be told from the directories.
    """

    name: str
    dense: Run | None
    results: Sequence[Result]
    doubts: Sequence[str] = ()

    @cached_property
    def originals(self) -> list[Result]:
        """The results without the copies of a run in another format."""
        seen: set[bytes] = set()
        kept = []
        for result in sorted(self.results, key=lambda r: r.runs[0].exported is not None):
            reports = {run.files[NAME] for run in result.runs if NAME in run.files}
            if not reports or not reports <= seen:
                kept.append(result)
            seen |= reports
        return [result for result in self.results if result in kept]

    @cached_property
    def rows(self) -> list[Result]:
        """The dense model, if it was evaluated, and all results."""
        return [*([Result(self.before, "dense")] if self.dense else []), *self.results]

    @property
    def runs(self) -> list[Run]:
        """All runs, the dense one first."""
        return [run for result in self.rows for run in result.runs]

    @property
    def before(self) -> list[Run]:
        """The dense run, if there is one."""
        return [self.dense] if self.dense else []


def by_setting(results: Iterable[Result]) -> dict[str, list[Result]]:
    """The results of each setting."""
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(result.setting, []).append(result)
    return found


def find_models(runs: Sequence[Run]) -> list[Model]:
    """Sort runs into models: those with the same dense run, whose layers agree in their shapes.

    The dense run of a pruned one is that beside it, or the nearest one further up. Where there is
    none, models are told apart by their directories. What a sweep made is of the model that the
    sweep names.
    """
    dense = [run for run in runs if run.report is None]
    nearest = {run: _nearest(run, dense) for run in runs if run.report is not None}
    groups: list[list[Run]] = []
    for run, near in nearest.items():
        same = (g for g in groups if nearest[g[0]] == near and _agree(run, g))
        group = next((g for g in same if near or _home(g[0]) == _home(run)), None)
        if group is None:
            groups.append([run])
        else:
            group.append(run)
    models = []
    for group in groups:
        near = nearest[group[0]]
        before = near[0] if len(near) == 1 else None
        doubts = []
        if len(near) > 1:
            names = ", ".join(candidate.name for candidate in near)
            doubts = [f"Several dense models are as near ({names}): there is no “before”."]
        elif before and sum(nearest[g[0]] == near for g in groups) > 1:
            doubts = [f"{before.name} stands beside runs of several models: there is no “before”."]
            before = None
        elif not near:
            before = _as_measured_with(group)
        name = _model_name(group, before, alone=len(groups) == 1)
        models.append(Model(name, before, _results(group), doubts))
    # Dense models that are not pruned yet.
    taken = {candidate for near in nearest.values() for candidate in near}
    rest = [run for run in dense if run not in taken and not (groups and run.is_beside)]
    return [*models, *(Model(_dense_name(run), run, []) for run in rest)]


def _home(run: Run) -> Path:
    return run.directory.absolute().parent


def _as_measured_with(pruned: Sequence[Run]) -> Run | None:
    """What runs say themselves of their dense model, where none of them is it."""
    for run in pruned:
        if run.evaluation.dense:
            source = run.config.get("base_model")
            found = Evaluation(perplexity=run.evaluation.dense, model=source)
            return Run(run.directory, f"{run.name}, before", None, found)
    return None


def _nearest(run: Run, dense: Sequence[Run]) -> tuple[Run, ...]:
    """The dense runs that are nearest; one called `dense` before others."""
    candidates = [candidate for candidate in dense if _may_be_base(candidate, run)]
    for parent in run.directory.absolute().parents:
        near = [candidate for candidate in candidates if _home(candidate) == parent]
        if near:
            return tuple([c for c in near if c.directory.name == "dense"] or near)
    return ()


def _may_be_base(dense: Run, run: Run) -> bool:
    """Whether a run may be of this dense model, by what both say that they were loaded from."""
    if dense.finished and run.finished:
        return dense.trial.model == run.trial.model
    sources = [dense.evaluation.model, run.config.get(_BASE_MODEL)]
    if None in sources or sources[0] == sources[1]:
        return True
    paths = [Path(str(source)) for source in sources]
    return all(path.exists() for path in paths) and paths[0].samefile(paths[1])


def _agree(run: Run, group: Sequence[Run]) -> bool:
    """Runs may have pruned different layers of one model, but not layers of different shapes."""
    if run.finished and group[0].finished:
        return run.trial.model == group[0].trial.model
    mine = {layer.name: layer.shape for layer in run.layers}
    for other in group:
        shared = [layer for layer in other.layers if layer.name in mine]
        if shared:
            return all(mine[layer.name] == layer.shape for layer in shared)
    return False


def _model_name(group: Sequence[Run], dense: Run | None, *, alone: bool) -> str:
    if group[0].finished:
        return group[0].trial.model
    if dense is not None and dense.evaluation.model:
        return _dense_name(dense)
    directory = group[0].directory.resolve()
    return directory.name if alone and len(group) == 1 else directory.parent.name


def _dense_name(run: Run) -> str:
    """The sweep's name, a hub id as it is, a directory by its last part."""
    source = run.evaluation.model
    if run.finished or not source:
        return run.trial.model or run.directory.resolve().name
    return Path(source).name if Path(source).is_absolute() or source.count("/") > 1 else source


def _results(runs: Sequence[Run]) -> list[Result]:
    """The results of a model, in the order in which their first runs come."""
    groups: dict[str, list[Run]] = {}
    told: dict[str, list[str]] = {}  # what has the same recipe and the same changed option
    for run in runs:
        about = json.dumps([run.trial.recipe, str(run.trial.changed)])
        config = {key: value for key, value in run.config.items() if not _is_place(run, key)}
        key = about + json.dumps([run.complete, run.exported, config], sort_keys=True)
        groups.setdefault(key, []).append(run)
        told.setdefault(about, []).append(key)
    labels: dict[str, str] = {}
    for keys in told.values():
        alike = {key: groups[key][0] for key in keys}
        varied = _varied([_options(run) for run in alike.values()])
        labels |= {key: _label(run, varied) for key, run in alike.items()}
    names = Counter((found[0].trial.setting, labels[key]) for key, found in groups.items())
    for key, found in groups.items():  # options that only one of two runs has tell nothing apart
        if names[found[0].trial.setting, labels[key]] > 1:
            labels[key] += f" ({found[0].name})"
    return [Result(found, labels[key]) for key, found in groups.items()]


def _options(run: Run) -> dict[str, Any]:
    """The configuration of a run, without what tells nothing apart."""
    left_out = {*_TOLD_OTHERWISE, *_FOUND_OUT}
    left_out |= set() if has_blocks(str(run.trial.method)) else {"block_size"}
    options = {key: value for key, value in run.config.items() if key not in left_out}
    return {key: value for key, value in options.items() if not _is_place(run, key)}


def _is_place(run: Run, key: str) -> bool:
    """Whether a key of a run's configuration only says where its model was."""
    return key == _BASE_MODEL and run.finished is not None


def _varied(options: Collection[Mapping[str, Any]]) -> list[str]:
    """The options that differ among those that have them."""
    values: dict[str, set[str]] = {}
    for config in options:
        for key, value in config.items():
            values.setdefault(key, set()).add(plain(value))
    return [key for key, found in values.items() if len(found) > 1]


def _label(run: Run, varied: Sequence[str]) -> str:
    options, changed = _options(run), run.trial.changed
    more = [f"{changed.option} {changed.value_text}"] if changed else []
    more += [f"{key} {plain(options[key])}" for key in varied if key in options]
    more += [run.exported] if run.exported else []
    more += [] if run.complete else ["incomplete"]
    return ", ".join([run.trial.label, *more])


def plain(value: Any) -> str:
    """A value of the configuration as YAML would have it."""
    return value if isinstance(value, str) else json.dumps(value)
