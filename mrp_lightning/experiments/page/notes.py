"""Notes that a reader has to know before trusting the numbers."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from mrp_lightning.experiments.models import Model
from mrp_lightning.experiments.runs import Run
from mrp_lightning.experiments.scores import named
from mrp_lightning.records.report import LayerReport


class Note(NamedTuple):
    """Something to know: what it is and means, and the names of the runs that it is said of."""

    text: str
    runs: Sequence[str]


def notes(model: Model) -> list[Note]:
    """The notes on all runs of a model; what is said of several runs is said once."""
    found: dict[str, list[str]] = {}
    for run in model.runs:
        for text in (*_of_the_run(run), *_of_layers(run)):
            found.setdefault(text, []).append(run.name)
    doubts = [Note(doubt, []) for doubt in model.doubts]
    return [*doubts, *_of_texts(model), *(Note(text, runs) for text, runs in found.items())]


def _of_the_run(run: Run) -> Iterator[str]:
    if run.report is None:
        return
    if run.unfinished:
        yield f"Unfinished: {run.unfinished}."
    elif not run.complete:
        yield (
            f"Incomplete: the run ended after {len(run.pruned)} pruned layers. "
            "All others were left as they were."
        )
    before = run.report.totals.get("already_pruned")
    if before:
        yield f"{before} of {len(run.pruned)} layers had the pattern before."
    if zeros := run.report.totals.get("zeros_before"):
        yield f"{zeros:.0%} of the weights were zero before: losses are against them as they were."


def _of_layers(run: Run) -> Iterator[str]:
    """Notes on the layers that have a problem, each with the worst of them."""
    tolerance = run.config.get("tolerance")
    if isinstance(tolerance, int | float):
        near = f"may be further from the optimal loss than the tolerance of {tolerance:.0e}"
        gaps = {x: x.gap for x in run.pruned if x.gap and x.gap > tolerance}
        how = "by at most {0.gap:.1e}, relative to it."
        yield from _worst(gaps, near.replace("e-", "e−"), how)
    raised = {x: x.raised_damping for x in run.pruned if x.raised_damping}
    more = "{0.raised_damping:g}. More calibration tokens would help."
    yield from _worst(raised, "needed more damping than was asked for", more)
    if fallen := sum(bool(x.fallback_mask) for x in run.pruned):
        yield f"{fallen} layers have another mask than the method's, which lost more."
    dead = {x: x.dead_inputs / x.shape[1] for x in run.pruned if x.dead_inputs}
    of_all = "{0.dead_inputs:,} of {0.shape[1]:,}."
    yield from _worst(dead, "had input features that were always 0", of_all)
    for reason in dict.fromkeys(x.own_target for x in run.pruned if x.own_target):
        number = sum(x.own_target == reason for x in run.pruned)
        yield f"{number} of {len(run.pruned)} layers kept their own target: {reason}."
    if helped := sum(bool(x.shared_hessian) for x in run.pruned):
        yield (
            f"{helped} experts saw fewer tokens than they have input features; the Hessian of "
            "all experts' tokens made up for it. More calibration data would help them."
        )
    alone = [x for x in run.pruned if x.tokens is not None and not x.shared_hessian]
    few = {x: 1 - (x.tokens or 0) / x.shape[1] for x in alone if (x.tokens or 0) < x.shape[1]}
    tokens = "{0.tokens:,} for {0.shape[1]:,}. More calibration data would help."
    yield from _worst(few, "saw fewer tokens than they have input features", tokens)


def _worst(badness: Mapping[LayerReport, float], problem: str, amount: str) -> Iterator[str]:
    """How many layers have a problem, and by how much the worst of them."""
    if badness:
        worst = max(badness, key=lambda layer: badness[layer])
        number = "1 layer" if len(badness) == 1 else f"{len(badness)} layers"
        yield f"{number} {problem}: {worst.name} {amount.format(worst).replace('e-', 'e−')}"


def _of_texts(model: Model) -> Iterator[Note]:
    """Perplexities of one text are comparable only if they are of the same windows."""
    names = ("context", "windows", "tokens")
    found: dict[str, dict[str, list[str]]] = {}
    for run in model.runs:
        for text, scores in run.evaluation.perplexity.items():
            sizes = ", ".join(f"{name} {scores.get(name)}" for name in names)
            found.setdefault(text, {}).setdefault(sizes, []).append(run.name)
    for text, by_sizes in found.items():
        if len(by_sizes) > 1:
            parts = "; ".join(f"{sizes} in {', '.join(runs)}" for sizes, runs in by_sizes.items())
            yield Note(
                f"Perplexity on {named(text)} was not measured on the same windows: {parts}.", []
            )
