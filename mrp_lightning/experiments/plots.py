"""Ablations as pictures: perplexity over the option that was varied."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mrp_lightning.experiments.methods import method_label
from mrp_lightning.experiments.summary import Average, Measure, Summary
from mrp_lightning.experiments.trials import Change, Trial

# SVG files of the same runs are the same bytes, so that a page under version control is quiet.
_STYLE: Any = {"svg.hashsalt": "mrp-lightning", "axes.grid": True, "grid.alpha": 0.3}


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
        with matplotlib.rc_context(_STYLE):
            figure = Figure(figsize=(4.8 * len(measures), 3.4), layout="constrained")
            panels = figure.subplots(1, len(measures), squeeze=False)[0]
            for axes, measure in zip(panels, measures, strict=True):
                _draw(axes, {t: summary[t] for t in trials if measure in summary[t]}, measure)
                axes.set_title(f"{model}, {setting}")
            figure.savefig(directory / name, metadata={"Date": None})
        paths.append(directory / name)
    return paths


def _draw(axes: Axes, summary: Summary, measure: Measure) -> None:
    changes = list(dict.fromkeys(trial.changed for trial in summary if trial.changed))
    place = _places(axes, changes)
    for method in dict.fromkeys(trial.method for trial in summary):
        line = sorted(
            (place[trial.changed], Average(found[measure].values()))
            for trial, found in summary.items()
            if trial.method == method and trial.changed
        )
        values = [value for value, _ in line]
        means = [found.mean for _, found in line]
        errors = [found.deviation or 0.0 for _, found in line]
        axes.errorbar(values, means, errors, marker="o", capsize=3, label=method_label(method))
    axes.set(xlabel=changes[0].option, ylabel=str(measure))
    axes.legend(frameon=False)


def _places(axes: Axes, changes: Sequence[Change]) -> dict[Change, float]:
    """Where the values stand: numbers on a scale, anything else side by side in their order."""
    numbers = {change: change.number for change in changes if change.number is not None}
    if len(numbers) < len(changes):
        axes.set_xticks(range(len(changes)), [change.value_text for change in changes])
        return {change: float(i) for i, change in enumerate(changes)}
    if min(numbers.values()) > 0:
        axes.set_xscale("log")
    return numbers
