"""What the paper claims, and whether the runs of a sweep bear it out."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from mrp_lightning.experiments.models import Model, Result
from mrp_lightning.experiments.numbers import number, perplexity
from mrp_lightning.experiments.page.parts import Part, Row, Table, columns
from mrp_lightning.experiments.scores import Score, deviation, mean, measured, text, values
from mrp_lightning.experiments.trials import Trial

Results = Mapping[Trial, Result]


class Finding(NamedTuple):
    """One case of a claim: what the paper says, of what, whether it is so, and the numbers."""

    claim: str
    where: str
    holds: bool
    evidence: str


class Gain(NamedTuple):
    """By how much the perplexity of one trial is below that of another.

    Attributes:
        mean: The mean difference over the seeds.
        deviation: Its standard deviation; 0 for one seed.
        ratio: The mean of the trial that should be worse divided by that of the other.
        words: The difference, without its sign.
    """

    mean: float
    deviation: float
    ratio: float
    words: str

    @property
    def sign(self) -> str:
        """What the perplexity of the better trial is."""
        return "lower" if self.mean > 0 else "higher"


def claims_part(models: Sequence[Model]) -> list[Part]:
    """Every claim with its cases; nothing where the runs decide none."""
    found = findings(models)
    tables = []
    for claim in dict.fromkeys(finding.claim for finding in found):
        cases = [finding for finding in found if finding.claim == claim]
        held = sum(finding.holds for finding in cases)
        rows = [Row("yes" if f.holds else "no", [f.where, f.evidence]) for f in cases]
        caption = f"{claim}: so in {held} of {len(cases)} cases."
        tables.append(
            Table(caption, columns("holds:", "where:", "evidence:"), {"": rows}, group="claim")
        )
    return [Part("What the paper claims", tables=tables)] if tables else []


def findings(models: Sequence[Model]) -> list[Finding]:
    """Every claim in every case that the runs of sweeps can decide."""
    results: dict[Trial, Result] = {}
    for result in (result for model in models for result in model.rows if result.trial.model):
        results.setdefault(result.trial, result)
    scores = measured(run for result in results.values() for run in result.runs)
    found: list[Finding] = []
    for score in [score for score in scores if score.metric == "perplexity"]:
        cases = (replace(t, method="SM") for t in results if t.method and not _is_special(t))
        gains = {}  # of SM over SparseGPT
        for case in dict.fromkeys(cases):
            if over := gain(results, replace(case, method="SS"), case, score):
                gains[case] = over
        found += _better_than_sparsegpt(gains, score)
        found += _mm_is_sm(results, gains, score)
        found += _grows_with_sparsity(gains, score)
        found += _ablations(results, score)
    return found


def gain(results: Results, worse: Trial, better: Trial, score: Score) -> Gain | None:
    """What `better` gains over `worse`, seed by seed; `None` where they cannot be compared."""
    if worse not in results or better not in results:
        return None
    high, low = (values(results[trial].runs, score) for trial in (worse, better))
    seeds = high.index.intersection(low.index)
    high, low = high[seeds], low[seeds]
    if not len(seeds) or not all(map(math.isfinite, [*high, *low])):
        return None
    over = high - low
    words = text(over if over.mean() > 0 else -over, number)
    ratio = float(high.mean() / low.mean())
    return Gain(float(over.mean()), deviation(over) or 0.0, ratio, words)


def _is_special(trial: Trial) -> bool:
    return bool(trial.changed or trial.recipe)


def _better_than_sparsegpt(gains: Mapping[Trial, Gain], score: Score) -> Iterator[Finding]:
    for case, over in gains.items():
        yield Finding(
            "SM is better than SparseGPT",
            _where(case, score),
            over.mean > over.deviation,
            f"perplexity {over.sign} by {over.words}, factor {1 / over.ratio:.3f}",
        )


def _mm_is_sm(results: Results, gains: Mapping[Trial, Gain], score: Score) -> Iterator[Finding]:
    for case, over in gains.items():
        if between := gain(results, case, replace(case, method="MM"), score):
            yield Finding(
                "MM is as good as SM: they differ by less than a fifth of SM's gain over SparseGPT",
                _where(case, score),
                abs(between.mean) < 0.2 * over.mean,
                f"perplexity of MM {between.sign} by {between.words}; SM's gain {over.words}",
            )


def _grows_with_sparsity(gains: Mapping[Trial, Gain], score: Score) -> Iterator[Finding]:
    percents: dict[Trial, dict[float, float]] = {}
    for case, over in gains.items():
        if case.setting.endswith("%"):
            ratios = percents.setdefault(replace(case, setting=""), {})
            ratios[float(case.setting[:-1])] = over.ratio
    for same, ratios in percents.items():
        ordered = sorted(ratios.items())
        if len(ordered) > 1:
            yield Finding(
                "The gap to SparseGPT grows with sparsity",
                _where(same, score),
                all(a[1] < b[1] for a, b in itertools.pairwise(ordered)),
                "perplexity SparseGPT / SM: "
                + ", ".join(f"{percent:g}% {ratio:.3f}" for percent, ratio in ordered),
            )


def _ablations(results: Results, score: Score) -> Iterator[Finding]:
    claims = {
        "damping": ("Smaller damping is better", False),
        "num_samples": ("More calibration samples are better", True),
    }
    lines: dict[tuple[Trial, str], dict[float, float]] = {}
    for trial, result in results.items():
        change, average = trial.changed, mean(result.runs, score)
        if change and change.option in claims and change.number is not None and average is not None:
            line = lines.setdefault((replace(trial, changed=None), change.option), {})
            line[change.number] = average
    for (trial, option), line in lines.items():
        if len(line) < 2:
            continue
        claim, more_is_better = claims[option]
        ordered = sorted(line.items(), reverse=not more_is_better)  # from the worst by the claim
        yield Finding(
            claim,
            f"{_where(trial, score)}, {trial.recipe or trial.method}",
            all(a[1] >= b[1] for a, b in itertools.pairwise(ordered)),
            "perplexity at " + ", ".join(f"{value:g}: {perplexity(x)}" for value, x in ordered),
        )


def _where(trial: Trial, score: Score) -> str:
    size = f"S={trial.columns}" if trial.columns else ""
    name = "" if score.of == "text" else score.of
    return ", ".join(part for part in (trial.model, trial.setting, size, name) if part)
