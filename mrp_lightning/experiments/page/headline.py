"""The few figures at the head of a model: what it costs to be sparse."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from mrp_lightning.experiments.page import quantities, scores
from mrp_lightning.experiments.page.models import Model, Variant, by_setting
from mrp_lightning.experiments.page.runs import Run


@dataclass(frozen=True)
class Figure:
    """One number, what it is, and what it is measured on."""

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


def headline(model: Model) -> list[Figure]:
    """Of one variant all, of several the best of each setting."""
    if not model.variants:
        return [
            Figure(
                f"Perplexity, {text}",
                quantities.spread(scores.perplexities(model.before, text), quantities.perplexity),
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
            best = min(_finite(variants, text), key=lambda v: _mean_perplexity(v, text))
            found.append(_perplexity(model, best, text, f"{setting}, perplexity on {text}"))
        else:
            best = min(variants, key=lambda v: v.mean(_relative_loss) or 0.0)
            loss = quantities.spread(best.values(_relative_loss), quantities.relative_loss)
            found.append(Figure(f"{setting}, relative layer loss", loss, f"lowest: {best.label}"))
    return found


def _of_one(model: Model, variant: Variant) -> Iterator[Figure]:
    for text in scores.texts(model):
        if scores.perplexities(variant.runs, text):
            yield _perplexity(model, variant, text, f"Perplexity on {text}")
    totals = variant.runs[0].totals
    losses = variant.values(_relative_loss)
    layers = f"mean over {totals['layers']} layers"
    yield Figure("Relative layer loss", quantities.spread(losses, quantities.relative_loss), layers)
    removed = f"of {quantities.count(totals['weights'])} in the pruned layers"
    if totals["skipped"]:
        removed += f"; {totals['skipped']} left dense"
    yield Figure("Weights removed", quantities.percent(totals["sparsity"]), removed)
    for copy in model.variants:
        sizes = [run.weight_bytes for run in copy.runs if run.weight_bytes]
        if sizes:
            exported = copy.runs[0].exported
            label = f"Weight files, {exported}" if exported else "Weight files"
            kept = "" if exported else "with the removed weights as zeros"
            yield Figure(label, quantities.memory(fmean(sizes)), kept)
    seconds = fmean(run.totals["seconds"] for run in variant.runs)
    yield Figure("Time to prune", quantities.duration(seconds), "with calibration")


def _perplexity(model: Model, variant: Variant, text: str, label: str) -> Figure:
    after = scores.perplexities(variant.runs, text)
    finite = [x for x in after if x is not None]
    mean = fmean(finite) if len(finite) == len(after) else None
    value = quantities.perplexity(mean)
    before = [x for x in scores.perplexities(model.before, text) if x is not None]
    detail = [variant.label] if len(model.originals) > 1 else []
    if before:
        value = f"{quantities.perplexity(before[0])} → {value}"
        detail += [quantities.change(before[0], mean)] if mean is not None else []
    detail += [f"mean of {len(after)} runs"] if len(after) > 1 else []
    detail.append(scores.windows(model, text))
    return Figure(label, value, ", ".join(detail))


def _finite(variants: Sequence[Variant], text: str) -> list[Variant]:
    """Those with a perplexity that is finite in all runs."""
    measured = {variant: scores.perplexities(variant.runs, text) for variant in variants}
    return [variant for variant, values in measured.items() if values and None not in values]


def _mean_perplexity(variant: Variant, text: str) -> float:
    return fmean(x for x in scores.perplexities(variant.runs, text) if x is not None)


def _relative_loss(run: Run) -> float | None:
    return run.totals["relative_loss"]


def _listed(names: Sequence[str]) -> str:
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"
