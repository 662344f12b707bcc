"""The few values at the head of a model: what it costs to be sparse."""

from collections.abc import Iterator, Sequence
from math import isfinite
from statistics import fmean
from typing import NamedTuple

from mrp_lightning.experiments import numbers
from mrp_lightning.experiments.page.models import Model, Variant, by_setting
from mrp_lightning.experiments.page.scores import RELATIVE_LOSS, SECONDS, Score, perplexities


class Value(NamedTuple):
    """One value, what it is, and what it is measured on."""

    label: str
    value: str
    detail: str


def title(model: Model) -> str:
    """Model, pattern and method; or how much is compared."""
    if not model.variants:
        return model.name
    if len(model.originals) == 1:
        (variant,) = model.originals
        return f"{model.name}, {variant.setting} by {variant.label}"
    *most, last = by_setting(model.variants)
    settings = f"{', '.join(most)} and {last}" if most else last
    names = list(dict.fromkeys(variant.method_name for variant in model.originals))
    how = names[0] if len(names) == 1 else f"{len(names)} methods"
    return f"{model.name}, {settings} by {how}"


def headline(model: Model) -> list[Value]:
    """Of one variant every value, of several the best of each setting."""
    texts = perplexities(model)
    if not model.variants:
        return [Value(f"Perplexity, {s.name}", s.text(model.before), s.detail) for s in texts]
    if len(model.originals) == 1:
        return [*_of_one(model, model.originals[0], texts)]
    found = []
    for setting, variants in by_setting(model.originals).items():
        measured = {
            text: [v for v in variants if text.of(v.runs).is_finite]  # in all runs
            for text in texts
        }
        text = next((text for text in texts if measured[text]), None)
        if text is not None:
            best = min(measured[text], key=lambda v: text.of(v.runs).mean)
            found.append(_perplexity(model, best, text, f"{setting}, perplexity on {text.name}"))
        else:
            losses = {variant: RELATIVE_LOSS.of(variant.runs) for variant in variants}
            best = min(losses, key=lambda v: losses[v].mean if losses[v] else 0.0)
            loss, label = RELATIVE_LOSS.text(best.runs), f"{setting}, relative layer loss"
            found.append(Value(label, loss, f"lowest: {best.label}"))
    return found


def _of_one(model: Model, variant: Variant, texts: Sequence[Score]) -> Iterator[Value]:
    for text in texts:
        if text.of(variant.runs):
            yield _perplexity(model, variant, text, f"Perplexity on {text.name}")
    report = variant.runs[0].report
    assert report is not None  # a variant is pruned
    totals = report.totals
    loss = RELATIVE_LOSS.text(variant.runs)
    yield Value("Relative layer loss", loss, f"mean over {totals['layers']} layers")
    removed = f"of {numbers.count(totals['weights'])} in the pruned layers"
    if totals["skipped"]:
        removed += f"; {totals['skipped']} left dense"
    yield Value("Weights removed", numbers.percent(totals["sparsity"]), removed)
    for copy in model.variants:
        sizes = [run.weight_bytes for run in copy.runs if run.weight_bytes]
        if sizes:
            exported = copy.runs[0].exported
            label = f"Weight files, {exported}" if exported else "Weight files"
            kept = "" if exported else "with the removed weights as zeros"
            yield Value(label, numbers.memory(fmean(sizes)), kept)
    yield Value(
        "Time to prune", numbers.duration(SECONDS.of(variant.runs).mean), "with calibration"
    )


def _perplexity(model: Model, variant: Variant, text: Score, label: str) -> Value:
    after, before = text.of(variant.runs), text.of(model.before).finite
    value = text.write(after.mean)
    detail = [variant.label] if len(model.originals) > 1 else []
    if before:
        value = f"{text.write(before[0])} → {value}"
        detail += [numbers.change(before[0], after.mean)] if isfinite(after.mean) else []
    detail += [f"mean of {len(after)} runs"] if len(after) > 1 else []
    return Value(label, value, ", ".join([*detail, text.detail]))
