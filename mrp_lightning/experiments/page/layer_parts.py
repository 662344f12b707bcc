"""The parts on layers: their loss, their sparsity, and what it took to prune them."""

from collections.abc import Mapping, Sequence

from matplotlib.colors import Normalize

from mrp_lightning.experiments import numbers
from mrp_lightning.experiments.numbers import Write
from mrp_lightning.experiments.page.layer_values import by_cell, by_kind, dense_cells
from mrp_lightning.experiments.page.maps import cell_map, scale_of
from mrp_lightning.experiments.page.models import Model, Variant, by_setting
from mrp_lightning.experiments.page.parts import Column, Fold, Part, Row, Table
from mrp_lightning.experiments.page.pictures import Quantity, along_blocks, over_names
from mrp_lightning.experiments.page.places import short_kinds
from mrp_lightning.experiments.page.style import Picture

LOSS = Quantity("relative_loss", "relative loss", numbers.relative_loss)
SECONDS = Quantity("seconds", "seconds", numbers.seconds, summary=sum)
MEMORY = Quantity("peak_memory", "peak memory, GiB", numbers.memory, max, scale=2**30)


def layer_loss(model: Model) -> Part:
    """Relative loss by block, by kind of layer, and of each layer."""
    blocks, kinds, maps = [], [], []
    for setting, variants in by_setting(model.originals).items():
        if len(model.blocks) > 1:
            caption = f"Relative loss of each block at {setting}: mean over its layers."
            name = f"loss-by-block-{setting}"
            blocks.append(along_blocks(name, caption, variants, model.blocks, LOSS))
        caption = f"Relative loss by kind of layer at {setting}: mean over the blocks."
        kinds.append(_by_kind(f"loss-by-kind-{setting}", caption, model, variants, LOSS))
        cells = {variant: by_cell(variant, "relative_loss") for variant in variants}
        scale = scale_of(x for found in cells.values() for x in found.values())
        maps += [
            cell_map(
                f"loss-map-{setting}-{variant.label}",
                f"Relative loss of each layer, {setting} by {variant.label}.",
                cells[variant],
                dense_cells(variant),
                model.blocks,
                model.kinds,
                scale=scale,
                write=numbers.relative_loss,
            )
            for variant in variants
        ]
    text = (
        "Mean over the calibration tokens of ‖(w + δ)x − wx‖², relative to that of ‖wx‖². In the "
        "maps a cell is a layer, or the mean of a layer of all experts; maps of one sparsity share "
        "a scale in which equal steps of colour are equal ratios."
    )
    if len(maps) == 1:
        return Part("Relative layer loss", text, pictures=[[*blocks, *kinds, *maps]])
    folds = [Fold(f"Maps of all layers, {len(maps)} variants", pictures=maps)]
    return Part("Relative layer loss", text, pictures=_groups(blocks, kinds), folds=folds)


def sparsity(model: Model) -> Part:
    """One map for all variants that have the same."""
    alike: dict[str, list[Variant]] = {}
    for variant in model.originals:
        cells = {c: round(x, 2) for c, x in by_cell(variant, "sparsity").items()}
        key = repr((variant.setting, sorted(cells.items()), sorted(dense_cells(variant))))
        alike.setdefault(key, []).append(variant)
    pictures = []
    for same in alike.values():
        who = ", ".join(variant.label for variant in same)
        name = f"sparsity-map-{same[0].setting}"
        pictures.append(
            cell_map(
                name if len(same) > 1 else f"{name}-{same[0].label}",
                f"Fraction of the weights removed at {same[0].setting}: {who}.",
                by_cell(same[0], "sparsity"),
                dense_cells(same[0]),
                model.blocks,
                model.kinds,
                scale=Normalize(0.0, 1.0),
                write=numbers.percent,
            )
        )
    return Part(
        "Sparsity",
        "Empty cells: there is no such layer, or the run did not reach it.",
        pictures=[pictures],
    )


def time_and_memory(model: Model) -> Part:
    """The seconds and, on CUDA, the bytes that the layers took."""
    seconds, memory = [], []
    has_memory = any(_has(variant, "peak_memory") for variant in model.originals)
    for setting, variants in by_setting(model.originals).items():
        if len(model.blocks) > 1:
            caption = f"Seconds to prune the layers of each block at {setting}."
            name = f"seconds-by-block-{setting}"
            seconds.append(along_blocks(name, caption, variants, model.blocks, SECONDS))
        measured = [variant for variant in variants if _has(variant, "peak_memory")]
        if measured:
            caption = f"Peak GPU memory by kind of layer at {setting}."
            name = f"memory-by-kind-{setting}"
            memory.append(_by_kind(name, caption, model, measured, MEMORY))
    pruned = [k for k in model.kinds if any(k in by_kind(v, "seconds") for v in model.originals)]
    mean = {variant: by_kind(variant, "seconds") for variant in model.originals}
    caption = "Seconds to prune a layer, mean over blocks"
    shown = [_table_by_kind(model.originals, pruned, mean, caption, numbers.seconds)]
    if has_memory:
        most = {variant: by_kind(variant, "peak_memory", max) for variant in model.originals}
        caption = "Peak GPU memory of a layer, largest over blocks"
        shown.append(_table_by_kind(model.originals, pruned, most, caption, numbers.memory))
    text = (
        "The first layer of those that share an input pays for preparing the Hessian. Running the "
        "model over the calibration data is not in these values; it is in the seconds of the run."
    )
    return Part("Time and memory" if has_memory else "Time", text, shown, _groups(seconds, memory))


def _table_by_kind(
    variants: Sequence[Variant],
    kinds: Sequence[str],
    found: Mapping[Variant, Mapping[str, float]],
    caption: str,
    write: Write,
) -> Table:
    """A value by kind of layer (columns) and variant."""
    short = short_kinds(kinds)
    groups: dict[str, list[Row]] = {}
    for variant in variants:
        cells = [write(found[variant].get(kind)) for kind in kinds]
        row = Row(variant.label, cells, variant.method)
        groups.setdefault(variant.setting, []).append(row)
    columns = [Column("method", numeric=False), *(Column(short[kind]) for kind in kinds)]
    return Table(caption, columns, groups)


def _by_kind(
    name: str,
    caption: str,
    model: Model,
    variants: Sequence[Variant],
    quantity: Quantity,
) -> Picture:
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
        lambda value: quantity.write(value * quantity.scale),
    )


def _groups(*groups: Sequence[Picture]) -> list[Sequence[Picture]]:
    """Groups of one each are shown together."""
    if all(len(group) <= 1 for group in groups):
        return [[picture for group in groups for picture in group]]
    return [group for group in groups if group]


def _has(variant: Variant, key: str) -> bool:
    return any(getattr(layer, key) is not None for run in variant.runs for layer in run.pruned)
