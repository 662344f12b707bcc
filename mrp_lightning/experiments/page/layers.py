"""The parts on layers and blocks: what pruning each of them cost, in one table of all runs."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.colors import Normalize

from mrp_lightning.experiments import numbers
from mrp_lightning.experiments.models import Model
from mrp_lightning.experiments.numbers import Write
from mrp_lightning.experiments.page.drawing import stack_and_number
from mrp_lightning.experiments.page.parts import Fold, Part, Picture, Row, Table, columns
from mrp_lightning.experiments.page.pictures import (
    Scale,
    common_scale,
    draw_lines,
    draw_map,
)
from mrp_lightning.records.report import LayerReport
from mrp_lightning.targets.blocks import without_numbers


class Quantity(NamedTuple):
    """A value of a layer or of a block.

    Attributes:
        key: Its name in the report.
        what: What it is, for a caption.
        scale: The axis of its pictures.
        shown: How it is shown: `blocks` and `kinds` are pictures by block and by kind of layer,
            `several` is the first of them where there are several results, `map` is one of all
            layers, `table` is one by kind of layer.
        over: What is taken over the layers of a block or kind: `mean`, `sum`, `max`.
        colors: From values to the colours of the map; `None` for those that fit.
    """

    key: str
    what: str
    scale: Scale
    shown: Sequence[str]
    over: str = "mean"
    colors: Normalize | None = None


def _rounded(share: float | None) -> str:
    return numbers.percent(None if share is None else round(share, 2))


_LOSS = Quantity(
    "relative_loss",
    "Relative loss of the layers",
    Scale("relative loss", numbers.relative_loss),
    ("blocks", "kinds", "map"),
)
_SPARSITY = Quantity(
    "sparsity",
    "Fraction of the weights removed",
    Scale("sparsity", _rounded),
    ("map",),
    colors=Normalize(0.0, 1.0),
)
_SOLVER = [
    Quantity(key, what, Scale(name, numbers.number), ("several", "map"), over)
    for key, what, name, over in (
        ("damping", "λ that was added to the diagonal of the Hessian", "λ", "mean"),
        ("gap", "Certified distance to the optimal loss", "gap", "max"),
        ("iterations", "Iterations of the exact compensation", "iterations", "mean"),
    )
]
_SECONDS = Quantity(
    "seconds",
    "Seconds to prune the layers",
    Scale("seconds", numbers.seconds),
    ("blocks", "table"),
    over="sum",
)
_MEMORY = Quantity(
    "peak_memory",
    "Peak GPU memory of the layers",
    Scale("peak memory, GiB", numbers.memory, 2**30),
    ("kinds", "table"),
    over="max",
)
_ERROR = Quantity(
    "error_after",
    "Error on held-out windows, after tuning",
    Scale("error", numbers.relative_loss),
    ("blocks",),
)
_LOSS_PART = (
    "Where it lost",
    "Mean over the calibration tokens of ‖(w + δ)x − wx‖², relative to that of ‖wx‖². In the maps "
    "a cell is a layer, or the mean of a layer of all experts; maps of one sparsity share a scale "
    "in which equal steps of colour are equal ratios. An empty cell is a layer that there is not, "
    "or that the run did not reach.",
    (_LOSS,),
)
_PARTS = (
    ("Sparsity", "", (_SPARSITY,)),
    ("Damping, gap and iterations", "", _SOLVER),
    (
        "Time and memory",
        "The first layer of those that share an input pays for preparing the Hessian. Running the "
        "model over the calibration data is not in these values; it is in the seconds of the run.",
        (_SECONDS, _MEMORY),
    ),
)
_WORST = 5
_IN_BLOCKS: dict[str, Write] = {
    "sparsity": numbers.percent,
    "error_before": numbers.relative_loss,
    "error_after": numbers.relative_loss,
    "epoch": numbers.count,
    "seconds": numbers.seconds,
}


class Layers:
    """The layers of a model with at least one result, and its blocks.

    A row of its tables is a layer, or a block, of a run: what the report says of it, with `block`
    (empty outside the blocks), `kind` (the name in the block, with `*` for numbers), and the
    `setting` and `label` of the result.
    """

    def __init__(self, model: Model) -> None:
        self._methods = {result.label: result.method for result in model.originals}
        self._several = len(model.originals) > 1
        layers, blocks = [], []
        for result in model.originals:
            for run in result.runs:
                about = {"setting": result.setting, "label": result.label, "run": run.name}
                for layer in run.layers:
                    where = {"block": layer.block or "", "kind": _kind(layer)}
                    layers.append(vars(layer) | where | about)
                for block in run.report.blocks if run.report else []:
                    blocks.append(vars(block) | {"block": block.name} | about)
        names = [field.name for field in fields(LayerReport)]
        names += ["kind", "setting", "label", "run"]
        self._table = pd.DataFrame(layers, columns=names)
        self._pruned = self._table[self._table["skipped"].isna()]
        self.of_blocks = pd.DataFrame(blocks)
        ordered = pd.concat([self._pruned, self._table])
        self._blocks = _in_order(ordered["block"])
        self._kinds = short_names(list(dict.fromkeys(ordered["kind"])))

    def loss_part(self) -> Part | None:
        """Which blocks and layers lost most."""
        part = self._part(*_LOSS_PART)
        if part is None or self._several:
            return part
        return replace(part, tables=[self._worst()])

    def parts(self) -> Iterator[Part]:
        """The other parts that have something to show."""
        if len(self.of_blocks):
            yield self.block_part()
        for about in _PARTS:
            if part := self._part(*about):
                yield replace(part, folded=True)

    def _part(self, title: str, text: str, quantities: Sequence[Quantity]) -> Part | None:
        held = [q for q in quantities if self._pruned[q.key].notna().any()]
        tables = [self._kind_table(q) for q in held if "table" in q.shown]
        pictures = [p for q in held for p in self._pictures(q)]
        maps, sentences = [], [text]
        for quantity in [q for q in held if "map" in q.shown]:
            drawn, flat = self._maps(quantity)
            maps += drawn
            sentences += flat
        folds = [Fold(f"Maps of all layers ({len(maps)})", pictures=maps)] if maps else []
        if not self._several:
            pictures, folds = pictures + maps, []
        said = " ".join(filter(None, sentences))
        return Part(title, said, tables, pictures, folds) if held else None

    def _worst(self) -> Table:
        """The layers that lost most, relative to what they give."""
        losses = _held(self._pruned, _LOSS).groupby("name")["relative_loss"].mean()
        most = losses.sort_values(ascending=False, kind="stable").head(_WORST)
        rows = [Row(str(name), [_LOSS.scale.write(float(loss))]) for name, loss in most.items()]
        caption = f"The {len(rows)} of {len(losses)} layers that lost most"
        return Table(caption, columns("layer:", "relative loss"), {"": rows})

    def _pictures(self, quantity: Quantity) -> Iterator[Picture]:
        shown = quantity.shown
        if "blocks" in shown or ("several" in shown and self._several):
            yield from self._by_block(quantity, self._pruned)
        if "kinds" in shown:
            over = f"{quantity.over} over the blocks"
            for setting, values in self._of_kinds(quantity).groupby(level="setting", sort=False):
                caption = f"{quantity.what}, by kind at {setting}: {over}."
                rows = values.droplevel("setting").T.rename(self._kinds).dropna(how="all")
                name, how = f"{_short(quantity)}-by-kind-{setting}", (self._methods, quantity.scale)
                if len(rows) > 1:
                    yield draw_lines(name, caption, rows, *how, across="")

    def _by_block(self, quantity: Quantity, table: pd.DataFrame) -> Iterator[Picture]:
        """A line for each result; a band from the smallest to the largest of several runs."""
        if len(self._blocks) < 2:
            return
        held = _held(table, quantity).groupby(["setting", "label", "run", "block"], sort=False)
        over = held[quantity.key].agg(quantity.over)
        for setting, values in over.groupby(level="setting", sort=False):
            of_runs = values.groupby(["block", "label"], sort=False)
            labels = list(dict.fromkeys(values.index.get_level_values("label")))
            mean, low, high = (
                getattr(of_runs, end)().unstack().reindex(index=self._blocks, columns=labels)
                for end in ("mean", "min", "max")
            )
            of_layers = "" if table is self.of_blocks else f": {quantity.over} over its layers"
            caption = f"{quantity.what}, by block at {setting}{of_layers}."
            name = f"{_short(quantity)}-by-block-{setting}"
            band = (low, high) if of_runs.size().max() > 1 else None
            yield draw_lines(name, caption, mean, self._methods, quantity.scale, band=band)

    def _kind_table(self, quantity: Quantity) -> Table:
        """A value by kind of layer (columns) and result."""
        values = self._of_kinds(quantity)
        groups: dict[str, list[Row]] = {}
        for (setting, label), found in values.iterrows():
            cells = [quantity.scale.write(None if pd.isna(x) else float(x)) for x in found]
            groups.setdefault(setting, []).append(Row(label, cells, self._methods[label]))
        caption = f"{quantity.what}, by kind: {_over_blocks(quantity)} over the blocks"
        return Table(caption, columns("method:", *values.rename(columns=self._kinds)), groups)

    def _of_kinds(self, quantity: Quantity) -> pd.DataFrame:
        """Values by setting and label (rows) and kind (columns)."""
        held = _held(self._pruned, quantity).groupby(["setting", "label", "kind"], sort=False)
        values = held[quantity.key].agg(_over_blocks(quantity)).unstack(sort=False)
        return values[[kind for kind in self._kinds if kind in values]]

    def _maps(self, quantity: Quantity) -> tuple[list[Picture], list[str]]:
        """A map of all layers for each result, and sentences in place of flat ones.

        Those of one setting share a scale.
        """
        key, write = quantity.key, quantity.scale.write
        pictures: list[Picture] = []
        flat: dict[str, list[str]] = {}
        for setting, layers in self._table.groupby("setting", sort=False):
            cells = {}
            for label, found in layers.groupby("label", sort=False):
                pruned = found[found["skipped"].isna()].astype({key: float})
                values = pruned.pivot_table(index="kind", columns="block", values=key)
                written = values.stack().dropna().map(write)
                if written.nunique() == 1:
                    flat.setdefault(written.iloc[0], []).append(f"{setting} by {label}")
                if written.nunique() > 1:
                    left = found[found["skipped"].notna()]
                    dense = self._shaped(pd.crosstab(left["kind"], left["block"])).fillna(0) > 0
                    cells[label] = (self._shaped(values), dense)
            colors = quantity.colors or common_scale([values for values, _ in cells.values()])
            for label, (values, dense) in cells.items():
                name = f"{_short(quantity)}-map-{setting}-{label}"
                caption = f"{quantity.what}, {setting} by {label}."
                how = (self._kinds, colors, write)
                pictures.append(draw_map(name, caption, values, dense, *how))
        said = [f"{quantity.what}, {', '.join(of)}: {x} everywhere." for x, of in flat.items()]
        return pictures, said

    def _shaped(self, cells: pd.DataFrame) -> pd.DataFrame:
        return cells.reindex(index=list(self._kinds), columns=self._blocks)

    def block_part(self) -> Part:
        """Tables of what was done to the blocks as wholes, in the first run of each result."""
        table = self.of_blocks
        held = [key for key in _IN_BLOCKS if key in table and table[key].notna().any()]
        groups: dict[str, list[Row]] = {}
        for (setting, label), found in table.groupby(["setting", "label"], sort=False):
            for _, block in found[found["run"] == found["run"].iloc[0]].iterrows():
                known = [None if pd.isna(block[key]) else block[key] for key in held]
                cells = [_IN_BLOCKS[key](x) for key, x in zip(held, known, strict=True)]
                groups.setdefault(f"{setting}, {label}", []).append(Row(block["name"], cells))
        caption = "Blocks of the first run of each result"
        shown = columns("block:", *(key.replace("_", " ") for key in held))
        text = (
            "The error is ‖y − y_d‖² / ‖y_d‖² over the windows that tuning did not see, for the "
            "outputs y of the block and y_d of the block in the dense model."
        )
        pictures = list(self._by_block(_ERROR, table)) if _ERROR.key in held else []
        folds = [Fold(caption, [Table(caption, shown, groups, group="what")])]
        return Part("Blocks", text, pictures=pictures, folds=folds, folded=True)


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
    """Blocks stack by stack, as the stacks first appear, and what is outside of them at the end."""
    found = {block: stack_and_number(block) for block in dict.fromkeys(blocks)}
    stacks = [stack for stack, _ in found.values()]
    return sorted(found, key=lambda b: (not b, stacks.index(found[b][0]), found[b][1] or 0))


def _held(table: pd.DataFrame, quantity: Quantity) -> pd.DataFrame:
    """The rows that have a value."""
    return table.dropna(subset=[quantity.key]).astype({quantity.key: float})


def _short(quantity: Quantity) -> str:
    return quantity.key.removeprefix("relative_").removesuffix("_after")


def _over_blocks(quantity: Quantity) -> str:
    return "mean" if quantity.over == "sum" else quantity.over
