"""The few values at the head of a model: what it costs to be sparse."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean

from mrp_lightning.experiments import numbers
from mrp_lightning.experiments.page import scores
from mrp_lightning.experiments.page.models import Model, Variant, by_setting


@dataclass(frozen=True)
class Value:
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
    settings = _listed([*by_setting(model.variants)])
    names = list(dict.fromkeys(variant.method_name for variant in model.originals))
    how = names[0] if len(names) == 1 else f"{len(names)} methods"
    return f"{model.name}, {settings} by {how}"


def headline(model: Model) -> list[Value]:
    """Of one variant every value, of several the best of each setting."""
    if not model.variants:
        return [
            Value(
                f"Perplexity, {text}",
                scores.perplexities(model.before, text).text(numbers.perplexity),
                scores.windows(model, text),
            )
            for text in scores.texts(model)
        ]
    if len(model.originals) == 1:
        return [*_of_one(model, model.originals[0])]
    found = []
    for setting, variants in by_setting(model.originals).items():
        text = next((t for t in scores.texts(model) if _finite(variants, t)), None)
        if text is not None:
            best = min(
                _finite(variants, text), key=lambda v: scores.perplexities(v.runs, text).mean
            )
            found.append(_perplexity(model, best, text, f"{setting}, perplexity on {text}"))
        else:
            losses = {variant: scores.relative_losses(variant.runs) for variant in variants}
            best = min(losses, key=lambda v: losses[v].mean if losses[v] else 0.0)
            loss = losses[best].text(numbers.relative_loss)
            found.append(Value(f"{setting}, relative layer loss", loss, f"lowest: {best.label}"))
    return found


def _of_one(model: Model, variant: Variant) -> Iterator[Value]:
    for text in scores.texts(model):
        if scores.perplexities(variant.runs, text):
            yield _perplexity(model, variant, text, f"Perplexity on {text}")
    report = variant.runs[0].report
    assert report is not None  # a variant is pruned
    totals = report.totals
    losses = scores.relative_losses(variant.runs).text(numbers.relative_loss)
    yield Value("Relative layer loss", losses, f"mean over {totals['layers']} layers")
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
    seconds = scores.seconds(variant.runs).mean
    yield Value("Time to prune", numbers.duration(seconds), "with calibration")


def _perplexity(model: Model, variant: Variant, text: str, label: str) -> Value:
    after = scores.perplexities(variant.runs, text)
    value = numbers.perplexity(after.mean)
    before = scores.perplexities(model.before, text).finite
    detail = [variant.label] if len(model.originals) > 1 else []
    if before:
        value = f"{numbers.perplexity(before[0])} → {value}"
        detail += [numbers.change(before[0], after.mean)] if isfinite(after.mean) else []
    detail += [f"mean of {len(after)} runs"] if len(after) > 1 else []
    detail.append(scores.windows(model, text))
    return Value(label, value, ", ".join(detail))


def _finite(variants: Sequence[Variant], text: str) -> list[Variant]:
    """Those with a perplexity that is finite in all runs."""
    return [v for v in variants if scores.perplexities(v.runs, text).is_finite]


def _listed(names: Sequence[str]) -> str:
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"
