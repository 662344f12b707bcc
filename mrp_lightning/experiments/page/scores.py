"""What models can do, as `evaluation.json` has it, over runs."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mrp_lightning.evaluation.records import accuracy, mean_accuracy
from mrp_lightning.experiments.page import quantities
from mrp_lightning.experiments.page.models import Model
from mrp_lightning.experiments.page.runs import Run


class Metric(NamedTuple):
    """A number that a zero-shot task gives."""

    task: str
    name: str

    @property
    def label(self) -> str:
        """Both names."""
        return f"{self.task} {self.name}"

    @property
    def is_fraction(self) -> bool:
        """Whether it is shown in percent."""
        return self.name.startswith(("acc", "exact_match", "f1"))


def texts(model: Model) -> list[str]:
    """Texts that perplexity was measured on, in the order of the files."""
    return list(dict.fromkeys(t for run in model.runs for t in run.evaluation.perplexity))


def perplexities(runs: Iterable[Run], text: str) -> list[float | None]:
    """Of the runs in which it was measured; `None` was not finite."""
    found = (run.evaluation.perplexity.get(text) for run in runs)
    return [figures.get("perplexity") for figures in found if figures is not None]


def windows(model: Model, text: str) -> str:
    """The context length, which is part of every perplexity, and how much text it is of."""
    found = [run.evaluation.perplexity.get(text) for run in model.runs]
    lengths = [
        " or ".join(sorted({str(figures.get(key)) for figures in found if figures is not None}))
        for key in ("context", "windows")
    ]
    return f"context {lengths[0]}, {lengths[1]} windows"


def task_metrics(model: Model) -> list[Metric]:
    """All that were measured, in the order of the files."""
    found: dict[Metric, None] = {}
    for run in model.runs:
        for task, figures in run.evaluation.zeroshot.items():
            for name in figures:
                if name not in ("samples", "num_fewshot") and not name.endswith("_stderr"):
                    found[Metric(task, name)] = None
    return list(found)


def metric_values(runs: Iterable[Run], metric: Metric) -> list[float | None]:
    """Of the runs in which it was measured; `None` was not finite."""
    found = (run.evaluation.zeroshot.get(metric.task, {}) for run in runs)
    return [figures[metric.name] for figures in found if metric.name in figures]


def metric_text(runs: Sequence[Run], metric: Metric) -> str:
    """The mean over runs, and how sure it is."""
    write = percent_points if metric.is_fraction else quantities.perplexity
    values = metric_values(runs, metric)
    text = quantities.spread(values, write)
    if len(values) == 1 and values[0] is not None:
        (run,) = (run for run in runs if metric_values([run], metric))
        error = run.evaluation.zeroshot[metric.task].get(f"{metric.name}_stderr")
        text += "" if error is None else f" ± {write(error)}"
    return text


def mean_accuracies(runs: Iterable[Run]) -> list[float | None]:
    """Over the tasks of a run, for the runs in which tasks were measured."""
    return [mean_accuracy(run.evaluation.zeroshot) for run in runs if run.evaluation.zeroshot]


def has_mean_accuracy(model: Model) -> bool:
    """Whether there is more than one task to take it over, the same in all runs."""
    measured = [run.evaluation.zeroshot for run in model.runs if run.evaluation.zeroshot]
    tasks = [{t for t, figures in x.items() if accuracy(t, figures) is not None} for x in measured]
    return bool(tasks) and len(tasks[0]) > 1 and all(found == tasks[0] for found in tasks)


def metric_detail(model: Model, metric: Metric) -> str:
    """What it is called, its unit, and how many samples and examples it was measured with."""
    found = [run.evaluation.zeroshot.get(metric.task) for run in model.runs]
    numbers = {
        key: sorted({str(figures[key]) for figures in found if figures and key in figures})
        for key in ("samples", "num_fewshot")
    }
    detail = f"{metric.name} in %" if metric.is_fraction else metric.name
    if numbers["samples"]:
        detail += f", {' or '.join(numbers['samples'])} samples"
    if numbers["num_fewshot"] not in ([], ["0"]):
        detail += f", {' or '.join(numbers['num_fewshot'])} examples"
    return detail


def percent_points(value: float | None) -> str:
    """A fraction in percent, without the sign."""
    return "not finite" if value is None else f"{100 * value:.2f}"
