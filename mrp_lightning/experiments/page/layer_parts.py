"""The parts on layers: loss, sparsity, weights, and what it took to prune them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.colors import Normalize

from mrp_lightning.experiments import numbers
from mrp_lightning.experiments.numbers import Write
from mrp_lightning.experiments.page.layers import layer_table, short_kinds
from mrp_lightning.experiments.page.models import Model, Variant, by_setting
from mrp_lightning.experiments.page.parts import Column, Fold, Part, Row, Table
from mrp_lightning.experiments.page.pictures import (
    Picture,
    along_blocks,
    cell_map,
    magnitudes,
    over_names,
    scale_of,
)
from mrp_lightning.experiments.page.weights import count_magnitudes


@dataclass(frozen=True)
class Quantity:
    """A value of a layer.

    Attributes:
        key: Its name in `LayerReport`.
        name: The name of the axis.
        write: How a number is written.
        summary: What is taken over the layers of a block or kind.
        scale: What a number is divided by to be drawn.
    """

    key: str
    name: str
    write: Write
    summary: str = "mean"
    scale: float = 1


LOSS = Quantity("relative_loss", "relative loss", numbers.relative_loss)
SECONDS = Quantity("seconds", "seconds", numbers.seconds, "sum")
MEMORY = Quantity("peak_memory", "peak memory, GiB", numbers.memory, "max", 2**30)
SOLVER = {
    Quantity("damping", "λ", numbers.number): "λ that was added to the diagonal of the Hessian",
    Quantity("gap", "gap", numbers.number, "max"): "Certified distance to the optimal loss",
    Quantity("iterations", "iterations", numbers.number): "Iterations of the exact compensation",
}


class LayerParts:
    """The parts on the layers of a model.

    Args:
        model: A model with at least one variant.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._tables = {v: layer_table(v.runs, model.blocks) for v in model.originals}
        self._pruned = {v: table[table["skipped"].isna()] for v, table in self._tables.items()}
        self._settings = by_setting(model.originals)

    def parts(self) -> list[Part]:
        """All that have something to show."""
        parts = [self.loss(), self.sparsity(), self.weights(), self.solver(), self.time()]
        return [part for part in parts if part]

    def loss(self) -> Part:
        """Relative loss by block, by kind of layer, and of each layer."""
        blocks, kinds, maps = [], [], []
        flat: list[str] = []
        for setting, variants in self._settings.items():
            caption = f"Relative loss of each block at {setting}: mean over its layers."
            blocks += self._by_block(f"loss-by-block-{setting}", caption, variants, LOSS)
            caption = f"Relative loss by kind of layer at {setting}: mean over the blocks."
            kinds += self._by_kind(f"loss-by-kind-{setting}", caption, variants, LOSS)
            maps += self._maps("loss-map", "Relative loss of each layer", variants, LOSS, flat)
        text = (
            "Mean over the calibration tokens of ‖(w + δ)x − wx‖², relative to that of ‖wx‖². In "
            "the maps a cell is a layer, or the mean of a layer of all experts; maps of one "
            "sparsity share a scale in which equal steps of colour are equal ratios."
        )
        text = " ".join([text, *flat])
        if len(maps) < 2:
            return Part("Relative layer loss", text, pictures=[[*blocks, *kinds, *maps]])
        folds = [Fold(f"Maps of all layers, {len(maps)} variants", pictures=maps)]
        return Part("Relative layer loss", text, pictures=_groups(blocks, kinds), folds=folds)

    def sparsity(self) -> Part:
        """A sentence for variants with the same fraction everywhere, else a map for all alike."""
        alike: dict[str, list[Variant]] = {}
        for variant in self._pruned:
            values = self._cells(variant, "sparsity").round(2)
            key = f"{variant.setting} {values.to_csv()} {self._dense(variant).to_csv()}"
            alike.setdefault(key, []).append(variant)
        sentences, pictures = [], []
        for variants in alike.values():
            labels, setting = ", ".join(v.label for v in variants), variants[0].setting
            cells = self._cells(variants[0], "sparsity")
            values = cells.stack().dropna()
            if values.round(2).nunique() <= 1:
                share = numbers.percent(round(values.mean(), 4)) if len(values) else "nothing"
                sentences.append(f"{labels} at {setting}: every pruned layer lost {share}.")
                continue
            name = f"sparsity-map-{setting}" + (f"-{labels}" if len(variants) == 1 else "")
            caption = f"Fraction of the weights removed at {setting}: {labels}."
            dense, scale = self._dense(variants[0]), Normalize(0.0, 1.0)
            blocks = self._model.blocks
            pictures.append(cell_map(name, caption, cells, dense, blocks, scale, numbers.percent))
        if pictures:
            sentences.append("Empty cells: there is no such layer, or the run did not reach it.")
        return Part("Sparsity", " ".join(sentences), pictures=[pictures])

    def weights(self) -> Part | None:
        """How large the kept weights are, where they are on disk."""
        pictures = []
        for setting, variants in self._settings.items():
            kept, dense, num_weights = {}, None, 0
            for variant in variants:
                run, table = variant.runs[0], self._pruned[variant]
                layers = set(table.loc[table["run"] == 0, "name"])
                found = None if run.exported else count_magnitudes(run.directory, layers)
                if layers and found is not None:
                    kept[variant] = found
                if variant in kept and dense is None:
                    assert run.report is not None  # a variant is pruned
                    num_weights = run.report.totals["weights"]
                    dense = self._dense_magnitudes(variant, layers)
            if kept:
                name, caption = f"weights-{setting}", f"Sizes of the kept weights at {setting}."
                pictures.append(magnitudes(name, caption, dense, kept, num_weights))
        text = (
            "Of all pruned layers, in the first run of each variant, without the removed weights."
        )
        return Part("Kept weights", text, pictures=[pictures]) if pictures else None

    def solver(self) -> Part | None:
        """Damping, gap and iterations by layer."""
        lines, maps = [], []
        flat: list[str] = []
        for setting, variants in self._settings.items():
            for quantity, what in SOLVER.items():
                over = "largest of" if quantity.summary == "max" else "mean over"
                caption = f"{what}, by block at {setting}: {over} its layers."
                name = f"{quantity.key}-by-block-{setting}"
                if len(self._tables) > 1:
                    lines += self._by_block(name, caption, variants, quantity)
                maps += self._maps(f"{quantity.key}-map", what, variants, quantity, flat)
        if not maps and not flat:
            return None
        if len(self._tables) == 1:
            return Part("Damping, gap and iterations", " ".join(flat), pictures=[maps])
        folds = [Fold(f"Maps of all layers, {len(maps)} maps", pictures=maps)] if maps else []
        return Part("Damping, gap and iterations", " ".join(flat), (), [lines], folds)

    def time(self) -> Part:
        """The seconds and, on CUDA, the bytes that the layers took."""
        seconds, memory = [], []
        for setting, variants in self._settings.items():
            caption = f"Seconds to prune the layers of each block at {setting}."
            seconds += self._by_block(f"seconds-by-block-{setting}", caption, variants, SECONDS)
            caption = f"Peak GPU memory by kind of layer at {setting}."
            memory += self._by_kind(f"memory-by-kind-{setting}", caption, variants, MEMORY)
        tables = [self._table("Seconds to prune a layer, mean over blocks", "mean", SECONDS)]
        if memory:
            caption = "Peak GPU memory of a layer, largest over blocks"
            tables.append(self._table(caption, "max", MEMORY))
        text = (
            "The first layer of those that share an input pays for preparing the Hessian. Running "
            "the model over the calibration data is not in these values; it is in the seconds of "
            "the run."
        )
        return Part("Time and memory" if memory else "Time", text, tables, _groups(seconds, memory))

    def _having(self, variants: Sequence[Variant], key: str) -> dict[Variant, pd.DataFrame]:
        """The pruned layers of the variants that have a value."""
        return {v: self._pruned[v].dropna(subset=[key]) for v in variants if self._has(v, key)}

    def _has(self, variant: Variant, key: str) -> bool:
        return bool(self._pruned[variant][key].notna().any())

    def _by_block(
        self, name: str, caption: str, variants: Sequence[Variant], quantity: Quantity
    ) -> list[Picture]:
        found = {}
        for variant, table in self._having(variants, quantity.key).items():
            values = table.astype({quantity.key: float}).groupby(["block", "run"])[quantity.key]
            of_runs = values.agg(quantity.summary).groupby("block")
            found[variant] = of_runs.agg(["mean", "min", "max"])
        blocks = self._model.blocks
        if not found or len(blocks) < 2:
            return []
        how = (quantity.name, quantity.write, quantity.scale)
        return [along_blocks(name, caption, found, blocks, *how)]

    def _by_kind(
        self, name: str, caption: str, variants: Sequence[Variant], quantity: Quantity
    ) -> list[Picture]:
        found = self._kinds(variants, quantity.key, quantity.summary)
        if not found:
            return []
        short = short_kinds(self._model.kinds)
        labels = {k: short[k] for k in self._model.kinds if any(k in x for x in found.values())}
        scale, write = quantity.scale, quantity.write
        return [over_names(name, caption, quantity.name, labels, found, write, scale=scale)]

    def _kinds(
        self, variants: Sequence[Variant], key: str, summary: str
    ) -> dict[Variant, Mapping[str, float]]:
        return {
            variant: table.groupby("kind", sort=False)[key].agg(summary).to_dict()
            for variant, table in self._having(variants, key).items()
        }

    def _maps(
        self,
        name: str,
        what: str,
        variants: Sequence[Variant],
        quantity: Quantity,
        flat: list[str],
    ) -> list[Picture]:
        """A map for each variant, with one scale; `flat` gets a sentence for each flat one."""
        cells = {v: self._cells(v, quantity.key) for v in variants if self._has(v, quantity.key)}
        for variant, found in list(cells.items()):
            values = found.stack().dropna()
            if values.nunique() == 1:
                value = quantity.write(values.iloc[0])
                flat.append(f"{what}, {variant.setting} by {variant.label}: {value} everywhere.")
                del cells[variant]
        scale = scale_of([x for found in cells.values() for x in found.stack().dropna()])
        return [
            cell_map(
                f"{name}-{variant.setting}-{variant.label}",
                f"{what}, {variant.setting} by {variant.label}.",
                found,
                self._dense(variant),
                self._model.blocks,
                scale,
                quantity.write,
            )
            for variant, found in cells.items()
        ]

    def _cells(self, variant: Variant, key: str) -> pd.DataFrame:
        """The mean of a value over the pruned layers of a kind in a block, and over runs."""
        table = self._pruned[variant].astype({key: float})
        return self._shaped(table.pivot_table(index="kind", columns="block", values=key))

    def _dense(self, variant: Variant) -> pd.DataFrame:
        """Where layers were left dense."""
        table = self._tables[variant]
        left = table[table["skipped"].notna()]
        return self._shaped(pd.crosstab(left["kind"], left["block"])).fillna(0) > 0

    def _shaped(self, cells: pd.DataFrame) -> pd.DataFrame:
        return cells.reindex(index=self._model.kinds, columns=range(len(self._model.blocks)))

    def _dense_magnitudes(self, variant: Variant, layers: set[str]) -> np.ndarray | None:
        dense = self._model.dense
        sources = [variant.config.get("base_model"), dense and dense.evaluation.model]
        directories = [Path(source) for source in sources if source and Path(source).is_dir()]
        return count_magnitudes(directories[0], layers) if directories else None

    def _table(self, caption: str, summary: str, quantity: Quantity) -> Table:
        """A value by kind of layer (columns) and variant."""
        found = self._kinds(self._model.originals, quantity.key, summary)
        kinds = [k for k in self._model.kinds if any(k in values for values in found.values())]
        short = short_kinds(kinds)
        groups: dict[str, list[Row]] = {}
        for variant in self._model.originals:
            cells = [quantity.write(found.get(variant, {}).get(kind)) for kind in kinds]
            row = Row(variant.label, cells, variant.method)
            groups.setdefault(variant.setting, []).append(row)
        columns = [Column("method", numeric=False), *(Column(short[kind]) for kind in kinds)]
        return Table(caption, columns, groups)


def _groups(*groups: Sequence[Picture]) -> list[Sequence[Picture]]:
    """Groups of one each are shown together."""
    if all(len(group) <= 1 for group in groups):
        return [[picture for group in groups for picture in group]]
    return [group for group in groups if group]
