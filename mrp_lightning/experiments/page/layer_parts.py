"""The parts on layers: their loss, their sparsity, and what it took to prune them."""

from collections.abc import Callable, Mapping, Sequence

from mrp_lightning.experiments.page import quantities
from mrp_lightning.experiments.page.drawing import Drawing
from mrp_lightning.experiments.page.figures import Quantity, along_blocks, over_names
from mrp_lightning.experiments.page.maps import Scale, cell_map, scale_of
from mrp_lightning.experiments.page.measures import by_cell, by_kind, dense_cells
from mrp_lightning.experiments.page.models import Model, Variant, by_setting
from mrp_lightning.experiments.page.parts import Column, Fold, Names, Part, Row, Table
from mrp_lightning.experiments.page.places import short_kinds

LOSS = Quantity("relative_loss", "relative loss", quantities.relative_loss)
SECONDS = Quantity("seconds", "seconds", quantities.seconds, summary=sum)
MEMORY = Quantity("peak_memory", "peak memory, GiB", quantities.memory, max, scale=2**30)


def layer_loss(model: Model, slots: Mapping[str, int], names: Names) -> Part:
    """Relative loss by block, by kind of layer, and of each layer."""
    blocks, kinds, maps = [], [], []
    for setting, variants in by_setting(model.originals).items():
        if len(model.blocks) > 1:
            caption = f"Relative loss of each block at {setting}: mean over its layers."
            name = names("loss-by-block", setting)
            blocks.append(along_blocks(name, caption, variants, slots, model.blocks, LOSS))
        caption = f"Relative loss by kind of layer at {setting}: mean over the blocks."
        name = names("loss-by-kind", setting)
        kinds.append(_by_kind(name, caption, model, variants, slots, LOSS))
        cells = {variant: by_cell(variant, "relative_loss") for variant in variants}
        scale = scale_of(x for found in cells.values() for x in found.values())
        maps += [
            cell_map(
                names("loss-map", setting, variant.label),
                f"Relative loss of each layer, {setting} by {variant.label}.",
                cells[variant],
                dense_cells(variant),
                model.blocks,
                model.kinds,
                scale=scale,
                write=quantities.relative_loss,
            )
            for variant in variants
        ]
    text = (
        "Mean over the calibration tokens of ‖(w + δ)x − wx‖², relative to that of ‖wx‖². In the "
        "maps a cell is a layer, or the mean of a layer of all experts; maps of one sparsity share "
        "a scale whose steps are equal ratios."
    )
    if len(maps) == 1:
        return Part("Relative layer loss", text, drawings=[[*blocks, *kinds, *maps]])
    folds = [Fold(f"Maps of all layers, {len(maps)} variants", drawings=maps)]
    return Part("Relative layer loss", text, drawings=_groups(blocks, kinds), folds=folds)


def sparsity(model: Model, names: Names) -> Part:
    """One map for all variants that have the same."""
    alike: dict[str, list[Variant]] = {}
    for variant in model.originals:
        cells = {c: round(x, 2) for c, x in by_cell(variant, "sparsity").items()}
        key = repr((variant.setting, sorted(cells.items()), sorted(dense_cells(variant))))
        alike.setdefault(key, []).append(variant)
    drawings = []
    for same in alike.values():
        who = ", ".join(variant.label for variant in same)
        drawings.append(
            cell_map(
                names("sparsity-map", same[0].setting, "" if len(same) > 1 else same[0].label),
                f"Fraction of the weights removed at {same[0].setting}: {who}.",
                by_cell(same[0], "sparsity"),
                dense_cells(same[0]),
                model.blocks,
                model.kinds,
                scale=Scale(0.0, 1.0),
                write=quantities.percent,
            )
        )
    return Part(
        "Sparsity",
        "Empty cells: there is no such layer, or the run did not reach it.",
        drawings=[drawings],
    )


def time_and_memory(model: Model, slots: Mapping[str, int], names: Names) -> Part:
    """Seconds and, on CUDA, bytes."""
    seconds, memory = [], []
    has_memory = any(_has(variant, "peak_memory") for variant in model.originals)
    for setting, variants in by_setting(model.originals).items():
        if len(model.blocks) > 1:
            caption = f"Seconds to prune the layers of each block at {setting}."
            name = names("seconds-by-block", setting)
            seconds.append(along_blocks(name, caption, variants, slots, model.blocks, SECONDS))
        measured = [variant for variant in variants if _has(variant, "peak_memory")]
        if measured:
            caption = f"Peak GPU memory by kind of layer at {setting}."
            name = names("memory-by-kind", setting)
            memory.append(_by_kind(name, caption, model, measured, slots, MEMORY))
    pruned = [k for k in model.kinds if any(k in by_kind(v, "seconds") for v in model.originals)]
    mean = {variant: by_kind(variant, "seconds") for variant in model.originals}
    caption = "Seconds to prune a layer, mean over blocks"
    shown = [_table_by_kind(model.originals, pruned, slots, mean, caption, quantities.seconds)]
    if has_memory:
        most = {variant: by_kind(variant, "peak_memory", max) for variant in model.originals}
        caption = "Peak GPU memory of a layer, largest over blocks"
        shown.append(
            _table_by_kind(model.originals, pruned, slots, most, caption, quantities.memory)
        )
    text = (
        "The first layer of those that share an input pays for preparing the Hessian. Running the "
        "model over the calibration data is not in these figures; it is in the seconds of the run."
    )
    return Part("Time and memory" if has_memory else "Time", text, shown, _groups(seconds, memory))


def _table_by_kind(
    variants: Sequence[Variant],
    kinds: Sequence[str],
    slots: Mapping[str, int],
    found: Mapping[Variant, Mapping[str, float]],
    caption: str,
    write: Callable[[float | None], str],
) -> Table:
    """A figure by kind of layer (columns) and variant."""
    short = short_kinds(kinds)
    groups: dict[str, list[Row]] = {}
    for variant in variants:
        cells = [write(found[variant].get(kind)) for kind in kinds]
        row = Row(variant.label, cells, slots[variant.method])
        groups.setdefault(variant.setting, []).append(row)
    columns = [Column("method", numeric=False), *(Column(short[kind]) for kind in kinds)]
    return Table(caption, columns, groups)


def _by_kind(
    name: str,
    caption: str,
    model: Model,
    variants: Sequence[Variant],
    slots: Mapping[str, int],
    quantity: Quantity,
) -> Drawing:
    found = {
        variant: {
            kind: value / quantity.scale
            for kind, value in by_kind(variant, quantity.key, quantity.summary).items()
        }
        for variant in variants
    }
    short = short_kinds(model.kinds)
    labels = {k: short[k] for k in model.kinds if any(k in values for values in found.values())}
    return over_names(
        name,
        caption,
        quantity.name,
        labels,
        found,
        slots,
        lambda value: quantity.write(None if value is None else value * quantity.scale),
    )


def _groups(*groups: Sequence[Drawing]) -> list[Sequence[Drawing]]:
    """Groups of one each are shown together."""
    if all(len(group) <= 1 for group in groups):
        return [[drawing for group in groups for drawing in group]]
    return [group for group in groups if group]


def _has(variant: Variant, key: str) -> bool:
    return any(layer.get(key) is not None for run in variant.runs for layer in run.pruned)
