"""The tables of a sweep: Markdown to read, CSV and JSON to compute with."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mrp_lightning.environment import versions
from mrp_lightning.experiments.sweep.plan import Run, has_blocks, short
from mrp_lightning.experiments.sweep.published import CONTEXT, reported
from mrp_lightning.experiments.sweep.results import Average, rounded
from mrp_lightning.files import as_json, save_text

NAMES = {None: "", "magnitude": "magnitude", "wanda": "Wanda", "SS": "SparseGPT"}

Averages = Mapping[Run, Mapping[str, Average]]


def rows(results: Averages) -> list[dict[str, Any]]:
    """One row a run and measure, with the paper's figure and the difference where it has one."""
    table = []
    for run, measures in results.items():
        for measure, ours in measures.items():
            paper = _paper(run, measure, ours)
            table.append(
                {
                    "model": run.model,
                    "setting": run.setting,
                    "method": run.method or "",
                    "block_size": _block_size(run),
                    "changed": f"{run.changed[0]}={run.changed[1]}" if run.changed else "",
                    "measure": measure,
                    "context": ours.context,
                    "mean": ours.mean,
                    "deviation": ours.deviation,
                    "seeds": ours.count,
                    "paper": paper,
                    "difference": None if paper is None else ours.mean - paper,
                }
            )
    return table


def markdown(results: Averages) -> str:
    """A table a model: its runs, and a column a measure."""
    sections = []
    for model in dict.fromkeys(run.model for run in results):
        mine = {run: measures for run, measures in results.items() if run.model == model}
        sections.append(f"### {model}\n\n{_model_table(mine)}")
    return "\n\n".join(sections)


def write(results: Averages, directory: Path) -> None:
    """Write `results.md`, `results.csv` and `results.json`."""
    table = rows(results)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(table[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    content = {"format_version": 1, "results": table, "versions": versions()}
    for name, written in {
        "results.csv": text.getvalue(),
        "results.json": as_json(content),
        "results.md": markdown(results) + "\n",
    }.items():
        save_text(directory / name, written)


def heading(measure: str, contexts: Iterable[int | None] = ()) -> str:
    """A measure as a column's name, such as `perplexity wikitext2 @2048`."""
    at = [f"@{context}" for context in sorted(c for c in contexts if c)]
    return " ".join([measure.removesuffix("/text").replace("/", " "), *at])


def as_markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    cells = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _model_table(results: Averages) -> str:
    measures = list(dict.fromkeys(name for found in results.values() for name in found))
    papers = {
        (run, name): paper
        for run, found in results.items()
        for name, ours in found.items()
        if (paper := _paper(run, name, ours)) is not None
    }
    compared = {name for _, name in papers}
    changed = list(dict.fromkeys(run.changed[0] for run in results if run.changed))
    sizes = {run.block_size for run in results if _block_size(run)}
    header = ["sparsity", "method", *(["S"] if len(sizes) > 1 else []), *map(short, changed)]
    for name in measures:
        context = {found[name].context for found in results.values() if name in found}
        header += [heading(name, context), *(["paper", "difference"] if name in compared else [])]
    lines = []
    for run, found in results.items():
        line = [run.setting, NAMES.get(run.method, run.method or "")]
        line += [_block_size(run)] if len(sizes) > 1 else []
        line += [
            str(run.changed[1]) if run.changed and run.changed[0] == key else "" for key in changed
        ]
        for name in measures:
            ours, paper = found.get(name), papers.get((run, name))
            line.append(str(ours) if ours else "")
            if name in compared:
                line += _difference(ours, paper)
        lines.append(line)
    return as_markdown(header, lines)


def _difference(ours: Average | None, paper: float | None) -> list[str]:
    if ours is None or paper is None:
        return ["" if paper is None else f"{paper:g}", ""]
    return [f"{paper:g}", f"{'−' if ours.mean < paper else '+'}{rounded(abs(ours.mean - paper))}"]


def _block_size(run: Run) -> str:
    if run.method is None or not has_blocks(run.method):
        return ""
    return "all" if run.block_size is None else str(run.block_size)


def _paper(run: Run, measure: str, ours: Average) -> float | None:
    """The paper's figure, if it is of the same run and the same context."""
    if run.changed or ours.context not in (None, CONTEXT):
        return None
    return reported(run.model, run.setting, run.method, run.block_size, measure)
