"""Runs that can be compared: models, and the variants of each, which are runs of one configuration.

Runs of one configuration differ in what is not in it, such as the seed of the calibration data.
Incomplete runs are variants of their own: means over other layers are not comparable.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from mrp_lightning.experiments.methods import canonical_method, method_label, method_rank
from mrp_lightning.experiments.page.layers import Block, in_order, place
from mrp_lightning.experiments.runs import Run
from mrp_lightning.records.report import NAME
from mrp_lightning.records.rows import LayerReport
from mrp_lightning.solver.patterns import Pattern, SemiStructured, make_pattern


@dataclass(frozen=True, eq=False)
class Variant:
    """Runs of one configuration.

    Attributes:
        runs: At least one.
        varied: What of the configuration tells it from the model's other variants.
    """

    runs: Sequence[Run]
    varied: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration of its runs."""
        return self.runs[0].config

    @property
    def method(self) -> str:
        """The canonical name."""
        return canonical_method(str(self.config.get("method")))

    @property
    def pattern(self) -> Pattern:
        """What was pruned to."""
        return make_pattern(self.config.get("sparsity"), self.config.get("pattern"))

    @property
    def setting(self) -> str:
        """What was pruned to: `2:4`, `50%`."""
        return str(self.pattern)

    @property
    def method_name(self) -> str:
        """The recipe, or what the method is called in the field."""
        return recipe_of(self.runs[0]) or method_label(self.method)

    @property
    def label(self) -> str:
        """Recipe or method, and what else tells it from variants with the same setting."""
        more = [f"{key} {_plain(value)}" for key, value in self.varied.items()]
        run = self.runs[0]
        more += [run.exported] if run.exported else []
        more += [] if run.complete else ["incomplete"]
        return ", ".join([self.method_name, *more])


@dataclass(frozen=True, eq=False)
class Model:
    """A dense model, and what it was pruned to.

    Attributes:
        name: What the model is called.
        dense: Its evaluation before pruning, if there is one.
        variants: By setting, then by method.
        doubts: What could not be told from the directories.
    """

    name: str
    dense: Run | None
    variants: Sequence[Variant]
    doubts: Sequence[str] = ()

    @cached_property
    def originals(self) -> list[Variant]:
        """The variants without the copies of a run in another format."""
        seen: set[bytes] = set()
        kept = []
        for variant in sorted(self.variants, key=lambda v: v.runs[0].exported is not None):
            reports = {run.files[NAME] for run in variant.runs}
            if not reports <= seen:
                kept.append(variant)
            seen |= reports
        return [variant for variant in self.variants if variant in kept]

    @property
    def runs(self) -> list[Run]:
        """All runs, the dense one first."""
        pruned = [run for variant in self.variants for run in variant.runs]
        return [*self.before, *pruned]

    @property
    def before(self) -> list[Run]:
        """The dense run, if there is one."""
        return [self.dense] if self.dense else []

    @cached_property
    def blocks(self) -> list[Block]:
        """The blocks of all layers, in order."""
        return in_order(place(layer.name).block for layer in self._layers())

    @cached_property
    def kinds(self) -> list[str]:
        """Names of layers within their blocks, in the order in which they are pruned."""
        return list(dict.fromkeys(place(layer.name).kind for layer in self._layers()))

    def _layers(self) -> Iterator[LayerReport]:
        runs = [run for variant in self.originals for run in variant.runs]
        for run in runs:
            yield from run.pruned
        for run in runs:
            yield from run.layers


def recipe_of(run: Run) -> str | None:
    """What the sweep that made a run calls its method and options; `None` for a method alone."""
    return run.finished.trial.recipe if run.finished else None


def by_setting(variants: Iterable[Variant]) -> dict[str, list[Variant]]:
    """The variants of each setting."""
    found: dict[str, list[Variant]] = {}
    for variant in variants:
        found.setdefault(variant.setting, []).append(variant)
    return found


def find_models(runs: Sequence[Run]) -> list[Model]:
    """Sort runs into models: those with the same dense run, whose layers agree in their shapes.

    The dense run of a pruned one is that beside it, or the nearest one further up. Where there is
    none, models are told apart by their directories.
    """
    dense = [run for run in runs if run.report is None]
    nearest = {
        run: _nearest(run, [candidate for candidate in dense if _may_be_base(candidate, run)])
        for run in runs
        if run.report is not None
    }
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
        name = _model_name(group, before, alone=len(groups) == 1)
        models.append(Model(name, before, _variants(group), doubts))
    # Dense models that are not pruned yet.
    taken = {candidate for near in nearest.values() for candidate in near}
    rest = [run for run in dense if run not in taken and not (groups and run.is_beside)]
    return [*models, *(Model(_dense_name(run), run, []) for run in rest)]


def _home(run: Run) -> Path:
    return run.directory.absolute().parent


def _nearest(run: Run, dense: Sequence[Run]) -> tuple[Run, ...]:
    """The dense runs that are nearest; one called `dense` before others."""
    for parent in run.directory.absolute().parents:
        near = [candidate for candidate in dense if _home(candidate) == parent]
        if near:
            return tuple([c for c in near if c.directory.name == "dense"] or near)
    return ()


def _may_be_base(dense: Run, run: Run) -> bool:
    """Whether a run may be of this dense model, by what both say that they were loaded from."""
    sources = [dense.evaluation.model, run.config.get("base_model")]
    if None in sources or sources[0] == sources[1]:
        return True
    paths = [Path(str(source)) for source in sources]
    return all(path.exists() for path in paths) and paths[0].samefile(paths[1])


def _agree(run: Run, group: Sequence[Run]) -> bool:
    """Runs may have pruned different layers of one model, but not layers of different shapes."""
    mine = {layer.name: layer.shape for layer in run.layers}
    for other in group:
        shared = [layer for layer in other.layers if layer.name in mine]
        if shared:
            return all(mine[layer.name] == layer.shape for layer in shared)
    return False


def _model_name(group: Sequence[Run], dense: Run | None, *, alone: bool) -> str:
    if dense is not None and dense.evaluation.model:
        return _dense_name(dense)
    if alone and len(group) == 1:
        return group[0].directory.resolve().name
    return group[0].directory.resolve().parent.name


def _dense_name(run: Run) -> str:
    """A hub id as it is, a directory by its last part."""
    source = run.evaluation.model
    if not source:
        return run.directory.resolve().name
    return Path(source).name if Path(source).is_absolute() or source.count("/") > 1 else source


def _variants(runs: Sequence[Run]) -> list[Variant]:
    groups: dict[str | None, dict[str, list[Run]]] = {}
    for run in runs:
        recipe = recipe_of(run)
        key = json.dumps([recipe, run.complete, run.exported, run.config], sort_keys=True)
        groups.setdefault(recipe, {}).setdefault(key, []).append(run)
    variants = [
        variant for of_recipe in groups.values() for variant in _told_apart(of_recipe.values())
    ]
    return sorted(variants, key=_order)


def _told_apart(groups: Collection[list[Run]]) -> list[Variant]:
    """Variants of one recipe, or of none, by what differs in their configurations."""
    apart = {"method", "pattern", "sparsity"}
    keys = dict.fromkeys(key for group in groups for key in group[0].config if key not in apart)
    varied = [
        key
        for key in keys
        if len({_plain(group[0].config.get(key)) for group in groups}) > 1
        and key != "walk"  # what the run found out, and was not told
    ]
    return [Variant(g, {key: g[0].config.get(key) for key in varied}) for g in groups]


def _order(variant: Variant) -> tuple[Any, ...]:
    semi = isinstance(variant.pattern, SemiStructured)
    exported = variant.runs[0].exported or ""
    settings = (variant.pattern.sparsity, semi, variant.setting)
    return *settings, method_rank(variant.method), exported, variant.label


def _plain(value: Any) -> str:
    """A value of the configuration as YAML would have it."""
    return value if isinstance(value, str) else json.dumps(value)
