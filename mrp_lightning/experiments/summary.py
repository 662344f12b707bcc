"""What runs found, score by score, and the means of them over the calibration sets."""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from mrp_lightning.evaluation.zeroshot import PAPER_TASKS
from mrp_lightning.experiments import numbers
from mrp_lightning.experiments.numbers import MISSING, Write
from mrp_lightning.experiments.runs import Run
from mrp_lightning.experiments.trials import Trial
from mrp_lightning.records.evaluation import Scores, accuracy

TASKS = {task: task.removesuffix("_openai") for task in PAPER_TASKS}
"""The tasks of the paper's average, by their names in lm-eval."""


class Average(tuple[float, ...]):
    """The values of a score over several runs; one that was not finite is infinite."""

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Average":
        """The values as `evaluation.json` has them, in which `None` was not finite."""
        return cls(math.inf if value is None else value for value in values)

    @property
    def finite(self) -> list[float]:
        """The values that are finite."""
        return [value for value in self if math.isfinite(value)]

    @property
    def is_finite(self) -> bool:
        """Whether there are values, all of them finite."""
        return 0 < len(self) == len(self.finite)

    @property
    def mean(self) -> float:
        """The mean; infinite unless all values are finite."""
        return statistics.fmean(self) if self.is_finite else math.inf

    @property
    def deviation(self) -> float | None:
        """The standard deviation of a sample; `None` where it is not defined."""
        return statistics.stdev(self) if self.is_finite and len(self) > 1 else None

    def text(self, write: Write) -> str:
        """Mean ± standard deviation of the finite values, and how many were not finite."""
        finite = Average(self.finite)
        if not finite:
            return write(math.inf) if self else MISSING
        text = write(finite.mean)
        if finite.deviation is not None:
            text += f" ± {_as_precise_as(text, finite.deviation, write)}"
        lost = len(self) - len(finite)
        return f"{text} ({lost} of {len(self)} not finite)" if lost else text


class Measure(NamedTuple):
    """What a score is of.

    Attributes:
        name: `perplexity/<text>`, `accuracy/<task>`, `relative loss` (the mean over layers of
            ‖δx‖² / ‖wx‖²), `seconds` of the pruning, or its `CPU seconds`.
        context: Tokens a window, of the perplexity of a text; `None` for all others.
    """

    name: str
    context: int | None = None

    def __str__(self) -> str:
        """As a heading, such as `perplexity wikitext2 @2048`."""
        name = self.name.removesuffix("/text").replace("/", " ")
        return f"{name} @{self.context}" if self.context else name

    @property
    def is_perplexity(self) -> bool:
        """Whether it is a perplexity."""
        return self.name.startswith("perplexity/")

    @property
    def write(self) -> Write:
        """How its scores are written."""
        named = {"relative loss": numbers.relative_loss}
        named |= dict.fromkeys(("seconds", "CPU seconds"), numbers.seconds)
        if self.name.startswith("accuracy/"):
            return lambda value: numbers.percent_points(None if value is None else value / 100)
        return named.get(self.name, numbers.perplexity)


Summary = Mapping[Trial, Mapping[Measure, Mapping[int | None, float]]]
"""Scores of trials without a seed, by measure and seed; one that was not finite is infinite."""


def scores(run: Run) -> dict[Measure, float]:
    """What a run found; accuracies are in percent."""
    found: dict[Measure, float | None] = {
        Measure(f"perplexity/{text}", _context(values)): values.get("perplexity")
        for text, values in run.evaluation.perplexity.items()
    }
    found |= _zeroshot(run.evaluation.zeroshot)
    if run.report is not None:
        found[Measure("relative loss")] = run.report.relative_loss
        found[Measure("seconds")] = run.report.seconds
        if run.report.cpu_seconds is not None:
            found[Measure("CPU seconds")] = run.report.cpu_seconds
    return {measure: math.inf if x is None else float(x) for measure, x in found.items()}


def summarize(runs: Iterable[Run]) -> Summary:
    """The scores of runs that a sweep made. Not every run needs to have every score."""
    summary: dict[Trial, dict[Measure, dict[int | None, float]]] = {}
    for run in runs:
        assert run.finished is not None
        trial = run.finished.trial
        of_trial = summary.setdefault(replace(trial, seed=None), {})
        for measure, score in scores(run).items():
            of_trial.setdefault(measure, {})[trial.seed] = score
    return summary


def _context(values: Scores) -> int | None:
    context = values.get("context")
    return None if context is None else int(context)


def _zeroshot(found: Mapping[str, Scores]) -> dict[Measure, float | None]:
    measured: dict[Measure, float | None] = {}
    for task, values in found.items():
        name = TASKS.get(task, task)
        if "perplexity" in values:
            measured[Measure(f"perplexity/{name}")] = values["perplexity"]
        if (fraction := accuracy(task, values)) is not None:
            measured[Measure(f"accuracy/{name}")] = 100 * fraction
    averaged = [measured.get(Measure(f"accuracy/{name}")) for name in TASKS.values()]
    known = [score for score in averaged if score is not None]
    if len(known) == len(averaged):
        measured[Measure("accuracy/average")] = statistics.fmean(known)
    return measured


def _as_precise_as(mean: str, deviation: float, write: Write) -> str:
    """A deviation with the decimals of its mean."""
    if "e" in mean:
        return write(deviation)
    decimals = len(mean.partition(".")[2].rstrip("%"))
    smallest = 10.0**-decimals
    if 0 < deviation < smallest / 2:
        return f"<{smallest:.{decimals}f}"
    return f"{deviation:,.{decimals}f}"
