"""The parts on what the models can do: perplexity and zero-shot tasks, before and after."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from mrp_lightning.evaluation.records import BY_LENGTH
from mrp_lightning.experiments import numbers
from mrp_lightning.experiments.page import scores
from mrp_lightning.experiments.page.models import Model, Variant, by_setting
from mrp_lightning.experiments.page.parts import Column, Part, Row, Table
from mrp_lightning.experiments.page.pictures import Picture, beside_dense, over_names
from mrp_lightning.experiments.runs import Run
from mrp_lightning.experiments.summary import Average

Key = TypeVar("Key")


def results(model: Model) -> Part:
    """Perplexity, loss and time of all variants."""
    pictures: list[list[Picture]] = []
    for text in scores.texts(model):
        pictures.append([])
        before = scores.perplexities(model.before, text)
        for setting, variants in by_setting(model.variants).items():
            measured = {variant: scores.perplexities(variant.runs, text) for variant in variants}
            finite = _finite(measured)
            if len(finite) < 2:
                continue
            lost = [v.label for v, values in measured.items() if values and v not in finite]
            missing = f" Not finite: {', '.join(lost)}." if lost else ""
            pictures[-1].append(
                beside_dense(
                    f"perplexity-{text}-{setting}",
                    f"Perplexity on {text} at {setting}.{missing}",
                    finite,
                    before.finite[0] if before.finite else None,
                    f"perplexity on {text}",
                    numbers.perplexity,
                )
            )
    compared = any(len(variants) > 1 for variants in by_setting(model.originals).values())
    lower = "Lower is better; the lowest of each sparsity is bold." if compared else ""
    return Part("Results", lower, [overview(model)], pictures)


def overview(model: Model) -> Table:
    """Perplexity, layer loss and time of each variant; the lowest of a setting are marked."""
    texts = scores.texts(model)
    columns = [Column("method", numeric=False)]
    columns += [Column(text, scores.windows(model, text)) for text in texts]
    columns += [Column("relative layer loss"), Column("seconds"), Column("runs")]
    groups: dict[str, list[Row]] = {}
    if model.dense:
        before = [scores.perplexities(model.before, text) for text in texts]
        cells = [values.text(numbers.perplexity) for values in before]
        groups[""] = [Row("dense", [*cells, "", "", ""])]
    for setting, variants in by_setting(model.variants).items():
        compared = {
            variant: [
                *(scores.perplexities(variant.runs, text) for text in texts),
                scores.relative_losses(variant.runs),
            ]
            for variant in variants
        }
        best = _lowest(compared)
        groups[setting] = [
            Row(
                variant.label,
                [
                    *(values.text(numbers.perplexity) for values in perplexities),
                    losses.text(numbers.relative_loss),
                    scores.seconds(variant.runs).text(numbers.seconds),
                    str(len(variant.runs)),
                ],
                variant.method,
                best[variant],
            )
            for variant, (*perplexities, losses) in compared.items()
        ]
    many = any(len(variant.runs) > 1 for variant in model.variants)
    spread = " Mean ± standard deviation where there are several runs." if many else ""
    what = "Perplexity, relative layer loss" if texts else "Relative layer loss"
    return Table(f"{what} and seconds of the run.{spread}", columns, groups)


def zero_shot(model: Model) -> Part:
    """Tasks before and after."""
    fractions = [metric for metric in scores.task_metrics(model) if metric.is_fraction]

    def percents(runs: Sequence[Run]) -> dict[str, float]:
        measured = {metric.label: scores.metric_values(runs, metric) for metric in fractions}
        return {label: 100 * values.mean for label, values in _finite(measured).items()}

    pictures: list[Picture] = []
    for setting, variants in by_setting(model.variants).items():
        found = {variant: percents(variant.runs) for variant in variants}
        if found := {variant: values for variant, values in found.items() if values}:
            pictures.append(
                over_names(
                    f"zeroshot-{setting}",
                    f"Zero-shot results at {setting}, in percent.",
                    "%",
                    {metric.label: metric.label for metric in fractions},
                    found,
                    "{:.2f}".format,
                    dense=percents(model.before),
                    zero=False,
                )
            )
    return Part("Zero-shot", "", [zero_shot_table(model)], [pictures])


def zero_shot_table(model: Model) -> Table:
    """Fractions in percent, perplexities as they are."""
    metrics = scores.task_metrics(model)
    columns = [Column("method", numeric=False)]
    columns += [Column(metric.task, scores.metric_detail(model, metric)) for metric in metrics]
    has_mean = scores.has_mean_accuracy(model)
    if has_mean:
        columns.append(Column("mean", f"acc in %; acc_norm of {' and '.join(sorted(BY_LENGTH))}"))

    def cells(runs: Sequence[Run]) -> list[str]:
        found = [scores.metric_text(runs, metric) for metric in metrics]
        means = scores.mean_accuracies(runs).text(numbers.percent_points)
        return [*found, means] if has_mean else found

    groups: dict[str, list[Row]] = {}
    if model.dense:
        groups[""] = [Row("dense", cells(model.before))]
    for setting, variants in by_setting(model.variants).items():
        for variant in variants:
            if any(run.evaluation.zeroshot for run in variant.runs):
                row = Row(variant.label, cells(variant.runs), variant.method)
                groups.setdefault(setting, []).append(row)
    caption = "± standard error of one run; of several runs mean ± standard deviation."
    return Table(caption, columns, groups)


def continuations(model: Model) -> Part:
    """What the first run of each variant writes after the same words."""
    writers = [("", "dense", run) for run in model.before]
    writers += [(v.setting, v.label, v.runs[0]) for v in model.originals]
    tables: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for setting, label, run in writers:
        for text, found in run.evaluation.continuations.items():
            start = {"": [Row("prompt", [found["prompt"]])]}
            groups = tables.setdefault((text, found["prompt"]), start)
            groups.setdefault(setting, []).append(Row(label, [found["continuation"]]))
    columns = [Column("method", numeric=False), Column("text", numeric=False, prose=True)]
    return Part(
        "What the models write",
        "Always the most likely token, after the first words of the text.",
        [Table(f"On {text}", columns, rows) for (text, _), rows in tables.items()],
    )


def _finite(measured: Mapping[Key, Average]) -> dict[Key, Average]:
    """What was measured, and was finite in all runs."""
    return {key: values for key, values in measured.items() if values.is_finite}


def _lowest(compared: Mapping[Variant, Sequence[Average]]) -> dict[Variant, list[int]]:
    """For each variant the columns in which its mean is the lowest, where means differ."""
    best: dict[Variant, list[int]] = {variant: [] for variant in compared}
    for number, column in enumerate(zip(*compared.values(), strict=True)):
        finite = _finite(dict(zip(compared, column, strict=True)))
        means = {variant: values.mean for variant, values in finite.items()}
        if len(set(means.values())) > 1:
            low = min(means.values())
            for variant, mean in means.items():
                best[variant] += [number] if mean == low else []
    return best
