"""Ablations as pictures: perplexity over the option that was varied."""

from collections.abc import Mapping
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from mrp_lightning.experiments.sweep.plan import Run, short
from mrp_lightning.experiments.sweep.results import Average
from mrp_lightning.experiments.sweep.tables import NAMES, heading

# SVG files of the same results are the same bytes, so that a page under version control is quiet.
matplotlib.rcParams["svg.hashsalt"] = "mrp-lightning"


def write(results: Mapping[Run, Mapping[str, Average]], directory: Path) -> list[Path]:
    """One SVG a model, setting and varied option; a panel a text, a line a method."""
    groups: dict[tuple[str, str, str], list[Run]] = {}
    for run in results:
        if run.changed:
            groups.setdefault((run.model, run.setting, run.changed[0]), []).append(run)
    paths = []
    for (model, setting, key), runs in groups.items():
        name = f"{model}-{setting.replace(':', 'of').rstrip('%')}-{short(key)}.svg"
        figure = _draw(runs, results, f"{model}, {setting}", short(key))
        directory.mkdir(parents=True, exist_ok=True)
        figure.savefig(directory / name, metadata={"Date": None})
        paths.append(directory / name)
    return paths


def _draw(
    runs: list[Run], results: Mapping[Run, Mapping[str, Average]], title: str, option: str
) -> Figure:
    texts = [name for name in results[runs[0]] if name.startswith("perplexity/")]
    figure = Figure(figsize=(4.8 * len(texts), 3.4), layout="constrained")
    for axes, text in zip(figure.subplots(1, len(texts), squeeze=False)[0], texts, strict=True):
        for method in dict.fromkeys(run.method for run in runs):
            line = sorted(
                (float(run.changed[1]), results[run][text])
                for run in runs
                if run.method == method and run.changed
            )
            values = [value for value, _ in line]
            means = [found.mean for _, found in line]
            errors = [found.deviation or 0.0 for _, found in line]
            label = NAMES.get(method, method)
            axes.errorbar(values, means, errors, marker="o", capsize=3, label=label)
        axes.set(
            xscale="log",
            xlabel=option,
            ylabel=heading(text, {results[runs[0]][text].context}),
            title=title,
        )
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    return figure
