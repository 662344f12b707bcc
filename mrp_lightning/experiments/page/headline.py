"""The few values at the head of a model: what it costs to be sparse."""

from collections.abc import Iterator
from math import isfinite
from statistics import fmean
from typing import NamedTuple

from mrp_lightning.experiments import numbers
from mrp_lightning.experiments.models import Model, Result, by_setting
from mrp_lightning.experiments.scores import (
    RELATIVE_LOSS,
    SECONDS,
    Score,
    cell,
    detail,
    finite_means,
    mean,
    measured,
    named,
)


class Value(NamedTuple):
    """One value, what it is, and what it is measured on."""

    label: str
    value: str
    detail: str


def title(model: Model) -> str:
    """Model, pattern and method; or how much is compared."""
    if not model.results:
        return model.name
    if len(model.originals) == 1:
        (result,) = model.originals
        return f"{model.name}, {result.setting} by {result.label}"
    *most, last = by_setting(model.results)
    settings = f"{', '.join(most)} and {last}" if most else last
    names = list(dict.fromkeys(result.trial.label for result in model.originals))
    how = names[0] if len(names) == 1 else f"{len(names)} methods"
    return f"{model.name}, {settings} by {how}"


def headline(model: Model) -> Iterator[Value]:
    """Of one result every value, of several the best of each setting."""
    texts = [score for score in measured(model.runs) if score.of and not score.zero_shot]
    if len(model.originals) == 1:
        (result,) = model.originals
        for text in texts:
            if mean(result.runs, text) is not None:
                yield _perplexity(model, result, text, f"Perplexity on {named(text.of)}")
        yield from _costs(model, result)
        return
    if not model.results:
        for text in texts:
            found = cell(model.before, text)
            yield Value(f"Perplexity on {named(text.of)}", found, _how_measured(model, text))
    for setting, results in by_setting(model.originals).items():
        for score in [*texts, RELATIVE_LOSS]:
            if means := finite_means(results, score):
                best = min(means, key=lambda result: means[result])
                if score.of:
                    yield _perplexity(
                        model, best, score, f"{setting}, perplexity on {named(score.of)}"
                    )
                else:
                    found, label = cell(best.runs, score), f"{setting}, relative layer loss"
                    yield Value(label, found, f"lowest: {best.label}")
                break


def _costs(model: Model, result: Result) -> Iterator[Value]:
    report = result.runs[0].report
    assert report is not None  # a result is pruned
    totals = report.totals
    loss = cell(result.runs, RELATIVE_LOSS)
    yield Value("Relative layer loss", loss, f"mean over {totals['layers']} layers")
    removed = f"of {numbers.count(totals['weights'])} in the pruned layers"
    removed += f"; {totals['skipped']} left dense" if totals["skipped"] else ""
    yield Value("Weights removed", numbers.percent(totals["sparsity"]), removed)
    if bits := report.config.get("bits"):
        lost, by_grid = report.losses
        share = f"{by_grid / lost:.0%} of the layers' loss is the grid's" if lost else ""
        yield Value("Bits of a kept weight", numbers.count(bits), share)
    for copy in model.results:
        exported = copy.runs[0].exported
        if sizes := [run.weight_bytes for run in copy.runs if run.weight_bytes]:
            label = f"Weight files, {exported}" if exported else "Weight files"
            kept = "" if exported else "with the removed weights as zeros"
            yield Value(label, numbers.memory(fmean(sizes)), kept)
    seconds = mean(result.runs, SECONDS) or 0.0
    yield Value("Time to prune", numbers.duration(seconds), "with calibration")


def _perplexity(model: Model, result: Result, text: Score, label: str) -> Value:
    after, before = mean(result.runs, text), mean(model.before, text)
    assert after is not None
    value = text.write(after)
    details = [result.label] if len(model.originals) > 1 else []
    if before is not None and isfinite(before):
        value = f"{text.write(before)} → {value}"
        change = numbers.signed(100 * (after / before - 1), "{:.1f}%".format)
        details += [change] if isfinite(after) else []
    details += [f"mean of {len(result.runs)} runs"] if len(result.runs) > 1 else []
    return Value(label, value, ", ".join([*details, _how_measured(model, text)]))


def _how_measured(model: Model, text: Score) -> str:
    context = f"context {text.context}, " if text.context else ""
    return context + detail(model.runs, text)
