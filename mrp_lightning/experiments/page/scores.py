"""What runs were measured to have: perplexities, layer loss, seconds, zero-shot metrics."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from mrp_lightning.experiments import numbers
from mrp_lightning.experiments.numbers import Write
from mrp_lightning.experiments.page.models import Model
from mrp_lightning.experiments.runs import Run
from mrp_lightning.experiments.summary import Average
from mrp_lightning.records.evaluation import (
    BY_LENGTH,
    averaged,
    mean_accuracy,
    metrics,
    standard_error,
)


@dataclass(frozen=True)
class Score:
    """A number that runs may have.

    Attributes:
        name: What it is of: a text, a task.
        detail: How it was measured.
        write: How it is written.
        get: The number of a run, `None` where it was not finite; a KeyError where it is missing.
        get_error: Its standard error in one run, of the same form.
        fraction: What it is called in full, if it is a metric that is shown in percent.
    """

    name: str
    detail: str
    write: Write
    get: Callable[[Run], float | None]
    get_error: Callable[[Run], float | None] | None = None
    fraction: str | None = None

    def of(self, runs: Iterable[Run]) -> Average:
        """The numbers of the runs that have one."""
        found = []
        for run in runs:
            with suppress(KeyError):
                found.append(self.get(run))
        return Average.of(found)

    def text(self, runs: Sequence[Run]) -> str:
        """The mean over runs, and how sure it is."""
        values = self.of(runs)
        text = values.text(self.write)
        if values.is_finite and len(values) == 1:
            error = None
            if self.get_error is not None:
                (error,) = (self.get_error(run) for run in runs if self.of([run]))
            text += "" if error is None else f" ± {self.write(error)}"
        return text


def perplexities(model: Model) -> list[Score]:
    """The perplexity of each text, in the order of the files."""
    texts = dict.fromkeys(text for run in model.runs for text in run.evaluation.perplexity)
    return [_perplexity(model, text) for text in texts]


def _perplexity(model: Model, text: str) -> Score:
    found = [run.evaluation.perplexity.get(text, {}) for run in model.runs]
    context, windows, prefix = (_several(str(x[key]) for x in found if key in x) for key in _SIZES)
    detail = f"context {context}, {windows} windows"
    detail += f", prefix {prefix}" if prefix else ""
    return Score(
        text, detail, numbers.perplexity, lambda run: run.evaluation.perplexity[text]["perplexity"]
    )


def _relative_loss(run: Run) -> float:
    if run.report is None or run.report.relative_loss is None:
        raise KeyError
    return run.report.relative_loss


def _seconds(run: Run) -> float:
    if run.report is None:
        raise KeyError
    return run.report.seconds


def _cpu_seconds(run: Run) -> float:
    if run.report is None or run.report.cpu_seconds is None:
        raise KeyError
    return run.report.cpu_seconds


_SIZES = ("context", "windows", "prefix")
RELATIVE_LOSS = Score("relative layer loss", "", numbers.relative_loss, _relative_loss)
SECONDS = Score("seconds", "", numbers.seconds, _seconds)
CPU_SECONDS = Score("CPU seconds", "of all threads", numbers.seconds, _cpu_seconds)


def zero_shot_scores(model: Model) -> list[Score]:
    """All metrics of all tasks, and the mean accuracy where it is of the same tasks in all runs."""
    measured = [run.evaluation.zeroshot for run in model.runs if run.evaluation.zeroshot]
    found = [(task, name) for tasks in measured for task in tasks for name in metrics(tasks[task])]
    scores = [_metric(model, task, name) for task, name in dict.fromkeys(found)]
    tasks = [averaged(found).keys() for found in measured]
    if tasks and len(tasks[0]) > 1 and all(names == tasks[0] for names in tasks):
        detail = f"acc in %; acc_norm of {' and '.join(sorted(BY_LENGTH))}"
        scores.append(Score("mean", detail, numbers.percent_points, _mean_accuracy))
    return scores


def _metric(model: Model, task: str, name: str) -> Score:
    found = [run.evaluation.zeroshot.get(task, {}) for run in model.runs]
    samples, shots = (
        _several(str(values[key]) for values in found if key in values)
        for key in ("samples", "num_fewshot")
    )

    is_fraction = name.startswith(("acc", "exact_match", "f1"))
    detail = f"{name} in %" if is_fraction else name
    detail += f", {samples} samples" if samples else ""
    detail += f", {shots} examples" if shots not in ("", "0") else ""
    return Score(
        task,
        detail,
        numbers.percent_points if is_fraction else numbers.perplexity,
        lambda run: run.evaluation.zeroshot[task][name],
        lambda run: standard_error(run.evaluation.zeroshot[task], name),
        f"{task} {name}" if is_fraction else None,
    )


def _mean_accuracy(run: Run) -> float | None:
    if not run.evaluation.zeroshot:
        raise KeyError
    return mean_accuracy(run.evaluation.zeroshot)


def _several(values: Iterable[str]) -> str:
    return " or ".join(sorted(set(values)))
