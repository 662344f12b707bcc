"""The table and the sentences of a comparison of a pruned model with its dense one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.table import Table

from mrp_lightning.commands.numbers import MISSING, memory, number, percent, perplexity
from mrp_lightning.data.data_module import TextDataModule
from mrp_lightning.errors import counted
from mrp_lightning.loop.progress import roughly
from mrp_lightning.narrowing.structure import BLOCKS
from mrp_lightning.pruning.estimate import Estimate
from mrp_lightning.pruning.settings import Settings
from mrp_lightning.records.evaluation import Scores
from mrp_lightning.records.report import PruningReport
from mrp_lightning.solver.patterns import Dense
from mrp_lightning.targets.plan import Plan

_USELESS_RATIO = 3.0
"""The ratio of perplexities above which a pruned model is of little use."""
_USELESS_COSINE = 0.5
"""The mean cosine below which outputs point elsewhere: the angle is above 60°."""
_LEAST_REMOVED = 0.001
"""The fraction of removed weights below which a pruning has no benefit."""


@dataclass(frozen=True)
class Size:
    """The bytes of a model, and milliseconds a generated token, `None` if it generates none."""

    num_bytes: int
    ms_a_token: float | None


def amount(settings: Settings) -> str:
    """Return what is removed and the grid of the rest, such as `2:4+4bit`."""
    if settings.structure is None:
        return str(settings.recipe)
    if settings.structure == BLOCKS:
        return f"{percent(1 - (settings.sparsity or 0))} of the blocks"
    grid = settings.recipe.grid
    rest = f"{percent(1 - (settings.sparsity or 0))} of their {settings.structure}"
    return rest if grid is None else f"{rest} and {grid}"


def method(settings: Settings) -> str:
    """Return the method with the parts that it goes with, such as `JM, dense target, tuned`."""
    if settings.structure == BLOCKS:
        return "least change of the output"
    parts = [
        settings.method,
        "dense target" * (settings.target == "dense"),
        "allocation by output" * (settings.allocation == "output"),
        "tuned" * (settings.block_tuning is not None),
    ]
    return ", ".join(filter(None, parts))


def plan(settings: Settings, layers: Plan, data: TextDataModule, windows: int) -> str:
    """Return a sentence on the layers, the settings and the text of a pruning."""
    verb = "quantised" if isinstance(settings.recipe.pattern, Dense) else "pruned"
    text = f"{data.calibration_source}."
    if not data.train_files:
        text = "text that the model writes itself. Text that is like yours is given by `--text "
        text += "FILE`: it is then evaluated on, too."
    parts = counted(layers.num_layers, "layer")
    are = "is" if layers.num_layers == 1 else "are"
    if settings.structure == BLOCKS:
        parts = counted(len(layers.blocks), "block")
    return (
        f"{parts} {are} to be {verb} to {amount(settings)} by "
        f"{method(settings)}, calibrated on {counted(windows, 'window')} of {text}"
    )


def announcement(work: Estimate, writing: Estimate) -> str:
    """Return a sentence on the expected time and memory."""
    part = f" ({roughly(writing.seconds)} of it to write that text)" if writing.seconds else ""
    return (
        f"Pruning may take {roughly(work.seconds)}{part} and, beside the model, "
        f"{memory(work.num_bytes)} of memory. This is a rough estimate, with an evaluation as "
        "before; small models, few bits and busy machines take longer. If it is interrupted, the "
        "same command goes on where it was."
    )


def table(
    dense: Scores,
    pruned: Scores,
    settings: Settings,
    report: PruningReport,
    sizes: Sequence[Size],
    seconds: float,
) -> Table:
    """Return a table of both models; `seconds` is the time of pruning and writing."""
    totals, narrowed = report.totals, report.narrowed
    share = totals["removed"] / totals["model_weights"]
    if narrowed:
        share = 1 - narrowed["model_weights"] / totals["model_weights"]
    else:
        # Zeros cost as much as other weights, so that the times of both models differ only by other
        # work on the machine.
        times = [size.ms_a_token for size in sizes if size.ms_a_token is not None]
        sizes = [replace(size, ms_a_token=min(times, default=None)) for size in sizes]
    measures = [f"perplexity @{dense['context']}", "× dense"]
    if "cosine" in dense:
        measures = ["mean cosine of outputs", ""]
    rows = Table()
    rows.add_column("model", overflow="fold")
    for column in (*measures, "weights removed", "weights", "ms a token", "time"):
        rows.add_column(column, justify="right")
    rows.add_row("dense", quality(dense, dense)[0], "", "", *cells(sizes[0]), "")
    time = roughly(max(seconds, totals["seconds"]))  # includes interrupted runs
    name = f"{amount(settings)} by {method(settings)}"
    rows.add_row(name, *quality(dense, pruned), percent(share), *cells(sizes[1]), time)
    return rows


def quality(dense: Scores, scores: Scores) -> tuple[str, str]:
    """Return the cells of a quality: the perplexity and its ratio to the dense one, or a cosine."""
    if "cosine" in scores:
        return f"{scores['cosine']:.4g}", ""
    return perplexity(scores["perplexity"]), number(_ratio(dense, scores))


def cells(size: Size) -> tuple[str, str]:
    """Return the cells of a size: its bytes, and milliseconds a token."""
    speed = MISSING if size.ms_a_token is None else f"{size.ms_a_token:.3g}"
    return memory(size.num_bytes), speed


def shares(report: PruningReport) -> str:
    """Return a sentence that relates the sparsity of the pruned layers to that of the model."""
    totals = report.totals
    if report.narrowed or not totals["removed"]:
        return ""
    of_all = percent(totals["removed"] / totals["model_weights"])
    return f" {percent(totals['sparsity'])} of the pruned layers' weights are {of_all} of all."


def why_useless(dense: Scores, pruned: Scores, report: PruningReport) -> str | None:
    """Return why a pruned model is of no use, `None` if it may be useful."""
    totals, loss = report.totals, None
    if "cosine" in pruned:
        if not (cosine := pruned["cosine"] or 0.0) >= _USELESS_COSINE:
            loss = f"The mean cosine of the outputs with those before is {number(cosine)}"
    # The negations also catch NaN, which compares as false: a model that computes NaN is of no use.
    elif not (ratio := _ratio(dense, pruned)) < _USELESS_RATIO:
        loss = f"The perplexity is {number(ratio)} times that of the dense model"
    if loss is not None:
        return (
            f"{loss}, which is of little use. Remove less (a lower `--sparsity`, a `--pattern` "
            "that keeps more, or more bits), or lose less: `--recipe best` and calibration "
            "`--text` that is like yours."
        )
    # Few bits or a smaller width are a benefit without any zeros.
    is_changed = report.narrowed or report.amount.grids
    if not is_changed and totals["removed"] < _LEAST_REMOVED * totals["model_weights"]:
        return (
            f"Of {totals['model_weights']:,} weights {totals['removed']:,} are removed, which "
            "makes the model neither smaller nor faster. `--sparsity 0.5` removes half of them."
        )
    return None


def _ratio(dense: Scores, pruned: Scores) -> float:
    return (pruned["perplexity"] or math.inf) / (dense["perplexity"] or math.inf)
