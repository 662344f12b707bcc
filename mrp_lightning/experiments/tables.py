"""The tables of a sweep: Markdown to read, CSV and JSON to compute with."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mrp_lightning.environment import versions
from mrp_lightning.experiments.numbers import number
from mrp_lightning.experiments.paper import CONTEXT, reported
from mrp_lightning.experiments.summary import Average, Measure, Summary
from mrp_lightning.experiments.trials import Trial
from mrp_lightning.files import save_text
from mrp_lightning.json_files import as_json


def write(summary: Summary, directory: Path) -> None:
    """Write `results.md`, `results.csv` and `results.json`."""
    table = rows(summary)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(table[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    content = {"format_version": 1, "results": table, "versions": versions()}
    save_text(directory / "results.csv", text.getvalue())
    save_text(directory / "results.json", as_json(content))
    save_text(directory / "results.md", markdown(summary) + "\n")


def rows(summary: Summary) -> list[dict[str, Any]]:
    """One row a trial and measure, with the paper's value and the difference where it has one."""
    table = []
    for trial, measured in summary.items():
        for measure, by_seed in measured.items():
            average = Average(by_seed.values())
            paper = _paper(trial, measure)
            table.append(
                {
                    "model": trial.model,
                    "setting": trial.setting,
                    "method": trial.recipe or trial.method or "",
                    "block_size": trial.columns,
                    "changed": str(trial.changed or ""),
                    "measure": measure.name,
                    "context": measure.context,
                    "mean": average.mean,
                    "deviation": average.deviation,
                    "seeds": len(average),
                    "paper": paper,
                    "difference": None if paper is None else average.mean - paper,
                }
            )
    return table


def markdown(summary: Summary) -> str:
    """A table a model: its trials, and a column a measure."""
    sections = []
    for model in dict.fromkeys(trial.model for trial in summary):
        mine = {trial: found for trial, found in summary.items() if trial.model == model}
        sections.append(f"### {model}\n\n{_model_table(mine)}")
    return "\n\n".join(sections)


def as_markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    cells = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _model_table(summary: Summary) -> str:
    measures = list(dict.fromkeys(measure for found in summary.values() for measure in found))
    compared = [m for m in measures if any(_paper(trial, m) is not None for trial in summary)]
    changes = dict.fromkeys(trial.changed.key for trial in summary if trial.changed)
    options = {t.changed.key: t.changed.option for t in summary if t.changed}
    has_sizes = len({trial.columns for trial in summary} - {""}) > 1
    header = ["sparsity", "method", *(["S"] if has_sizes else []), *(options[k] for k in changes)]
    for measure in measures:
        header += [str(measure), *(["paper", "difference"] if measure in compared else [])]
    lines = []
    for trial, found in summary.items():
        change = trial.changed
        line = [trial.setting, trial.label, *([trial.columns] if has_sizes else [])]
        line += [change.value_text if change and change.key == key else "" for key in changes]
        for measure in measures:
            line += [_text(found, measure)]
            line += _beside(trial, found, measure) if measure in compared else []
        lines.append(line)
    return as_markdown(header, lines)


def _text(found: Mapping[Measure, Mapping[int | None, float]], measure: Measure) -> str:
    return Average(found[measure].values()).text(measure.write) if measure in found else ""


def _beside(
    trial: Trial, found: Mapping[Measure, Mapping[int | None, float]], measure: Measure
) -> list[str]:
    """The paper's value and the difference."""
    paper = _paper(trial, measure)
    if paper is None:
        return ["", ""]
    gap = Average(found.get(measure, {None: math.inf}).values()).mean - paper
    if not math.isfinite(gap):
        return [f"{paper:g}", ""]
    return [f"{paper:g}", f"{'−' if gap < 0 else '+'}{number(abs(gap))}"]


def _paper(trial: Trial, measure: Measure) -> float | None:
    """The paper's value, if it is of the same trial and the same context."""
    if measure.context not in (None, CONTEXT):
        return None
    return reported(trial, measure.name)
