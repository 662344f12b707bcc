"""What the runs of a model found, as the page shows it: one `Average` over runs for each score."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mrp_lightning.evaluation.records import accuracy, mean_accuracy, metrics, standard_error
from mrp_lightning.experiments import numbers
from mrp_lightning.experiments.page.models import Model
from mrp_lightning.experiments.runs import Run
from mrp_lightning.experiments.summary import Average


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
    """The texts that perplexity was measured on, in the order of the files."""
    return list(dict.fromkeys(t for run in model.runs for t in run.evaluation.perplexity))


def perplexities(runs: Iterable[Run], text: str) -> Average:
    """The perplexities of the runs in which it was measured."""
    found = (run.evaluation.perplexity.get(text) for run in runs)
    return Average.of(values.get("perplexity") for values in found if values is not None)


def relative_losses(runs: Iterable[Run]) -> Average:
    """The relative layer losses of the runs that pruned a layer."""
    found = (run.report.relative_loss for run in runs if run.report)
    return Average(loss for loss in found if loss is not None)


def seconds(runs: Iterable[Run]) -> Average:
    """The seconds of the runs that pruned."""
    return Average(run.report.seconds for run in runs if run.report)


def windows(model: Model, text: str) -> str:
    """The context length, which is part of every perplexity, and how much text it is of."""
    found = [run.evaluation.perplexity.get(text) for run in model.runs]
    lengths = [
        " or ".join(sorted({str(values.get(key)) for values in found if values is not None}))
        for key in ("context", "windows")
    ]
    return f"context {lengths[0]}, {lengths[1]} windows"


def task_metrics(model: Model) -> list[Metric]:
    """All metrics that were measured, in the order of the files."""
    return list(
        dict.fromkeys(
            Metric(task, name)
            for run in model.runs
            for task, values in run.evaluation.zeroshot.items()
            for name in metrics(values)
        )
    )


def metric_values(runs: Iterable[Run], metric: Metric) -> Average:
    """The values of the runs in which the metric was measured."""
    found = (run.evaluation.zeroshot.get(metric.task, {}) for run in runs)
    return Average.of(values[metric.name] for values in found if metric.name in values)


def metric_text(runs: Sequence[Run], metric: Metric) -> str:
    """The mean over runs, and how sure it is."""
    write = numbers.percent_points if metric.is_fraction else numbers.perplexity
    values = metric_values(runs, metric)
    text = values.text(write)
    if values.is_finite and len(values) == 1:
        (run,) = (run for run in runs if metric_values([run], metric))
        error = standard_error(run.evaluation.zeroshot[metric.task], metric.name)
        text += "" if error is None else f" ± {write(error)}"
    return text


def mean_accuracies(runs: Iterable[Run]) -> Average:
    """The means over the tasks of a run, for the runs in which tasks were measured."""
    found = (run.evaluation.zeroshot for run in runs)
    return Average.of(mean_accuracy(zeroshot) for zeroshot in found if zeroshot)


def has_mean_accuracy(model: Model) -> bool:
    """Whether there is more than one task to take it over, the same in all runs."""
    measured = [run.evaluation.zeroshot for run in model.runs if run.evaluation.zeroshot]
    tasks = [{t for t, values in x.items() if accuracy(t, values) is not None} for x in measured]
    return bool(tasks) and len(tasks[0]) > 1 and all(found == tasks[0] for found in tasks)


def metric_detail(model: Model, metric: Metric) -> str:
    """The metric's name and unit, and how many samples and examples it was measured with."""
    found = [run.evaluation.zeroshot.get(metric.task) for run in model.runs]
    sizes = {
        key: sorted({str(values[key]) for values in found if values and key in values})
        for key in ("samples", "num_fewshot")
    }
    detail = f"{metric.name} in %" if metric.is_fraction else metric.name
    if sizes["samples"]:
        detail += f", {' or '.join(sizes['samples'])} samples"
    if sizes["num_fewshot"] not in ([], ["0"]):
        detail += f", {' or '.join(sizes['num_fewshot'])} examples"
    return detail
