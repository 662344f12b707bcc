"""The part on blocks as wholes: how much of each was removed, and what tuning it gave."""

from collections.abc import Mapping

import pandas as pd

from mrp_lightning.experiments import numbers
from mrp_lightning.experiments.numbers import Write
from mrp_lightning.experiments.page.layers import Block, place
from mrp_lightning.experiments.page.models import Model, Variant, by_setting
from mrp_lightning.experiments.page.parts import Column, Fold, Part, Row, Table
from mrp_lightning.experiments.page.pictures import Picture, along_blocks

_FIELDS: Mapping[str, tuple[str, Write]] = {
    "sparsity": ("sparsity", numbers.percent),
    "error_before": ("error before", numbers.relative_loss),
    "error_after": ("error after", numbers.relative_loss),
    "epoch": ("epoch", numbers.count),
    "seconds": ("seconds", numbers.seconds),
}


def block_part(model: Model) -> Part | None:
    """What was done to the blocks of each variant; nothing where nothing was."""
    tables = {v: found for v in model.originals if not (found := _table(v, model.blocks)).empty}
    if not tables:
        return None
    pictures: list[Picture] = []
    for setting, variants in by_setting(tables).items():
        errors = {v: tables[v].groupby("block")["error_after"] for v in variants}
        every = {v: of_blocks.agg(["mean", "min", "max"]) for v, of_blocks in errors.items()}
        found = {v: values for v, values in every.items() if values.notna().all(axis=None)}
        if found and len(model.blocks) > 1:
            caption = f"Error of each block on held-out windows, after tuning, at {setting}."
            name, how = f"error-by-block-{setting}", ("error", numbers.relative_loss)
            pictures.append(along_blocks(name, caption, found, model.blocks, *how))
    text = (
        "The error is ‖y − y_d‖² / ‖y_d‖² over the windows that tuning did not see, for the "
        "outputs y of the block and y_d of the block in the dense model."
    )
    folds = [Fold(f"Blocks of {v.setting}, {v.label}", [_listed(v)]) for v in tables]
    return Part("Blocks", text, pictures=[pictures], folds=folds)


def _table(variant: Variant, blocks: list[Block]) -> pd.DataFrame:
    """A row for each block of each run, with the block's index."""
    index = {block: i for i, block in enumerate(blocks)}
    reports = [run.report for run in variant.runs if run.report]
    rows = [
        {"block": index[place(done.name).block], "error_after": done.error_after}
        for report in reports
        for done in report.blocks
    ]
    return pd.DataFrame(rows).astype({"error_after": float} if rows else {})


def _listed(variant: Variant) -> Table:
    """The blocks of the first run; only columns that hold something."""
    report = variant.runs[0].report
    assert report is not None  # a variant is pruned
    held = {
        key: field
        for key, field in _FIELDS.items()
        if any(getattr(block, key) is not None for block in report.blocks)
    }
    rows = [
        Row(block.name, [write(getattr(block, key)) for key, (_, write) in held.items()])
        for block in report.blocks
    ]
    columns = [Column("block", numeric=False), *(Column(label) for label, _ in held.values())]
    return Table(f"Blocks of {variant.runs[0].name}", columns, {"": rows})
