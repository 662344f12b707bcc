"""The tables of scores: results and zero-shot tasks of a model, and all results for programs."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from mrp_lightning.environment import versions
from mrp_lightning.experiments import numbers
from mrp_lightning.experiments.models import Model, Result, by_setting
from mrp_lightning.experiments.page.parts import Column, Part, Row, Table, columns
from mrp_lightning.experiments.page.render import render
from mrp_lightning.experiments.paper import CONTEXT, reported
from mrp_lightning.experiments.scores import (
    RELATIVE_LOSS,
    Score,
    cell,
    detail,
    deviation,
    finite_means,
    mean,
    measured,
    values,
)
from mrp_lightning.files import check_output_file, save_ours
from mrp_lightning.json_files import as_json


def check_out(directory: Path) -> None:
    """Refuse to replace tables that no sweep wrote, or that were changed since.

    Raises:
        FileExistsError: There is one.
    """
    for kind in ("csv", "json", "md"):
        check_output_file(directory / f"results.{kind}", "out")


def write(models: Sequence[Model], directory: Path) -> str:
    """Write `results.csv`, `results.json` and `results.md`, and return what is in the last."""
    check_out(directory)
    table = pd.DataFrame(rows(models), dtype=object)  # whole numbers stay whole
    content = {"format_version": 1, "results": rows(models), "versions": versions()}
    save_ours(directory / "results.csv", table.to_csv(index=False, lineterminator="\n"))
    save_ours(directory / "results.json", as_json(content))
    text = markdown(models)
    save_ours(directory / "results.md", text)
    return text


def markdown(models: Sequence[Model]) -> str:
    """The tables of models."""
    sections = []
    for model in models:
        tables = [found for found in (results_table(model), zero_shot_table(model)) if found]
        sections.append({"title": model.name, "parts": [Part("", tables=tables)]})
    return render("page.md", title="", head=[], parts=[], sections=sections, remarks="")


def rows(models: Sequence[Model]) -> list[dict[str, Any]]:
    """A row for each result and score, with the paper's value and the difference if it has one."""
    every = ((model, result) for model in models for result in model.rows)
    return [_row(*of, score) for of in every for score in measured(of[1].runs)]


def _row(model: Model, result: Result, score: Score) -> dict[str, Any]:
    trial, found, paper = result.trial, values(result.runs, score), _paper(result, score)
    average = float(found.mean())
    return {
        "model": model.name,
        "setting": trial.setting,
        "method": trial.recipe or trial.method or "",
        "block_size": trial.columns,
        "changed": str(trial.changed or ""),
        "measure": score.name,
        "context": score.context,
        "mean": average,
        "deviation": deviation(found),
        "seeds": len(found),
        "paper": paper,
        "difference": None if paper is None else average - paper,
    }


def results_table(model: Model) -> Table | None:
    """Perplexity, loss and time of all results; nothing where nothing was measured."""
    scores = [score for score in measured(model.runs) if not score.zero_shot]
    if not scores:
        return None
    what = "Perplexity, relative layer loss" if scores[0].of else "Relative layer loss"
    many = any(len(result.runs) > 1 for result in model.results)
    spread = " Mean ± standard deviation where there are several runs." if many else ""
    lower_is_better = [score for score in scores if score.of or score == RELATIVE_LOSS]
    caption = f"{what} and seconds of the run.{spread}"
    return _score_table(caption, model, scores, lower_is_better, count_runs=many)


def zero_shot_table(model: Model) -> Table | None:
    """All metrics of all tasks; nothing where there are none."""
    scores = [score for score in measured(model.runs) if score.zero_shot]
    caption = "± standard error of one run; of several runs mean ± standard deviation."
    return _score_table(caption, model, scores) if scores else None


def _score_table(
    caption: str,
    model: Model,
    scores: Sequence[Score],
    lower_is_better: Sequence[Score] = (),
    *,
    count_runs: bool = False,
) -> Table:
    """Scores (columns) of the dense model and of the results that have any."""
    shown = [r for r in model.rows if any(len(values(r.runs, score)) for score in scores)]
    compared = {s for s in scores if any(_paper(result, s) is not None for result in shown)}
    header = columns("method:")
    for score in scores:
        header.append(Column(str(score), detail(model.runs, score)))
        header += columns("paper", "difference") if score in compared else []
    header += columns("runs") if count_runs else []
    groups: dict[str, list[Row]] = {}
    for setting, results in by_setting(shown).items():
        best = _lowest(results, lower_is_better)
        for result in results:
            cells: list[str] = []
            marked: list[int] = []
            for score in scores:
                marked += [len(cells)] if result in best.get(score, ()) else []
                found = len(values(result.runs, score))
                cells += [cell(result.runs, score) if found or result.method else ""]
                cells += _beside(result, score) if score in compared else []
            cells += [str(len(result.runs)) if result.method else ""] if count_runs else []
            row = Row(result.label, cells, result.method, marked)
            groups.setdefault(setting, []).append(row)
    return Table(caption, header, groups)


def _lowest(results: Sequence[Result], scores: Sequence[Score]) -> Mapping[Score, set[Result]]:
    """For each score the results whose mean is the lowest, where means differ."""
    found = {score: finite_means(results, score) for score in scores}
    differ = {score: means for score, means in found.items() if len(set(means.values())) > 1}
    return {
        score: {result for result, x in means.items() if x == min(means.values())}
        for score, means in differ.items()
    }


def _beside(result: Result, score: Score) -> list[str]:
    """The paper's value and the difference."""
    paper, ours = _paper(result, score), mean(result.runs, score)
    if paper is None:
        return ["", ""]
    if ours is None or not math.isfinite(ours):
        return [f"{paper:g}", ""]
    return [f"{paper:g}", numbers.signed(ours - paper, numbers.number)]


def _paper(result: Result, score: Score) -> float | None:
    """The paper's value, if it is of the same trial and the same context."""
    if score.context not in (None, CONTEXT):
        return None
    return reported(result.trial, score.name)
