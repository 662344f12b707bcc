"""What a pruning came to, in one line."""

import logging
from os import PathLike

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from mrp_lightning.records.report import PruningReport
from mrp_lightning.solver.recipe import Recipe

log = logging.getLogger(__name__)


def tell_result(
    report: PruningReport,
    recipe: Recipe,
    save_dir: str | PathLike[str] | None,
    *,
    is_rehearsal: bool,
) -> None:
    """Log what was done, and warn of layers that had the pattern before.

    Args:
        report: The report of a run that is complete.
        recipe: How the layers were pruned.
        save_dir: The directory of the pruned model, if it is to be saved.
        is_rehearsal: Whether nothing is saved, since the trainer only tries what it does.
    """
    totals = report.totals
    if totals["already_pruned"]:
        log.warning(
            "%d of %d layers already had the pattern %s.",
            totals["already_pruned"],
            totals["layers"],
            recipe.pattern,
        )
    where = f"The model is in {save_dir}."
    if is_rehearsal or save_dir is None:
        reason = "`fast_dev_run`" if is_rehearsal else "no `save_dir`"
        where = f"The model is pruned in memory only ({reason})."
    rank_zero_info(
        f"Pruned {totals['layers']} layers to {recipe.pattern} with {recipe.method} in "
        f"{totals['seconds']:.1f} s: {totals['share']:.0%} of the model's weights are in them, and "
        f"{totals['skipped']} more are left dense. Mean output error of a layer, relative to its "
        f"output: {totals['relative_loss']:.4f}. {where}"
    )
