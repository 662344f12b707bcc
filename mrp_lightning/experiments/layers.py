"""Parts of a page about layers and blocks: losses and errors by block, a table of blocks."""

from collections.abc import Iterator
from typing import NamedTuple

import pandas as pd

from mrp_lightning.commands import numbers
from mrp_lightning.commands.numbers import Write
from mrp_lightning.experiments.groups import ModelRuns
from mrp_lightning.experiments.pictures import Part, Picture, Scale, draw_lines, stack_and_number
from mrp_lightning.experiments.scores import Table


class _Quantity(NamedTuple):
    """A value of a layer or block: its name, key in the report, title, and axis of pictures."""

    name: str
    key: str
    title: str
    scale: Scale


_LOSS = _Quantity(
    "loss",
    "relative_loss",
    "Relative loss, mean over the layers of a block",
    Scale("relative loss", numbers.relative_loss),
)
_LOSS_TEXT = (
    "Mean over the calibration tokens of ‖(w + δ)x − wx‖², relative to that of ‖wx‖². Shades span "
    "the runs of a result."
)
_ERROR = _Quantity(
    "error",
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


def loss_part(model: ModelRuns) -> Part | None:
    """Return losses by block, and the largest ones of a single group; `None` without losses."""
    rows = [
        (group.setting, group.label, run.name, layer.block or "", layer.name, layer.relative_loss)
        for group in model.originals
        for run in group.runs
        for layer in run.pruned_layers
        if layer.relative_loss is not None
    ]
    if not rows:
        return None
    losses = pd.DataFrame(rows, columns=["setting", "label", "run", "block", "name", _LOSS.key])
    pictures = list(_by_block(model, _LOSS, losses))
    if len(model.originals) > 1:
        return Part("Where it lost", _LOSS_TEXT, pictures=pictures) if pictures else None
    means = losses.groupby("name")[_LOSS.key].mean()
    largest = means.sort_values(ascending=False, kind="stable").head(_WORST)
    cells = [("", str(name), _LOSS.scale.write(float(loss))) for name, loss in largest.items()]
    caption = f"The {len(cells)} of {len(means)} layers that lost most"
    table = Table.of_rows(caption, ("layer", "relative loss"), cells)
    return Part("Where it lost", _LOSS_TEXT, [table], pictures)


def block_part(model: ModelRuns) -> Part | None:
    """Return the blocks of each group's first run, and all errors; `None` without blocks."""
    rows = [
        {**vars(block), "block": block.name}
        | {"setting": group.setting, "label": group.label, "run": run.name}
        for group in model.originals
        for run in group.runs
        for block in (run.report.blocks if run.report else [])
    ]
    if not rows:
        return None
    blocks = pd.DataFrame(rows)
    columns = [key for key in _IN_BLOCKS if key in blocks and blocks[key].notna().any()]
    cells = [
        (
            f"{block['setting']}, {block['label']}",
            block["name"],
            *(_IN_BLOCKS[key](None if pd.isna(block[key]) else block[key]) for key in columns),
        )
        for (_, _), of_group in blocks.groupby(["setting", "label"], sort=False)
        for _, block in of_group[of_group["run"] == of_group["run"].iloc[0]].iterrows()
    ]
    caption = "Blocks of the first run of each result"
    header = ("block", *(key.replace("_", " ") for key in columns))
    inner = Part(caption, tables=[Table.of_rows(caption, header, cells, group="result")])
    errors = blocks.dropna(subset=[_ERROR.key]) if _ERROR.key in columns else blocks.iloc[:0]
    pictures = list(_by_block(model, _ERROR, errors)) if len(errors) else []
    return Part("Blocks", _ERROR_TEXT, pictures=pictures, folds=[inner], folded=True)


def _by_block(model: ModelRuns, quantity: _Quantity, rows: pd.DataFrame) -> Iterator[Picture]:
    """Yield a picture for each setting: a line for each group, with a band over its runs."""
    # Sorted by list and number; the layers outside of blocks, whose block is "", come last.
    numbered = {block: stack_and_number(block) for block in dict.fromkeys(rows["block"])}
    lists = [stack for stack, _ in numbered.values()]
    blocks = sorted(
        numbered, key=lambda b: (not b, lists.index(numbered[b][0]), numbered[b][1] or 0)
    )
    if len(blocks) < 2:
        return
    methods = {group.label: group.method for group in model.originals}
    # The mean over layers is taken within a run first. The band then spans runs, and not layers.
    rows = rows.astype({quantity.key: float})
    by_block = rows.groupby(["setting", "label", "run", "block"], sort=False)[quantity.key]
    for setting, values in by_block.mean().groupby(level="setting", sort=False):
        of_runs = values.groupby(["block", "label"], sort=False)
        labels = list(dict.fromkeys(values.index.get_level_values("label")))
        mean, low, high = (
            getattr(of_runs, end)().unstack().reindex(index=blocks, columns=labels)
            for end in ("mean", "min", "max")
        )
        caption = f"{quantity.title}, by block at {setting}."
        name = f"{quantity.name}-by-block-{setting}"
        band = (low, high) if of_runs.size().max() > 1 else None
        yield draw_lines(name, caption, mean, methods, quantity.scale, band=band)
