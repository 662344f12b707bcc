"""The parts on what the models can do: perplexity, zero-shot tasks, text, before and after."""

from collections.abc import Mapping, Sequence

from mrp_lightning.experiments.page.models import Model, Variant, by_setting
from mrp_lightning.experiments.page.parts import Column, Part, Row, Table
from mrp_lightning.experiments.page.pictures import Picture, beside_dense, over_names
from mrp_lightning.experiments.page.scores import (
    CPU_SECONDS,
    RELATIVE_LOSS,
    SECONDS,
    Score,
    perplexities,
    zero_shot_scores,
)
from mrp_lightning.experiments.runs import Run


def results(model: Model) -> Part:
    """Perplexity, loss and time of all variants."""
    texts = perplexities(model)
    pictures: list[list[Picture]] = []
    for text in texts:
        pictures.append([])
        before = text.of(model.before).finite
        for setting, variants in by_setting(model.variants).items():
            measured = {variant: text.of(variant.runs) for variant in variants}
            finite = {variant: found for variant, found in measured.items() if found.is_finite}
            if len(finite) < 2:
                continue
            lost = [v.label for v, values in measured.items() if values and v not in finite]
            missing = f" Not finite: {', '.join(lost)}." if lost else ""
            pictures[-1].append(
                beside_dense(
                    f"perplexity-{text.name}-{setting}",
                    f"Perplexity on {text.name} at {setting}.{missing}",
                    finite,
                    before[0] if before else None,
                    f"perplexity on {text.name}",
                    text.write,
                )
            )
    many = any(len(variant.runs) > 1 for variant in model.variants)
    spread = " Mean ± standard deviation where there are several runs." if many else ""
    what = "Perplexity, relative layer loss" if texts else "Relative layer loss"
    times = [SECONDS, *([CPU_SECONDS] if CPU_SECONDS.of(model.runs) else [])]
    table = _table(
        f"{what} and seconds of the run.{spread}",
        model,
        [*texts, RELATIVE_LOSS, *times],
        lower_is_better=[*texts, RELATIVE_LOSS],
        count_runs=True,
    )
    compared = any(len(variants) > 1 for variants in by_setting(model.originals).values())
    lower = "Lower is better; the lowest of each sparsity is bold." if compared else ""
    return Part("Results", lower, [table], pictures)


def zero_shot(model: Model) -> Part | None:
    """Tasks before and after; nothing where there are none."""
    scores = zero_shot_scores(model)
    if not scores:
        return None
    fractions = {score.fraction: score for score in scores if score.fraction}

    def percents(runs: Sequence[Run]) -> dict[str, float]:
        found = {label: score.of(runs) for label, score in fractions.items()}
        return {label: 100 * values.mean for label, values in found.items() if values.is_finite}

    pictures: list[Picture] = []
    for setting, variants in by_setting(model.variants).items():
        found = {variant: percents(variant.runs) for variant in variants}
        if found := {variant: values for variant, values in found.items() if values}:
            pictures.append(
                over_names(
                    f"zeroshot-{setting}",
                    f"Zero-shot results at {setting}, in percent.",
                    "%",
                    {label: label for label in fractions},
                    found,
                    "{:.2f}".format,
                    dense=percents(model.before),
                    zero=False,
                )
            )
    caption = "± standard error of one run; of several runs mean ± standard deviation."
    return Part("Zero-shot", "", [_table(caption, model, scores)], [pictures])


def continuations(model: Model) -> Part | None:
    """What the first run of each variant writes after the same words, where that is recorded."""
    writers = [("", "dense", run) for run in model.before]
    writers += [(v.setting, v.label, v.runs[0]) for v in model.originals]
    tables: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for setting, label, run in writers:
        for text, found in run.evaluation.continuations.items():
            start = {"": [Row("prompt", [found["prompt"]])]}
            groups = tables.setdefault((text, found["prompt"]), start)
            groups.setdefault(setting, []).append(Row(label, [found["continuation"]]))
    if not tables:
        return None
    columns = [Column("method", numeric=False), Column("text", numeric=False, prose=True)]
    return Part(
        "What the models write",
        "Always the most likely token, after the first words of the text.",
        [Table(f"On {text}", columns, rows) for (text, _), rows in tables.items()],
    )


def _table(
    caption: str,
    model: Model,
    scores: Sequence[Score],
    *,
    lower_is_better: Sequence[Score] = (),
    count_runs: bool = False,
) -> Table:
    """Scores (columns) of the dense model and of the variants that have any."""
    columns = [Column("method", numeric=False), *(Column(s.name, s.detail) for s in scores)]
    columns += [Column("runs")] if count_runs else []
    groups: dict[str, list[Row]] = {}
    if model.dense:
        cells = [score.text(model.before) if score.of(model.before) else "" for score in scores]
        groups[""] = [Row("dense", [*cells, ""] if count_runs else cells)]
    for setting, variants in by_setting(model.variants).items():
        shown = [v for v in variants if any(score.of(v.runs) for score in scores)]
        best = _lowest(shown, lower_is_better)
        for variant in shown:
            cells = [score.text(variant.runs) for score in scores]
            cells += [str(len(variant.runs))] if count_runs else []
            row = Row(variant.label, cells, variant.method, best[variant])
            groups.setdefault(setting, []).append(row)
    return Table(caption, columns, groups)


def _lowest(
    variants: Sequence[Variant], scores: Sequence[Score]
) -> Mapping[Variant, Sequence[int]]:
    """For each variant the columns in which its mean is the lowest, where means differ."""
    best: dict[Variant, list[int]] = {variant: [] for variant in variants}
    for number, score in enumerate(scores):
        found = {variant: score.of(variant.runs) for variant in variants}
        means = {variant: values.mean for variant, values in found.items() if values.is_finite}
        if len(set(means.values())) > 1:
            for variant, mean in means.items():
                best[variant] += [number] if mean == min(means.values()) else []
    return best
