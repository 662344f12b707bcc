"""What the paper claims, and whether the runs of a sweep bear it out."""

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from mrp_lightning.experiments.sweep.plan import Run, short
from mrp_lightning.experiments.sweep.results import Result, rounded


@dataclass(frozen=True)
class Finding:
    """One case of a claim.

    Attributes:
        claim: What the paper says.
        where: Model, setting and text.
        holds: Whether it is so here.
        evidence: The figures.
    """

    claim: str
    where: str
    holds: bool
    evidence: str


@dataclass(frozen=True)
class Gain:
    """By how much one run's perplexity is below another's: mean and deviation over the seeds."""

    mean: float
    deviation: float | None
    ratio: float

    def __str__(self) -> str:
        size = rounded(abs(self.mean))
        return size if self.deviation is None else f"{size} ± {rounded(self.deviation)}"


def findings(results: Sequence[Result]) -> list[Finding]:
    """Every claim in every case that the results can decide."""
    by_run = {result.run: result for result in results}
    texts = dict.fromkeys(
        name for r in results for name in r.measures if name.startswith("perplexity/")
    )
    found: list[Finding] = []
    for text in texts:
        cases = list(
            dict.fromkeys(
                replace(run, seed=None, method="SM")
                for run in by_run
                if run.method and not run.changed
            )
        )
        for case in cases:
            found += _better_than_sparsegpt(by_run, case, text)
        for case in cases:
            found += _mm_is_sm(by_run, case, text)
        found += _grows_with_sparsity(by_run, cases, text)
        found += _ablations(by_run, text)
    return found


def gain(by_run: dict[Run, Result], worse: Run, better: Run, text: str) -> Gain | None:
    """What `better` gains over `worse`, seed by seed; `None` where they cannot be compared."""
    pairs = [
        (result.measures[text], other.measures[text])
        for run, result in by_run.items()
        if run == replace(worse, seed=run.seed)
        and (other := by_run.get(replace(better, seed=run.seed))) is not None
        and text in result.measures.keys() & other.measures.keys()
    ]
    if not pairs or not all(map(math.isfinite, itertools.chain(*pairs))):
        return None
    gains = [a - b for a, b in pairs]
    ratio = statistics.fmean(a for a, _ in pairs) / statistics.fmean(b for _, b in pairs)
    spread = statistics.stdev(gains) if len(gains) > 1 else None
    return Gain(statistics.fmean(gains), spread, ratio)


def _better_than_sparsegpt(by_run: dict[Run, Result], case: Run, text: str) -> Iterable[Finding]:
    found = gain(by_run, replace(case, method="SS"), case, text)
    if found is None:
        return
    sign = "lower" if found.mean > 0 else "higher"
    yield Finding(
        "SM is better than SparseGPT",
        _where(case, text),
        found.mean > (found.deviation or 0),
        f"perplexity {sign} by {found}, factor {1 / found.ratio:.3f}",
    )


def _mm_is_sm(by_run: dict[Run, Result], case: Run, text: str) -> Iterable[Finding]:
    over_sparsegpt = gain(by_run, replace(case, method="SS"), case, text)
    between = gain(by_run, case, replace(case, method="MM"), text)
    if over_sparsegpt is None or between is None:
        return
    sign = "lower" if between.mean > 0 else "higher"
    yield Finding(
        "MM is as good as SM: they differ by less than a fifth of SM's gain over SparseGPT",
        _where(case, text),
        abs(between.mean) < 0.2 * over_sparsegpt.mean,
        f"perplexity of MM {sign} by {between}; SM's gain {over_sparsegpt}",
    )


def _grows_with_sparsity(
    by_run: dict[Run, Result], cases: Sequence[Run], text: str
) -> Iterable[Finding]:
    percents: dict[Run, list[Run]] = {}
    for case in cases:
        if case.setting.endswith("%"):
            percents.setdefault(replace(case, setting=""), []).append(case)
    for same, settings in percents.items():
        ordered = sorted(settings, key=lambda case: float(case.setting[:-1]))
        gains = [(c.setting, gain(by_run, replace(c, method="SS"), c, text)) for c in ordered]
        ratios = [(setting, found.ratio) for setting, found in gains if found]
        if len(ratios) < 2:
            continue
        yield Finding(
            "The gap to SparseGPT grows with sparsity",
            _where(same, text),
            all(a[1] < b[1] for a, b in itertools.pairwise(ratios)),
            "perplexity SparseGPT / SM: " + ", ".join(f"{s} {ratio:.3f}" for s, ratio in ratios),
        )


def _ablations(by_run: dict[Run, Result], text: str) -> Iterable[Finding]:
    claims = {
        "damping": ("Smaller damping is better", False),
        "num_samples": ("More calibration samples are better", True),
    }
    lines: dict[tuple[Run, str], dict[float, list[float]]] = {}
    for run, result in by_run.items():
        if run.changed and short(run.changed[0]) in claims and text in result.measures:
            key = replace(run, seed=None, changed=None), short(run.changed[0])
            values = lines.setdefault(key, {})
            values.setdefault(float(run.changed[1]), []).append(result.measures[text])
    for (run, option), values in lines.items():
        claim, more_is_better = claims[option]
        ordered = sorted(values, reverse=not more_is_better)  # from the worst by the claim
        means = [statistics.fmean(values[value]) for value in ordered]
        yield Finding(
            claim,
            f"{_where(run, text)}, {run.method}",
            all(a >= b for a, b in itertools.pairwise(means)),
            "perplexity at "
            + ", ".join(
                f"{value:g}: {rounded(mean)}" for value, mean in zip(ordered, means, strict=True)
            ),
        )


def _where(run: Run, text: str) -> str:
    size = "all" if run.block_size is None else run.block_size
    parts = [run.model, run.setting, f"S={size}", text.partition("/")[2].replace("text", "")]
    return ", ".join(part for part in parts if part)
