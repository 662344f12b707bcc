"""The claims of the paper, and whether the runs of a sweep bear them out."""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from pages.parts import number_of

from mrp_lightning.commands.numbers import number, perplexity
from mrp_lightning.experiments.groups import ModelRuns
from mrp_lightning.experiments.pictures import Part
from mrp_lightning.experiments.scores import Table, deviation, scores_of, text
from mrp_lightning.records.evaluation import UNNAMED

_CASE = ["model", "setting", "size"]
_ABLATIONS = {
    "damping": ("Smaller damping is better", False),
    "num_samples": ("More calibration samples are better", True),
}


class Finding(NamedTuple):
    """One case of a claim: statement, subject, whether it holds, and the numbers."""

    claim: str
    where: str
    holds: bool
    evidence: str


def claims_part(models: Sequence[ModelRuns]) -> list[Part]:
    """Return every claim with its cases; `None` if the runs decide no case."""
    decided = findings(models)
    tables = []
    for claim in dict.fromkeys(finding.claim for finding in decided):
        cases = [finding for finding in decided if finding.claim == claim]
        held = sum(finding.holds for finding in cases)
        rows = [("", "yes" if f.holds else "no", f.where, f.evidence) for f in cases]
        caption = f"{claim}: so in {held} of {len(cases)} cases."
        header = ("holds", "where", "evidence")
        tables.append(Table.of_rows(caption, header, rows, group="claim", kind="text"))
    return [Part("What the paper claims", tables=tables)] if tables else []


def findings(models: Sequence[ModelRuns]) -> list[Finding]:
    """Yield every claim in every case that the runs of sweeps can decide."""
    rows = [
        {
            "model": trial.model,
            "setting": trial.setting,
            "size": f"S={trial.columns}" if trial.columns else "",
            "text": "" if score.of == UNNAMED else score.of,
            "context": score.context or 0,
            "how": trial.recipe or trial.method,
            "option": trial.changed.option if trial.changed else "",
            "value": number_of(trial.changed),
            "is_plain": not (trial.changed or trial.recipe),
            "seed": -1 if trial.seed is None else trial.seed,
            "perplexity": entry["value"],
        }
        for model in models
        for group in model.groups
        for run in group.runs
        if (trial := run.trial).model
        for entry in scores_of(run)
        if (score := entry["score"]).metric == "perplexity"
    ]
    if not rows:
        return []
    table = pd.DataFrame(rows)
    decided: list[Finding] = []
    for (name, _), of_text in table.groupby(["text", "context"], sort=False):
        plain = of_text[of_text["is_plain"]]
        decided += _of_methods(plain, str(name)) if len(plain) else []
        decided += _ablations(of_text[of_text["value"].notna()], str(name))
    return decided


def _of_methods(plain: pd.DataFrame, name: str) -> Iterator[Finding]:
    """Test the claims about SM, seed by seed where both methods have a perplexity."""
    by_method = plain.pivot_table("perplexity", [*_CASE, "seed"], "how", "first", sort=False)
    cases = dict(list(by_method.groupby(level=_CASE, sort=False)))
    gains = {case: gain for case, of in cases.items() if (gain := _gain(of, "SS", "SM"))}
    for case, gain in gains.items():
        yield Finding(
            "SM is better than SparseGPT",
            _where(*case, name),
            gain.mean > gain.deviation,
            f"perplexity {gain.sign} by {gain.words}, factor {1 / gain.ratio:.3f}",
        )
    for case, gain in gains.items():
        if between := _gain(cases[case], "SM", "MM"):
            yield Finding(
                "MM is as good as SM: they differ by less than a fifth of SM's gain over SparseGPT",
                _where(*case, name),
                abs(between.mean) < 0.2 * gain.mean,
                f"perplexity of MM {between.sign} by {between.words}; SM's gain {gain.words}",
            )
    percents: dict[tuple[str, str], dict[float, float]] = {}
    for (model, setting, size), gain in gains.items():
        if setting.endswith("%"):
            percents.setdefault((model, size), {})[float(setting[:-1])] = gain.ratio
    for (model, size), ratios in percents.items():
        ordered = sorted(ratios.items())
        if len(ordered) > 1:
            listed = ", ".join(f"{percent:g}% {ratio:.3f}" for percent, ratio in ordered)
            yield Finding(
                "The gap to SparseGPT grows with sparsity",
                _where(model, size, name),
                all(a[1] < b[1] for a, b in itertools.pairwise(ordered)),
                f"perplexity SparseGPT / SM: {listed}",
            )


class _Gain(NamedTuple):
    """The gain of one method over another: how much lower its perplexity is.

    `mean` and `deviation` are over the seeds, `ratio` is that of the means, and `words` is the
    difference without its `sign`.
    """

    mean: float
    deviation: float
    ratio: float
    sign: str
    words: str


def _gain(case: pd.DataFrame, worse: str, better: str) -> _Gain | None:
    """Return the gain of one method over another; `None` where they cannot be compared."""
    if not {worse, better} <= set(case):
        return None
    both = case[[worse, better]].dropna()
    if both.empty or not np.isfinite(both).all(axis=None):
        return None
    over = both[worse] - both[better]
    sign, size = ("lower", over) if over.mean() > 0 else ("higher", -over)
    ratio = both[worse].mean() / both[better].mean()
    return _Gain(over.mean(), deviation(over) or 0.0, ratio, sign, text(size, number))


def _ablations(varied: pd.DataFrame, name: str) -> Iterator[Finding]:
    """Test the claims about options, from the value that a claim calls the worst to the best."""
    for (*case, how, option), of in varied.groupby([*_CASE, "how", "option"], sort=False):
        means = of.groupby("value")["perplexity"].mean()
        if option in _ABLATIONS and len(means) > 1:
            claim, more_is_better = _ABLATIONS[option]
            ordered = means.sort_index(ascending=more_is_better)
            listed = ", ".join(f"{value:g}: {perplexity(x)}" for value, x in ordered.items())
            holds = all(a >= b for a, b in itertools.pairwise(ordered))
            yield Finding(claim, _where(*case, name, how), holds, f"perplexity at {listed}")


def _where(*parts: str) -> str:
    return ", ".join(part for part in parts if part)
