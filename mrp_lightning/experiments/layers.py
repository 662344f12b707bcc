"""The parts of a page on layers and blocks: the losses and costs of each, over all runs."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.colors import Normalize

from mrp_lightning.experiments import numbers
from mrp_lightning.experiments.numbers import Write
from mrp_lightning.experiments.pictures import (
    Part,
    Picture,
    Scale,
    common_scale,
    draw_lines,
    draw_map,
    stack_and_number,
)
from mrp_lightning.experiments.runs import ModelRuns
from mrp_lightning.experiments.scores import Table
from mrp_lightning.records.report import LayerReport
from mrp_lightning.targets.blocks import without_numbers


class _Quantity(NamedTuple):
    """A value of a layer or of a block.

    Attributes:
        key: Its name in the report.
        title: Its description, for a caption.
        scale: The axis of its pictures.
        pictures: `blocks` and `kinds` are lines over blocks and over kinds of layers, `several` is
            the first of them where there are several groups, `map` is a map of all layers.
        over: The aggregate over the layers of a block or kind: `mean`, `sum`, `max`.
        colors: From values to the colours of the map; `None` for those that fit.
    """

    key: str
    title: str
    scale: Scale
    pictures: Sequence[str]
    over: str = "mean"
    colors: Normalize | None = None


def _rounded(share: float | None) -> str:
    return numbers.percent(None if share is None else round(share, 2))


_LOSS = _Quantity(
    "relative_loss",
    "Relative loss of the layers",
    Scale("relative loss", numbers.relative_loss),
    ("blocks", "kinds", "map"),
)
_LOSS_TEXT = (
    "Mean over the calibration tokens of ‖(w + δ)x − wx‖², relative to that of ‖wx‖². In the maps "
    "a cell is a layer, or the mean of a layer of all experts; maps of one sparsity share a scale "
    "in which equal steps of colour are equal ratios. An empty cell is a layer that there is not, "
    "or that the run did not reach."
)
_SPARSITY = _Quantity(
    "sparsity",
    "Fraction of the weights removed",
    Scale("sparsity", _rounded),
    ("map",),
    colors=Normalize(0.0, 1.0),
)
_SOLVER = [
    _Quantity(key, title, Scale(name, numbers.number), ("several", "map"), over)
    for key, title, name, over in (
        ("damping", "λ that was added to the diagonal of the Hessian", "λ", "mean"),
        ("gap", "Certified distance to the optimal loss", "gap", "max"),
        ("iterations", "Iterations of the exact compensation", "iterations", "mean"),
    )
]
_SECONDS = _Quantity(
    "seconds",
    "Seconds to prune the layers",
    Scale("seconds", numbers.seconds),
    ("blocks", "kinds"),
    over="sum",
)
_MEMORY = _Quantity(
    "peak_memory",
    "Peak GPU memory of the layers",
    Scale("peak memory, GiB", numbers.memory, 2**30),
    ("kinds",),
    over="max",
)
_COST_TEXT = (
    "The first layer of those that share an input pays for preparing the Hessian. Running the "
    "model over the calibration data is not in these values; it is in the seconds of the run."
)
_PARTS: Sequence[tuple[str, str, Sequence[_Quantity]]] = (
    ("Sparsity", "", [_SPARSITY]),
    ("Damping, gap and iterations", "", _SOLVER),
    ("Time and memory", _COST_TEXT, [_SECONDS, _MEMORY]),
)
_ERROR = _Quantity(
    "error_after",
    "Error on held-out windows, after tuning",
    Scale("error", numbers.relative_loss),
    ("blocks",),
)
_ERROR_TEXT = (
    "The error is ‖y − y_d‖² / ‖y_d‖² over the windows that tuning did not see, for the "
    "outputs y of the block and y_d of the block in the dense model."
)
_IN_BLOCKS: dict[str, Write] = {
    "sparsity": numbers.percent,
    "error_before": numbers.relative_loss,
    "error_after": numbers.relative_loss,
    "epoch": numbers.count,
    "seconds": numbers.seconds,
}
_WORST = 5


class Layers:
    """The layers and blocks of a model with at least one group of runs, as two frames.

    A row is a layer, or a block, of a run: its entry in the report, with `block` (empty outside the
    blocks), `kind` (a short name in the block), `setting`, `label` and `run`.
    """

    def __init__(self, model: ModelRuns) -> None:
        self._methods = {group.label: group.method for group in model.originals}
        self._several = len(model.originals) > 1
        layers: list[dict[str, Any]] = []
        blocks: list[dict[str, Any]] = []
        for group in model.originals:
            for run in group.runs:
                origin = {"setting": group.setting, "label": group.label, "run": run.name}
                for layer in run.layers:
                    names = {"block": layer.block or "", "kind": _kind(layer)}
                    layers.append(vars(layer) | names | origin)
                for block in run.report.blocks if run.report else []:
                    blocks.append(vars(block) | {"block": block.name} | origin)
        columns = [field.name for field in fields(LayerReport)]
        self._layers = pd.DataFrame(layers, columns=[*columns, "kind", "setting", "label", "run"])
        pruned = self._layers["skipped"].isna()
        ordered = pd.concat([self._layers[pruned], self._layers])
        short = short_names(list(dict.fromkeys(ordered["kind"])))
        self._layers["kind"] = self._layers["kind"].map(short)
        self._pruned = self._layers[pruned]
        self._of_blocks = pd.DataFrame(blocks)
        self._blocks, self._kinds = _in_order(ordered["block"]), list(short.values())

    def loss_part(self) -> Part | None:
        """The losses of blocks and layers."""
        part = self._part("Where it lost", _LOSS_TEXT, [_LOSS])
        if part is None or self._several:
            return part
        losses = _held(self._pruned, _LOSS).groupby("name")["relative_loss"].mean()
        worst = losses.sort_values(ascending=False, kind="stable").head(_WORST)
        rows = [("", str(name), _LOSS.scale.write(float(loss))) for name, loss in worst.items()]
        caption = f"The {len(rows)} of {len(losses)} layers that lost most"
        return replace(part, tables=[Table.of_rows(caption, ("layer", "relative loss"), rows)])

    def other_parts(self) -> Iterator[Part]:
        """The other parts that have something to show."""
        if part := self.block_part():
            yield part
        for title, text, quantities in _PARTS:
            if part := self._part(title, text, quantities):
                yield replace(part, folded=True)

    def block_part(self) -> Part | None:
        """Tables of the blocks as wholes, in the first run of each group, if any were reported."""
        table = self._of_blocks
        if table.empty:
            return None
        columns = [key for key in _IN_BLOCKS if key in table and table[key].notna().any()]
        rows = []
        for (setting, label), of_group in table.groupby(["setting", "label"], sort=False):
            for _, block in of_group[of_group["run"] == of_group["run"].iloc[0]].iterrows():
                values = [None if pd.isna(block[key]) else block[key] for key in columns]
                cells = [_IN_BLOCKS[key](x) for key, x in zip(columns, values, strict=True)]
                rows.append((f"{setting}, {label}", block["name"], *cells))
        caption = "Blocks of the first run of each result"
        header = ("block", *(key.replace("_", " ") for key in columns))
        pictures = list(self._by_block(_ERROR, table)) if _ERROR.key in columns else []
        inner = Part(caption, tables=[Table.of_rows(caption, header, rows, group="what")])
        return Part("Blocks", _ERROR_TEXT, pictures=pictures, folds=[inner], folded=True)

    def _part(self, title: str, text: str, quantities: Sequence[_Quantity]) -> Part | None:
        pictures: list[Picture] = []
        maps: list[Picture] = []
        for quantity in quantities:
            if self._pruned[quantity.key].notna().any():
                shown = quantity.pictures
                if "blocks" in shown or ("several" in shown and self._several):
                    pictures += self._by_block(quantity, self._pruned)
                if "kinds" in shown:
                    pictures += self._by_kind(quantity)
                if "map" in shown:
                    maps += self._maps(quantity)
        folds = [Part(f"Maps of all layers ({len(maps)})", pictures=maps)] if maps else []
        if not self._several:
            pictures, folds = pictures + maps, []
        return Part(title, text, pictures=pictures, folds=folds) if pictures or folds else None

    def _by_block(self, quantity: _Quantity, table: pd.DataFrame) -> Iterator[Picture]:
        """A line for each group; a band from the smallest to the largest of several runs."""
        if len(self._blocks) < 2:
            return
        held = _held(table, quantity).groupby(["setting", "label", "run", "block"], sort=False)
        over_layers = held[quantity.key].agg(quantity.over)
        for setting, values in over_layers.groupby(level="setting", sort=False):
            of_runs = values.groupby(["block", "label"], sort=False)
            labels = list(dict.fromkeys(values.index.get_level_values("label")))
            mean, low, high = (
                getattr(of_runs, end)().unstack().reindex(index=self._blocks, columns=labels)
                for end in ("mean", "min", "max")
            )
            of_layers = "" if table is self._of_blocks else f": {quantity.over} over its layers"
            caption = f"{quantity.title}, by block at {setting}{of_layers}."
            name = f"{_short(quantity)}-by-block-{setting}"
            band = (low, high) if of_runs.size().max() > 1 else None
            yield draw_lines(name, caption, mean, self._methods, quantity.scale, band=band)

    def _by_kind(self, quantity: _Quantity) -> Iterator[Picture]:
        """A line for each group over the kinds of layers."""
        over = "mean" if quantity.over == "sum" else quantity.over
        held = _held(self._pruned, quantity).groupby(["setting", "kind", "label"], sort=False)
        for setting, values in held[quantity.key].agg(over).groupby(level="setting", sort=False):
            lines = values.droplevel("setting").unstack(sort=False)
            lines = lines.reindex([kind for kind in self._kinds if kind in lines.index])
            caption = f"{quantity.title}, by kind at {setting}: {over} over the blocks."
            name = f"{_short(quantity)}-by-kind-{setting}"
            if len(lines) > 1:
                yield draw_lines(name, caption, lines, self._methods, quantity.scale, across="")

    def _maps(self, quantity: _Quantity) -> Iterator[Picture]:
        """A map of all layers for each group whose layers differ; one scale for each setting."""
        key, write = quantity.key, quantity.scale.write
        shape = {"index": self._kinds, "columns": self._blocks}
        for setting, layers in self._layers.groupby("setting", sort=False):
            maps = {}
            for label, of_group in layers.groupby("label", sort=False):
                is_pruned = of_group["skipped"].isna()
                pruned = of_group[is_pruned].astype({key: float})
                values = pruned.pivot_table(index="kind", columns="block", values=key)
                if values.stack().dropna().map(write).nunique() > 1:
                    left = of_group[~is_pruned]
                    dense = pd.crosstab(left["kind"], left["block"]).reindex(**shape).fillna(0) > 0
                    maps[label] = (values.reindex(**shape), dense)
            colors = quantity.colors or common_scale([values for values, _ in maps.values()])
            for label, (values, dense) in maps.items():
                name = f"{_short(quantity)}-map-{setting}-{label}"
                caption = f"{quantity.title}, {setting} by {label}."
                yield draw_map(name, caption, values, dense, colors, write)


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Each name by the fewest last parts of it that no other one ends with."""
    short = {}
    for name in names:
        parts = name.split(".")
        endings = (".".join(parts[i:]) for i in reversed(range(len(parts))))
        others = [other for other in names if other != name]
        alone = (end for end in endings if not any(f".{o}".endswith(f".{end}") for o in others))
        short[name] = next(alone, name)
    return short


def _kind(layer: LayerReport) -> str:
    """The name of a layer in its block, where numbers, such as those of experts, are `*`."""
    if layer.name == layer.block:
        return "(the block itself)"
    return without_numbers(layer.name.removeprefix(f"{layer.block}."))


def _in_order(blocks: Iterable[Any]) -> list[str]:
    """Blocks stack by stack, as the stacks first appear, and the layers outside of them last."""
    numbered = {block: stack_and_number(block) for block in dict.fromkeys(blocks)}
    stacks = [stack for stack, _ in numbered.values()]
    return sorted(
        numbered, key=lambda b: (not b, stacks.index(numbered[b][0]), numbered[b][1] or 0)
    )


def _held(table: pd.DataFrame, quantity: _Quantity) -> pd.DataFrame:
    """The rows that have a value."""
    return table.dropna(subset=[quantity.key]).astype({quantity.key: float})


def _short(quantity: _Quantity) -> str:
    return quantity.key.removeprefix("relative_").removesuffix("_after")
