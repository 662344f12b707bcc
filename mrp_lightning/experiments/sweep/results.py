"""What the runs of a sweep gave: their measures, and those averaged over the calibration sets."""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mrp_lightning.evaluation.records import Figures, accuracy, read
from mrp_lightning.evaluation.zeroshot import PAPER_TASKS
from mrp_lightning.experiments.sweep.execute import NAME
from mrp_lightning.experiments.sweep.plan import Run

TASKS = {task: task.removesuffix("_openai") for task in PAPER_TASKS}
"""The tasks of the paper's average, by their names in lm-eval."""


@dataclass(frozen=True)
class Result:
    """What one run gave.

    Attributes:
        run: Which one.
        measures: By name: `perplexity/<text>`, `accuracy/<task>` in percent, `relative loss` (mean
            over layers of ‖δx‖² / ‖wx‖²) and `seconds` of the walk.
        contexts: Tokens a window, by the name of the perplexity; zero-shot ones have none.
        machine: What it was made on.
    """

    run: Run
    measures: dict[str, float]
    contexts: dict[str, int]
    machine: str

    def __str__(self) -> str:
        figures = ", ".join(f"{name} {rounded(value)}" for name, value in self.measures.items())
        return f"{self.run.directory}: {figures}"


@dataclass(frozen=True)
class Average:
    """A measure over the calibration sets.

    Attributes:
        mean: Over the seeds.
        deviation: Standard deviation of a sample; `None` for a single value.
        count: How many.
        context: Tokens a window, of the perplexity of a text.
    """

    mean: float
    deviation: float | None
    count: int
    context: int | None = None

    def __str__(self) -> str:
        text = rounded(self.mean)
        if self.deviation is None:
            return text
        digits = len(text.partition(".")[2])
        return f"{text} ± {self.deviation:.{digits}f}"


def read_result(directory: Path) -> Result:
    """The result in the directory of a finished run."""
    content = json.loads((directory / NAME).read_text("utf-8"))
    changed = content["run"].pop("changed")
    run = Run(**content["run"], changed=tuple(changed) if changed else None)
    evaluation = read(directory)
    texts = {f"perplexity/{text}": found for text, found in evaluation.perplexity.items()}
    measures: dict[str, Any] = {name: found["perplexity"] for name, found in texts.items()}
    contexts = {name: int(found["context"] or 0) for name, found in texts.items()}
    measures |= _zeroshot(evaluation.zeroshot)
    if run.method is not None:
        totals = json.loads((directory / "pruning_report.json").read_text("utf-8"))["totals"]
        measures |= {"relative loss": totals["relative_loss"], "seconds": totals["seconds"]}
    known = {name: float("inf") if v is None else float(v) for name, v in measures.items()}
    return Result(run, known, contexts, content["machine"])


def averages(results: Iterable[Result]) -> dict[Run, dict[str, Average]]:
    """Each measure over the seeds of each run; the runs have no `seed`."""
    grouped: dict[Run, list[Result]] = {}
    for result in results:
        grouped.setdefault(replace(result.run, seed=None), []).append(result)
    return {
        run: {
            name: average([r.measures[name] for r in found], found[0].contexts.get(name))
            for name in found[0].measures
        }
        for run, found in grouped.items()
    }


def average(values: Sequence[float], context: int | None = None) -> Average:
    """Mean and standard deviation."""
    spread = statistics.stdev(values) if len(values) > 1 else None
    return Average(statistics.fmean(values), spread, len(values), context)


def rounded(value: float) -> str:
    """Four digits, as far as they say something."""
    if value >= 1e4:
        return f"{value:.0e}".replace("e+0", "e").replace("e+", "e")
    return f"{value:.4f}" if value < 1 else f"{value:.{max(0, 3 - len(str(int(value))) + 1)}f}"


def _zeroshot(found: Mapping[str, Figures]) -> dict[str, Any]:
    measures: dict[str, Any] = {}
    for task, figures in found.items():
        name = TASKS.get(task, task)
        if "perplexity" in figures:
            measures[f"perplexity/{name}"] = figures["perplexity"]
        if (fraction := accuracy(task, figures)) is not None:
            measures[f"accuracy/{name}"] = 100 * fraction
    averaged = [f"accuracy/{name}" for name in TASKS.values()]
    if all(name in measures for name in averaged):
        measures["accuracy/average"] = statistics.fmean(measures[name] for name in averaged)
    return measures
