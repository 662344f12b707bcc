"""Parts of a page about layers and blocks: losses by block, and a table of blocks."""

from collections.abc import Iterator

import pandas as pd

from mrp_lightning.commands import numbers
from mrp_lightning.commands.numbers import Write
from mrp_lightning.experiments.groups import ModelRuns
from mrp_lightning.experiments.pictures import Part, Picture, Scale, draw_lines, stack_and_number
from mrp_lightning.experiments.scores import Table

_LOSS = Scale("relative loss", numbers.relative_loss)
_LOSS_TEXT = "Mean over the calibration tokens of ‖(w + δ)x − wx‖², relative to that of ‖wx‖²."
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
    losses = pd.DataFrame(rows, columns=["setting", "label", "run", "block", "name", "loss"])
    pictures = list(_by_block(model, losses))
    if len(model.originals) > 1:
        return Part("Where it lost", _LOSS_TEXT, pictures=pictures) if pictures else None
    means = losses.groupby("name")["loss"].mean()
    largest = means.sort_values(ascending=False, kind="stable").head(_WORST)
    cells = [("", str(name), _LOSS.write(float(loss))) for name, loss in largest.items()]
    caption = f"The {len(cells)} of {len(means)} layers that lost most"
    table = Table.of_rows(caption, ("layer", "relative loss"), cells)
    return Part("Where it lost", _LOSS_TEXT, [table], pictures)


def _by_block(model: ModelRuns, losses: pd.DataFrame) -> Iterator[Picture]:
    """Yield a picture for each setting: a line for each group, the mean over its runs."""
    # Sorted by list and number; the layers outside of blocks, whose block is "", come last.
    numbered = {block: stack_and_number(block) for block in dict.fromkeys(losses["block"])}
    lists = [stack for stack, _ in numbered.values()]
    blocks = sorted(
        numbered, key=lambda b: (not b, lists.index(numbered[b][0]), numbered[b][1] or 0)
    )
    if len(blocks) < 2:
        return
    methods = {group.label: group.method for group in model.originals}
    by_block = losses.groupby(["setting", "block", "label"], sort=False)["loss"].mean()
    for setting, means in by_block.groupby(level="setting", sort=False):
        lines = means.droplevel("setting").unstack(sort=False).reindex(index=blocks)
        caption = f"Relative loss, mean over the layers of a block, by block at {setting}."
        yield draw_lines(caption, lines, methods, _LOSS)


def block_part(model: ModelRuns) -> Part | None:
    """Return a table of the blocks of each group's first run; `None` without blocks."""
    rows = [
        (f"{group.setting}, {group.label}", block)
        for group in model.originals
        if (report := group.runs[0].report) is not None
        for block in report.blocks
    ]
    if not rows:
        return None
    columns = [key for key in _IN_BLOCKS if any(vars(block)[key] is not None for _, block in rows)]
    cells = [
        (of, block.name, *(_IN_BLOCKS[key](vars(block)[key]) for key in columns))
        for of, block in rows
    ]
    header = ("block", *(key.replace("_", " ") for key in columns))
    caption = "Blocks of the first run of each result"
    table = Table.of_rows(caption, header, cells, group="result")
    return Part("Blocks", _ERROR_TEXT, [table], folded=True)
