"""Parts of a page about layers and blocks: losses and errors of all runs, a table of blocks."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import pandas as pd

from mrp_lightning.commands import numbers
from mrp_lightning.commands.numbers import Write
from mrp_lightning.experiments.groups import ModelRuns
from mrp_lightning.experiments.pictures import (
    Part,
    Picture,
    Scale,
    common_scale,
    draw_lines,
    draw_map,
    stack_and_number,
)
from mrp_lightning.experiments.scores import Table
from mrp_lightning.records.rows import LayerReport
from mrp_lightning.targets.blocks import without_numbers


class _Quantity(NamedTuple):
    """A value of a layer or block: its key in the report, its title, and the axis of pictures."""

    key: str
    title: str
    scale: Scale


_LOSS = _Quantity(
    "relative_loss",
    "Relative loss of the layers",
    Scale("relative loss", numbers.relative_loss),
)
_LOSS_TEXT = (
    "Mean over the calibration tokens of ‖(w + δ)x − wx‖², relative to that of ‖wx‖². In the maps "
    "a cell is a layer, or the mean of a layer of all experts; maps of one sparsity share a scale "
    "in which equal steps of colour are equal ratios. A cell is empty if there is no such layer, "
    "or if the run did not reach it."
)
_ERROR = _Quantity(
    "error_after",
    "Error on held-out windows, after tuning",
    Scale("error", numbers.relative_loss),
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
        # Pruned layers come first in the order of blocks and kinds, and skipped ones follow, so
        # that layers that stayed dense do not disturb the order of the others.
        ordered = pd.concat([self._layers[pruned], self._layers])
        short = short_names(list(dict.fromkeys(ordered["kind"])))
        self._layers["kind"] = self._layers["kind"].map(short)
        self._pruned = self._layers[pruned]
        self._of_blocks = pd.DataFrame(blocks)
        self._blocks, self._kinds = _in_order(ordered["block"]), list(short.values())

    def loss_part(self) -> Part | None:
        """Return losses by block and kind, the largest of a single group; `None` without losses."""
        losses = _held(self._pruned, _LOSS)
        if losses.empty:
            return None
        pictures = [*self._by_block(_LOSS, losses), *self._by_kind(losses)]
        maps = list(self._maps())
        if self._several:
            folds = [Part(f"Maps of all layers ({len(maps)})", pictures=maps)] if maps else []
            return Part("Where it lost", _LOSS_TEXT, pictures=pictures, folds=folds)
        means = losses.groupby("name")[_LOSS.key].mean()
        largest = means.sort_values(ascending=False, kind="stable").head(_WORST)
        rows = [("", str(name), _LOSS.scale.write(float(loss))) for name, loss in largest.items()]
        caption = f"The {len(rows)} of {len(means)} layers that lost most"
        table = Table.of_rows(caption, ("layer", "relative loss"), rows)
        return Part("Where it lost", _LOSS_TEXT, [table], [*pictures, *maps])

    def block_part(self) -> Part | None:
        """Return the blocks of each group's first run, and all errors; `None` without blocks."""
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
        errors = _held(table, _ERROR) if _ERROR.key in columns else None
        pictures = [] if errors is None else list(self._by_block(_ERROR, errors))
        inner = Part(caption, tables=[Table.of_rows(caption, header, rows, group="result")])
        return Part("Blocks", _ERROR_TEXT, pictures=pictures, folds=[inner], folded=True)

    def _by_block(self, quantity: _Quantity, rows: pd.DataFrame) -> Iterator[Picture]:
        """Yield a picture for each setting: a line for each group, with a band over its runs."""
        if len(self._blocks) < 2:
            return
        of_layers = "" if quantity == _ERROR else ": mean over its layers"
        # The mean over layers is taken within a run first. The band then spans runs, and not
        # layers.
        by_block = rows.groupby(["setting", "label", "run", "block"], sort=False)[quantity.key]
        for setting, values in by_block.mean().groupby(level="setting", sort=False):
            of_runs = values.groupby(["block", "label"], sort=False)
            labels = list(dict.fromkeys(values.index.get_level_values("label")))
            mean, low, high = (
                getattr(of_runs, end)().unstack().reindex(index=self._blocks, columns=labels)
                for end in ("mean", "min", "max")
            )
            caption = f"{quantity.title}, by block at {setting}{of_layers}."
            name = f"{_short(quantity)}-by-block-{setting}"
            band = (low, high) if of_runs.size().max() > 1 else None
            yield draw_lines(name, caption, mean, self._methods, quantity.scale, band=band)

    def _by_kind(self, losses: pd.DataFrame) -> Iterator[Picture]:
        """Yield a picture for each setting: a line for each group over the kinds of layers."""
        by_kind = losses.groupby(["setting", "kind", "label"], sort=False)[_LOSS.key]
        for setting, values in by_kind.mean().groupby(level="setting", sort=False):
            lines = values.droplevel("setting").unstack(sort=False)
            lines = lines.reindex([kind for kind in self._kinds if kind in lines.index])
            caption = f"{_LOSS.title}, by kind at {setting}: mean over the blocks."
            name = f"{_short(_LOSS)}-by-kind-{setting}"
            if len(lines) > 1:
                yield draw_lines(name, caption, lines, self._methods, _LOSS.scale, across="")

    def _maps(self) -> Iterator[Picture]:
        """Draw a map of the layers of each group whose losses differ; one scale a setting."""
        key, write = _LOSS.key, _LOSS.scale.write
        shape = {"index": self._kinds, "columns": self._blocks}
        for setting, layers in self._layers.groupby("setting", sort=False):
            maps = {}
            for label, of_group in layers.groupby("label", sort=False):
                is_pruned = of_group["skipped"].isna()
                pruned = of_group[is_pruned].astype({key: float})
                values = pruned.pivot_table(index="kind", columns="block", values=key)
                # A map in one colour shows nothing, so values are compared as they are written.
                if values.stack().dropna().map(write).nunique() > 1:
                    left = of_group[~is_pruned]
                    dense = pd.crosstab(left["kind"], left["block"]).reindex(**shape).fillna(0) > 0
                    maps[label] = (values.reindex(**shape), dense)
            # Maps of one sparsity are compared with each other, which takes one scale for all of
            # them.
            colors = common_scale([values for values, _ in maps.values()])
            for label, (values, dense) in maps.items():
                name = f"{_short(_LOSS)}-map-{setting}-{label}"
                caption = f"{_LOSS.title}, {setting} by {label}."
                yield draw_map(name, caption, values, dense, colors, write)


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Map each name to its shortest suffix of whole parts that ends no other name, else itself."""
    short = {}
    for name in names:
        parts = name.split(".")
        endings = (".".join(parts[i:]) for i in reversed(range(len(parts))))
        other_names = [other for other in names if other != name]
        unique_endings = (
            end for end in endings if not any(f".{o}".endswith(f".{end}") for o in other_names)
        )
        short[name] = next(unique_endings, name)
    return short


def _kind(layer: LayerReport) -> str:
    """Return the name of a layer in its block, with numbers, such as those of experts, as `*`."""
    if layer.name == layer.block:
        return "(the block itself)"
    return without_numbers(layer.name.removeprefix(f"{layer.block}."))


def _in_order(blocks: Iterable[Any]) -> list[str]:
    """Return the distinct block names, sorted by list and number; "" (no block) comes last."""
    numbered = {block: stack_and_number(block) for block in dict.fromkeys(blocks)}
    stacks = [stack for stack, _ in numbered.values()]
    return sorted(
        numbered, key=lambda b: (not b, stacks.index(numbered[b][0]), numbered[b][1] or 0)
    )


def _held(table: pd.DataFrame, quantity: _Quantity) -> pd.DataFrame:
    """Return the rows in which the quantity is not missing."""
    return table.dropna(subset=[quantity.key]).astype({quantity.key: float})


def _short(quantity: _Quantity) -> str:
    return quantity.key.removeprefix("relative_").removesuffix("_after")
