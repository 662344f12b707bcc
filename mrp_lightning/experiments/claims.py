"""What the paper claims, and whether the runs of a sweep bear it out."""

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from mrp_lightning.experiments.numbers import number, perplexity
from mrp_lightning.experiments.summary import Average, Measure, Summary
from mrp_lightning.experiments.trials import Trial


@dataclass(frozen=True)
class Finding:
    """One case of a claim.

    Attributes:
        claim: What the paper says.
        where: Model, setting and text.
        holds: Whether it is so here.
        evidence: The numbers that say so.
    """

    claim: str
    where: str
    holds: bool
    evidence: str


class Gain(NamedTuple):
    """By how much the perplexity of one trial is below that of another.

    Attributes:
        seeds: The difference for each seed.
        ratio: The mean of the trial that should be worse divided by that of the other.
    """

    seeds: Average
    ratio: float

    @property
    def sign(self) -> str:
        """What the perplexity of the better trial is."""
        return "lower" if self.seeds.mean > 0 else "higher"

    def __str__(self) -> str:
        sign = 1 if self.seeds.mean > 0 else -1
        return Average(sign * gain for gain in self.seeds).text(number)


def findings(summary: Summary) -> list[Finding]:
    """Every claim in every case that the runs can decide."""
    texts = dict.fromkeys(m for found in summary.values() for m in found if m.is_perplexity)
    pruned = [trial for trial in summary if trial.method and not (trial.changed or trial.recipe)]
    found: list[Finding] = []
    for text in texts:
        gains = {}  # of SM over SparseGPT
        for case in dict.fromkeys(replace(trial, method="SM") for trial in pruned):
            if over := gain(summary, replace(case, method="SS"), case, text):
                gains[case] = over
        found += _better_than_sparsegpt(gains, text)
        found += _mm_is_sm(summary, gains, text)
        found += _grows_with_sparsity(gains, text)
        found += _ablations(summary, text)
    return found


def gain(summary: Summary, worse: Trial, better: Trial, text: Measure) -> Gain | None:
    """What `better` gains over `worse`, seed by seed; `None` where they cannot be compared."""
    high, low = (summary.get(trial, {}).get(text, {}) for trial in (worse, better))
    pairs = [(high[seed], low[seed]) for seed in high if seed in low]
    if not pairs or not all(map(math.isfinite, itertools.chain(*pairs))):
        return None
    ratio = statistics.fmean(a for a, _ in pairs) / statistics.fmean(b for _, b in pairs)
    return Gain(Average(a - b for a, b in pairs), ratio)


def _better_than_sparsegpt(gains: Mapping[Trial, Gain], text: Measure) -> Iterator[Finding]:
    for case, over in gains.items():
        yield Finding(
            "SM is better than SparseGPT",
            _where(case, text),
            over.seeds.mean > (over.seeds.deviation or 0),
            f"perplexity {over.sign} by {over}, factor {1 / over.ratio:.3f}",
        )


def _mm_is_sm(summary: Summary, gains: Mapping[Trial, Gain], text: Measure) -> Iterator[Finding]:
    for case, over in gains.items():
        if between := gain(summary, case, replace(case, method="MM"), text):
            yield Finding(
                "MM is as good as SM: they differ by less than a fifth of SM's gain over SparseGPT",
                _where(case, text),
                abs(between.seeds.mean) < 0.2 * over.seeds.mean,
                f"perplexity of MM {between.sign} by {between}; SM's gain {over}",
            )


def _grows_with_sparsity(gains: Mapping[Trial, Gain], text: Measure) -> Iterator[Finding]:
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
                _where(same, text),
                all(a[1] < b[1] for a, b in itertools.pairwise(ordered)),
                "perplexity SparseGPT / SM: "
                + ", ".join(f"{percent:g}% {ratio:.3f}" for percent, ratio in ordered),
            )


def _ablations(summary: Summary, text: Measure) -> Iterator[Finding]:
    claims = {
        "damping": ("Smaller damping is better", False),
        "num_samples": ("More calibration samples are better", True),
    }
    lines: dict[tuple[Trial, str], dict[float, float]] = {}
    for trial, found in summary.items():
        change = trial.changed
        if change and change.option in claims and change.number is not None and text in found:
            line = lines.setdefault((replace(trial, changed=None), change.option), {})
            line[change.number] = Average(found[text].values()).mean
    for (trial, option), line in lines.items():
        if len(line) < 2:
            continue
        claim, more_is_better = claims[option]
        ordered = sorted(line.items(), reverse=not more_is_better)  # from the worst by the claim
        yield Finding(
            claim,
            f"{_where(trial, text)}, {trial.recipe or trial.method}",
            all(a[1] >= b[1] for a, b in itertools.pairwise(ordered)),
            "perplexity at " + ", ".join(f"{value:g}: {perplexity(x)}" for value, x in ordered),
        )


def _where(trial: Trial, text: Measure) -> str:
    size = f"S={trial.columns}" if trial.columns else ""
    name = text.name.partition("/")[2].replace("text", "")
    parts = [trial.model, trial.setting, size, name]
    return ", ".join(part for part in parts if part)
