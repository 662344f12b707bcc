"""Notes on runs: facts that qualify their numbers, such as layers with too few tokens."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from mrp_lightning.experiments.groups import ModelRuns
from mrp_lightning.experiments.runs import RunDirectory
from mrp_lightning.records.rows import LayerReport


class Note(NamedTuple):
    """A fact that qualifies the numbers, and the names of the runs that it concerns."""

    text: str
    runs: Sequence[str] = ()


def notes(model: ModelRuns) -> list[Note]:
    """Return the notes on the runs of a model; a note on several runs is listed once."""
    runs: dict[str, list[str]] = {}
    for run in model.runs:
        for text in (*_run_notes(run), *_layer_notes(run)):
            runs.setdefault(text, []).append(run.name)
    doubts = [Note(doubt) for doubt in model.doubts]
    return [*doubts, *(Note(text, names) for text, names in runs.items())]


def _run_notes(run: RunDirectory) -> Iterator[str]:
    if run.report is None:
        return
    if not run.complete:
        yield (
            f"Incomplete: the run ended after {len(run.pruned_layers)} pruned layers. "
            "All others were left as they were."
        )
    if earlier := run.report.totals.get("already_pruned"):
        yield f"{earlier} of {len(run.pruned_layers)} layers had the pattern before."
    if zeros := run.report.totals.get("zeros_before"):
        yield f"{zeros:.0%} of the weights were zero before: losses are against them as they were."


def _layer_notes(run: RunDirectory) -> Iterator[str]:
    """Yield a note for each kind of problem that layers have, with the worst layer."""
    layers, tolerance = run.pruned_layers, run.config.get("tolerance")
    if isinstance(tolerance, int | float):
        near = f"may be further from the optimal loss than the tolerance of {tolerance:.0e}"
        gaps = {x: x.gap for x in layers if x.gap and x.gap > tolerance}
        how = "by at most {0.gap:.1e}, relative to it."
        yield from _worst(gaps, near.replace("e-", "e−"), how)
    raised = {x: x.raised_damping for x in layers if x.raised_damping}
    more = "{0.raised_damping:g}. More calibration tokens would help."
    yield from _worst(raised, "needed more damping than was asked for", more)
    if fallen := sum(bool(x.fallback_mask) for x in layers):
        yield f"{fallen} layers have another mask than the method's, which lost more."
    dead = {x: x.dead_inputs / x.shape[1] for x in layers if x.dead_inputs}
    of_all = "{0.dead_inputs:,} of {0.shape[1]:,}."
    yield from _worst(dead, "had input features that were always 0", of_all)
    own = [x.target.own for x in layers if x.target and x.target.own]
    for reason, number in Counter(own).items():
        yield f"{number} of {len(layers)} layers kept their own target: {reason}."
    if helped := sum(bool(x.shared_hessian) for x in layers):
        yield (
            f"{helped} experts saw fewer tokens than they have input features; the Hessian of "
            "all experts' tokens made up for it. More calibration data would help them."
        )
    alone = [x for x in layers if x.tokens is not None and not x.shared_hessian]
    few = {x: 1 - (x.tokens or 0) / x.shape[1] for x in alone if (x.tokens or 0) < x.shape[1]}
    tokens = "{0.tokens:,} for {0.shape[1]:,}. More calibration data would help."
    yield from _worst(few, "saw fewer tokens than they have input features", tokens)


def _worst(badness: Mapping[LayerReport, float], problem: str, amount: str) -> Iterator[str]:
    """Yield the number of layers that have a problem, and its amount in the worst of them."""
    if badness:
        worst = max(badness, key=lambda layer: badness[layer])
        number = "1 layer" if len(badness) == 1 else f"{len(badness)} layers"
        yield f"{number} {problem}: {worst.name} {amount.format(worst).replace('e-', 'e−')}"
