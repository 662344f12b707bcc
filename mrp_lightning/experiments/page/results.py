"""The parts on what the models can do: perplexity and zero-shot tasks, before and after."""

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import TypeVar

from mrp_lightning.evaluation.records import BY_LENGTH
from mrp_lightning.experiments.page import quantities, scores
from mrp_lightning.experiments.page.drawing import Drawing
from mrp_lightning.experiments.page.figures import Score, beside_dense, over_names
from mrp_lightning.experiments.page.models import Model, Variant, by_setting
from mrp_lightning.experiments.page.parts import Column, Names, Part, Row, Table
from mrp_lightning.experiments.page.runs import Run

Key = TypeVar("Key")
Measured = Sequence[float | None]
"""A value for each run; `None` was not finite."""


def results(model: Model, slots: Mapping[str, int], names: Names) -> Part:
    """Perplexity, loss and time of all variants."""
    drawings: list[list[Drawing]] = []
    for text in scores.texts(model):
        drawings.append([])
        before = scores.perplexities(model.before, text)
        for setting, variants in by_setting(model.variants).items():
            measured = {v: scores.perplexities(v.runs, text) for v in variants}
            finite = _means(measured)
            if len(finite) < 2:
                continue
            lost = [v.label for v, values in measured.items() if values and v not in finite]
            missing = f" Not finite: {', '.join(lost)}." if lost else ""
            drawings[-1].append(
                beside_dense(
                    names("perplexity", text, setting),
                    f"Perplexity on {text} at {setting}.{missing}",
                    finite,
                    slots,
                    before[0] if before else None,
                    f"perplexity on {text}",
                    quantities.perplexity,
                )
            )
    compared = any(len(variants) > 1 for variants in by_setting(model.originals).values())
    lower = "Lower is better; the lowest of each sparsity is bold." if compared else ""
    return Part("Results", lower, [overview(model, slots)], drawings)


def overview(model: Model, slots: Mapping[str, int]) -> Table:
    """Perplexity, layer loss and time of each variant; the lowest of a setting are marked."""
    texts = scores.texts(model)
    columns = [Column("method", numeric=False)]
    columns += [Column(text, scores.windows(model, text)) for text in texts]
    columns += [Column("relative layer loss"), Column("seconds"), Column("runs")]
    groups: dict[str, list[Row]] = {}
    if model.dense:
        before = [scores.perplexities(model.before, text) for text in texts]
        cells = [quantities.spread(values, quantities.perplexity) for values in before]
        groups[""] = [Row("dense", [*cells, "", "", ""])]
    for setting, variants in by_setting(model.variants).items():
        compared = {
            variant: [
                *(scores.perplexities(variant.runs, text) for text in texts),
                [run.totals["relative_loss"] for run in variant.runs],
            ]
            for variant in variants
        }
        best = _lowest(compared)
        groups[setting] = [
            Row(
                variant.label,
                [
                    *(quantities.spread(x, quantities.perplexity) for x in perplexities),
                    quantities.spread(losses, quantities.relative_loss),
                    quantities.spread(_seconds(variant), quantities.seconds),
                    str(len(variant.runs)),
                ],
                slots[variant.method],
                best[variant],
            )
            for variant, (*perplexities, losses) in compared.items()
        ]
    many = any(len(variant.runs) > 1 for variant in model.variants)
    spread = " Mean ± standard deviation where there are several runs." if many else ""
    what = "Perplexity, relative layer loss" if texts else "Relative layer loss"
    return Table(f"{what} and seconds of the run.{spread}", columns, groups)


def zero_shot(model: Model, slots: Mapping[str, int], names: Names) -> Part:
    """Tasks before and after."""
    fractions = [metric for metric in scores.task_metrics(model) if metric.is_fraction]
    labels = {metric.label: metric.label for metric in fractions}
    before = {m.label: scores.metric_values(model.before, m) for m in fractions}
    dense = {label: 100 * score.value for label, score in _means(before).items()}
    drawings: list[Drawing] = []
    for setting, variants in by_setting(model.variants).items():
        found = {}
        for variant in variants:
            measured = {m.label: scores.metric_values(variant.runs, m) for m in fractions}
            if means := _means(measured):
                found[variant] = {label: 100 * score.value for label, score in means.items()}
        if found:
            drawings.append(
                over_names(
                    names("zeroshot", setting),
                    f"Zero-shot results at {setting}, in percent.",
                    "%",
                    labels,
                    found,
                    slots,
                    "{:.2f}".format,
                    dense=dense,
                    zero=False,
                )
            )
    return Part("Zero-shot", "", [zero_shot_table(model, slots)], [drawings])


def zero_shot_table(model: Model, slots: Mapping[str, int]) -> Table:
    """Fractions in percent, perplexities as they are."""
    metrics = scores.task_metrics(model)
    columns = [Column("method", numeric=False)]
    columns += [Column(metric.task, scores.metric_detail(model, metric)) for metric in metrics]
    has_mean = scores.has_mean_accuracy(model)
    if has_mean:
        columns.append(Column("mean", f"acc in %; acc_norm of {' and '.join(sorted(BY_LENGTH))}"))

    def cells(runs: Sequence[Run]) -> list[str]:
        found = [scores.metric_text(runs, metric) for metric in metrics]
        if has_mean:
            means = scores.mean_accuracies(runs)
            found.append(quantities.spread(means, scores.percent_points))
        return found

    groups: dict[str, list[Row]] = {}
    if model.dense:
        groups[""] = [Row("dense", cells(model.before))]
    for setting, variants in by_setting(model.variants).items():
        for variant in variants:
            if any(run.evaluation.zeroshot for run in variant.runs):
                row = Row(variant.label, cells(variant.runs), slots[variant.method])
                groups.setdefault(setting, []).append(row)
    caption = "± standard error of one run; of several runs mean ± standard deviation."
    return Table(caption, columns, groups)


def _means(measured: Mapping[Key, Measured]) -> dict[Key, Score]:
    """Of what was measured, and finite in all runs."""
    found = {}
    for key, values in measured.items():
        finite = [value for value in values if value is not None]
        if finite and len(finite) == len(values):
            found[key] = Score(fmean(finite), stdev(finite) if len(finite) > 1 else 0.0)
    return found


def _lowest(compared: Mapping[Variant, Sequence[Measured]]) -> dict[Variant, list[int]]:
    """For each variant the columns in which its mean is the lowest, where means differ."""
    best: dict[Variant, list[int]] = {variant: [] for variant in compared}
    columns = zip(*compared.values(), strict=True)
    for number, column in enumerate(columns):
        scores_ = _means(dict(zip(compared, column, strict=True)))
        means = {variant: score.value for variant, score in scores_.items()}
        if len(set(means.values())) > 1:
            low = min(means.values())
            for variant, mean in means.items():
                best[variant] += [number] if mean == low else []
    return best


def _seconds(variant: Variant) -> list[float]:
    return [run.totals["seconds"] for run in variant.runs]
