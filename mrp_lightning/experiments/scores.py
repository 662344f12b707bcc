"""The scores of runs: perplexities, zero-shot metrics, layer losses, seconds."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from mrp_lightning.evaluation.zeroshot import PAPER_TASKS
from mrp_lightning.experiments import numbers
from mrp_lightning.experiments.models import Result
from mrp_lightning.experiments.numbers import MISSING, Write
from mrp_lightning.experiments.runs import Run
from mrp_lightning.records.evaluation import (
    BY_LENGTH,
    UNNAMED,
    Scores,
    averaged,
    mean_accuracy,
    metrics,
    standard_error,
)


def named(text: str) -> str:
    """What a reader is told of a text to evaluate on."""
    return "the evaluation text" if text == UNNAMED else text


class Score(NamedTuple):
    """The name of a quantity that is measured.

    Attributes:
        metric: `perplexity`, `relative loss` (the mean over layers of ‖δx‖² / ‖wx‖²), `seconds` of
            the pruning, its `CPU seconds`, `accuracy` (the mean over tasks), or a metric of lm-eval
            such as `acc_norm`.
        of: The text, the task or the tasks; empty for what is of the pruning.
        context: Tokens a window, of the perplexity of a text; `None` for all others.
        zero_shot: Whether it is of tasks.
    """

    metric: str
    of: str = ""
    context: int | None = None
    zero_shot: bool = False

    @property
    def name(self) -> str:
        """Its name in the tables for programs: `accuracy/<task>` is the one that papers report."""
        if not self.zero_shot:
            return f"{self.metric}/{self.of}" if self.of else self.metric
        reported = self.metric == ("acc_norm" if self.of in BY_LENGTH else "acc")
        return f"{'accuracy' if reported else self.metric}/{self.of.removesuffix('_openai')}"

    def __str__(self) -> str:
        """As a heading, such as `perplexity wikitext2 @2048`."""
        if self.zero_shot:
            return self.of if self.metric == "accuracy" else f"{self.of} {self.metric}"
        name = " ".join([self.metric, *([self.of] if self.of not in ("", UNNAMED) else [])])
        return f"{name} @{self.context}" if self.context else name

    @property
    def in_percent(self) -> bool:
        """Whether it is a fraction, which is kept in percent."""
        return self.zero_shot and self.metric.startswith(("acc", "exact_match", "f1"))

    @property
    def write(self) -> Write:
        """How its values are written."""
        if self.in_percent:
            return numbers.points
        ways = {"relative loss": numbers.relative_loss}
        ways |= dict.fromkeys(("seconds", "CPU seconds"), numbers.seconds)
        return ways.get(self.metric, numbers.perplexity)


class Value(NamedTuple):
    """The value of a score in one run, infinite if it was not finite; fractions are in percent.

    `error` is its standard error, and `detail` says how it was measured.
    """

    value: float
    error: float | None = None
    detail: str = ""


RELATIVE_LOSS, SECONDS, CPU_SECONDS = map(Score, ("relative loss", "seconds", "CPU seconds"))


def scores(run: Run) -> dict[Score, Value]:
    """The values that were measured of a run, by their names."""
    found: dict[Score, Value] = {}
    for text, values in run.evaluation.perplexity.items():
        if "perplexity" in values:
            context = values.get("context")
            score = Score("perplexity", text, None if context is None else int(context))
            found[score] = Value(_finite(values["perplexity"]), detail=_windows(values))
    if run.report is not None:
        spent = {SECONDS: run.report.seconds, CPU_SECONDS: run.report.cpu_seconds}
        measured = {RELATIVE_LOSS: run.report.relative_loss, **spent}
        found |= {s: Value(float(value)) for s, value in measured.items() if value is not None}
    for task, values in run.evaluation.zeroshot.items():
        for metric, number in metrics(values).items():
            score = Score(metric, task, zero_shot=True)
            scale, error = 100 if score.in_percent else 1, standard_error(values, metric)
            error = None if error is None else scale * error
            found[score] = Value(scale * _finite(number), error, _samples(score, values))
    tasks = sorted(averaged(run.evaluation.zeroshot))
    if len(tasks) > 1:
        name = "average" if set(tasks) == set(PAPER_TASKS) else f"mean of {', '.join(tasks)}"
        detail = f"acc in %; acc_norm of {' and '.join(sorted(BY_LENGTH))}"
        mean = mean_accuracy(run.evaluation.zeroshot)
        score = Score("accuracy", name, zero_shot=True)
        found[score] = Value(100 * _finite(mean), detail=detail)
    return found


def measured(runs: Iterable[Run]) -> list[Score]:
    """Every score that some of the runs have, what is of the pruning at the end."""
    found = dict.fromkeys(score for run in runs for score in scores(run))
    return sorted(found, key=lambda score: not score.of)


def detail(runs: Iterable[Run], score: Score) -> str:
    """How a score was measured in the runs that have it."""
    found = dict.fromkeys(scores(run)[score].detail for run in runs if score in scores(run))
    return " or ".join(found)


def values(runs: Iterable[Run], score: Score) -> pd.Series:
    """The values of a score in the runs that have it, by their seeds."""
    having = {run: found for run in runs if (found := scores(run).get(score))}
    seeds = [run.trial.seed for run in having]
    return pd.Series([found.value for found in having.values()], seeds, dtype=float)


def mean(runs: Iterable[Run], score: Score) -> float | None:
    """The mean over the runs; infinite where a value is, `None` where there is none."""
    found = values(runs, score)
    return None if found.empty else float(found.mean())


def finite_means(results: Iterable[Result], score: Score) -> dict[Result, float]:
    """The means of the results whose values are all finite."""
    means = {result: mean(result.runs, score) for result in results}
    return {r: found for r, found in means.items() if found is not None and math.isfinite(found)}


def deviation(found: pd.Series) -> float | None:
    """The standard deviation of a sample; `None` where it is not defined."""
    return float(found.std()) if len(found) > 1 and np.isfinite(found).all() else None


def text(found: pd.Series, write: Write) -> str:
    """Mean ± standard deviation of the finite values, and how many were not finite."""
    finite = found[np.isfinite(found)]
    if finite.empty:
        return MISSING if found.empty else write(math.inf)
    written = write(float(finite.mean()))
    if (spread := deviation(finite)) is not None:
        written += f" ± {_as_precise_as(written, spread, write)}"
    lost = len(found) - len(finite)
    return f"{written} ({lost} of {len(found)} not finite)" if lost else written


def cell(runs: Sequence[Run], score: Score) -> str:
    """The mean over runs ± the standard deviation, or of one run ± its standard error."""
    found = [value for run in runs if (value := scores(run).get(score))]
    written = text(values(runs, score), score.write)
    if len(found) == 1 and math.isfinite(found[0].value) and found[0].error is not None:
        written += f" ± {score.write(found[0].error)}"
    return written


def _finite(value: float | None) -> float:
    return math.inf if value is None else float(value)


def _windows(found: Scores) -> str:
    sizes = [f"{found['windows']} windows"] if "windows" in found else []
    if "prefix" in found:
        first = found["prefix"]
        sizes.append(f"{first} tokens such as BOS before each" if first else "no BOS before them")
    return ", ".join(sizes)


def _samples(score: Score, found: Scores) -> str:
    parts = ["in %"] if score.in_percent else []
    parts += [f"{found['samples']} samples"] if "samples" in found else []
    parts += [f"{found['num_fewshot']} examples"] if found.get("num_fewshot") else []
    return ", ".join(parts)


def _as_precise_as(mean: str, deviation: float, write: Write) -> str:
    """A deviation with the decimals of its mean."""
    if "e" in mean:
        return write(deviation)
    decimals = len(mean.partition(".")[2].rstrip("%"))
    smallest = 10.0**-decimals
    if 0 < deviation < smallest / 2:
        return f"<{smallest:.{decimals}f}"
    return f"{deviation:,.{decimals}f}"
