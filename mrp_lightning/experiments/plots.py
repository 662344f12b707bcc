"""The pictures of a sweep's page: perplexity by setting and by option, loss by block."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mrp_lightning.experiments.page.drawing import (
    INK,
    PAPER,
    STYLE,
    looks_of_methods,
    set_block_axis,
    set_value_axis,
)
from mrp_lightning.experiments.page.layers import Block, in_order, place
from mrp_lightning.experiments.runs import Run
from mrp_lightning.experiments.summary import Average, Summary
from mrp_lightning.experiments.trials import Change, Trial, parse_setting

Losses = Mapping[Trial, Mapping[Block, list[float]]]
"""The relative losses of the layers of each block, in all runs of a trial."""


def write(summary: Summary, runs: Sequence[Run], directory: Path) -> list[Path]:
    """Write the pictures as SVG, of each model what there is to compare.

    Args:
        summary: The scores of the runs.
        runs: The runs themselves.
        directory: Where the files are put.

    Returns:
        The paths of the files.
    """
    figures: dict[str, Figure] = {}
    with matplotlib.rc_context(STYLE):
        for model in dict.fromkeys(trial.model for trial in summary):
            mine = {trial: found for trial, found in summary.items() if trial.model == model}
            stem = model.replace("/", "-")  # a name of the hub is one file's name, too
            plain = {trial: found for trial, found in mine.items() if not trial.changed}
            if len({trial.setting for trial in plain if trial.method}) > 1:
                figures[f"{stem}-perplexity.svg"] = _over_settings(model, plain)
            if len(plain) > 2 and (losses := _losses(runs, plain)):
                figures[f"{stem}-loss-by-block.svg"] = _over_blocks(model, losses)
            found = _over_options(model, mine)
            figures |= {f"{stem}-{option}.svg": figure for option, figure in found.items()}
        for name, figure in figures.items():
            directory.mkdir(parents=True, exist_ok=True)
            figure.savefig(directory / name, facecolor=PAPER, metadata={"Date": None})
    return [directory / name for name in figures]


def _panels(number: int) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(4.8 * number, 3.4), layout="constrained")
    return figure, figure.subplots(1, number, squeeze=False)[0]


def _over_settings(model: str, summary: Summary) -> Figure:
    """Perplexity from the densest setting to the sparsest: a panel a text, a line a method."""
    measures = dict.fromkeys(m for found in summary.values() for m in found if m.is_perplexity)
    settings = sorted({trial.setting for trial in summary if trial.method}, key=_sparsity)
    figure, panels = _panels(len(measures))
    for axes, measure in zip(panels, measures, strict=True):
        found = {t: Average(x[measure].values()) for t, x in summary.items() if measure in x}
        finite = {trial: average for trial, average in found.items() if average.is_finite}
        pruned = [trial for trial in finite if trial.method]
        _draw_lines(axes, finite, {trial: settings.index(trial.setting) for trial in pruned})
        if (dense := finite.get(Trial(model))) is not None:
            style: Any = {"color": INK, "linewidth": 1, "linestyle": (0, (4, 2))}
            axes.axhline(dense.mean, label="dense", **style)
        axes.set_xticks(range(len(settings)), settings)
        set_value_axis(axes, "y", [average.mean for average in finite.values()], zero=False)
        axes.set(ylabel=str(measure), title=model)
        axes.legend()
    return figure


def _over_blocks(model: str, losses: Losses) -> Figure:
    """The mean relative loss of the layers of each block: a panel a setting, a line a method."""
    settings = sorted({trial.setting for trial in losses}, key=_sparsity)
    blocks = in_order(block for found in losses.values() for block in found)
    figure, panels = _panels(len(settings))
    for axes, setting in zip(panels, settings, strict=True):
        trials = [trial for trial in losses if trial.setting == setting]
        for trial, look in zip(trials, _looks(trials), strict=True):
            means = {blocks.index(block): fmean(found) for block, found in losses[trial].items()}
            style = look | ({} if len(blocks) <= 16 else {"marker": ""})
            label = _labels(trials)[trial]
            axes.plot(*zip(*sorted(means.items()), strict=True), label=label, **style)
        set_block_axis(axes, blocks)
        set_value_axis(axes, "y", [fmean(x) for t in trials for x in losses[t].values()])
        axes.set(ylabel="relative loss", title=f"{model}, {setting}")
        axes.legend()
    return figure


def _losses(runs: Sequence[Run], summary: Summary) -> Losses:
    """Of the trials that pruned several blocks."""
    found: dict[Trial, dict[Block, list[float]]] = {}
    for run in runs:
        assert run.finished is not None
        trial = replace(run.finished.trial, seed=None)
        for layer in run.pruned if trial in summary else []:
            if layer.relative_loss is not None:
                of_block = found.setdefault(trial, {}).setdefault(place(layer.name).block, [])
                of_block.append(layer.relative_loss)
    return {trial: blocks for trial, blocks in found.items() if len(blocks) > 1}


def _over_options(model: str, summary: Summary) -> dict[str, Figure]:
    """Perplexity over each option that was varied, by setting and option: a line a method."""
    groups: dict[tuple[str, str], list[Trial]] = {}
    for trial in summary:
        if trial.changed:
            groups.setdefault((trial.setting, trial.changed.key), []).append(trial)
    figures = {}
    for (setting, key), trials in groups.items():
        measures = [m for m in summary[trials[0]] if m.is_perplexity]
        figure, panels = _panels(len(measures))
        for axes, measure in zip(panels, measures, strict=True):
            shown = [trial for trial in trials if measure in summary[trial]]
            changes = list(dict.fromkeys(trial.changed for trial in shown if trial.changed))
            place_of = _places(axes, changes)
            found = {trial: Average(summary[trial][measure].values()) for trial in shown}
            _draw_lines(axes, found, {trial: place_of[trial.changed] for trial in shown})
            axes.set(xlabel=changes[0].option, ylabel=str(measure), title=f"{model}, {setting}")
            axes.legend()
        figures[f"{trials[0].setting_name}-{key.rpartition('.')[2]}"] = figure
    return figures


def _draw_lines(axes: Axes, found: Mapping[Trial, Average], places: Mapping[Trial, float]) -> None:
    """A line for the trials of one label, with a standard deviation where there is one."""
    labels = _labels(list(places))
    methods = {label: trial for trial, label in labels.items()}
    for label, look in zip(methods, _looks(list(methods.values())), strict=True):
        line = sorted(
            (places[trial], found[trial].mean, found[trial].deviation or 0.0)
            for trial, its in labels.items()
            if its == label
        )
        values, means, errors = zip(*line, strict=True)
        axes.errorbar(values, means, errors, capsize=3, label=label, **look)


def _labels(trials: Sequence[Trial]) -> dict[Trial, str]:
    """Recipe or method, and the column block size where there are several."""
    several = len({trial.columns for trial in trials} - {""}) > 1
    return {t: f"{t.label}, S={t.columns}" if several and t.columns else t.label for t in trials}


def _looks(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    return [look.line for look in looks_of_methods([trial.method or "" for trial in trials])]


def _sparsity(setting: str) -> tuple[float, bool]:
    return parse_setting(setting).sparsity, ":" in setting


def _places(axes: Axes, changes: Sequence[Change]) -> dict[Change | None, float]:
    """Where the values stand: numbers on a scale, anything else side by side in their order."""
    numbers: dict[Change | None, float] = {c: c.number for c in changes if c.number is not None}
    if len(numbers) < len(changes):
        axes.set_xticks(range(len(changes)), [change.value_text for change in changes])
        return {change: float(i) for i, change in enumerate(changes)}
    if min(numbers.values()) > 0:
        axes.set_xscale("log")
        axes.set_xticks(list(numbers.values()), [change.value_text for change in changes])
        axes.minorticks_off()
    return numbers
