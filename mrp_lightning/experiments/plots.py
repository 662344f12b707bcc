"""Ablations as pictures: perplexity over the option that was varied."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mrp_lightning.experiments.page.drawing import PAPER, STYLE, looks_of_methods
from mrp_lightning.experiments.summary import Average, Measure, Summary
from mrp_lightning.experiments.trials import Change, Trial


def write(summary: Summary, directory: Path) -> list[Path]:
    """Write one SVG a model, setting and varied option: a panel a text, a line a method.

    Returns:
        The paths of the files.
    """
    groups: dict[tuple[str, str, str], list[Trial]] = {}
    for trial in summary:
        if trial.changed:
            groups.setdefault((trial.model, trial.setting, trial.changed.key), []).append(trial)
    paths = []
    for (model, setting, key), trials in groups.items():
        name = f"{model}-{trials[0].setting_name}-{key.rpartition('.')[2]}.svg"
        measures = [m for m in summary[trials[0]] if m.is_perplexity]
        directory.mkdir(parents=True, exist_ok=True)
        with matplotlib.rc_context(STYLE):
            figure = Figure(figsize=(4.8 * len(measures), 3.4), layout="constrained")
            panels = figure.subplots(1, len(measures), squeeze=False)[0]
            for axes, measure in zip(panels, measures, strict=True):
                _draw(axes, {t: summary[t] for t in trials if measure in summary[t]}, measure)
                axes.set_title(f"{model}, {setting}")
            figure.savefig(directory / name, facecolor=PAPER, metadata={"Date": None})
        paths.append(directory / name)
    return paths


def _draw(axes: Axes, summary: Summary, measure: Measure) -> None:
    changes = list(dict.fromkeys(trial.changed for trial in summary if trial.changed))
    place = _places(axes, changes)
    methods = {trial.label: trial.method for trial in summary if trial.method}
    looks = looks_of_methods(list(methods.values()))
    for label, look in zip(methods, looks, strict=True):
        line = sorted(
            (place[trial.changed], Average(found[measure].values()))
            for trial, found in summary.items()
            if trial.label == label and trial.changed
        )
        values, averages = zip(*line, strict=True)
        errors = [found.deviation or 0.0 for found in averages]
        means = [found.mean for found in averages]
        axes.errorbar(values, means, errors, capsize=3, label=label, **look.line)
    axes.set(xlabel=changes[0].option, ylabel=str(measure))
    axes.legend()


def _places(axes: Axes, changes: Sequence[Change]) -> dict[Change, float]:
    """Where the values stand: numbers on a scale, anything else side by side in their order."""
    numbers = {change: change.number for change in changes if change.number is not None}
    if len(numbers) < len(changes):
        axes.set_xticks(range(len(changes)), [change.value_text for change in changes])
        return {change: float(i) for i, change in enumerate(changes)}
    if min(numbers.values()) > 0:
        axes.set_xscale("log")
        axes.set_xticks(list(numbers.values()), [change.value_text for change in changes])
        axes.minorticks_off()
    return numbers
