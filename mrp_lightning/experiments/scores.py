"""The scores of runs (perplexities, zero-shot metrics, layer losses, seconds) and their tables."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from mrp_lightning.commands import numbers
from mrp_lightning.commands.numbers import MISSING, Write
from mrp_lightning.commands.zeroshot import PAPER_TASKS
from mrp_lightning.experiments.groups import ModelRuns
from mrp_lightning.experiments.runs import RunDirectory
from mrp_lightning.records.evaluation import (
    BY_LENGTH,
    UNNAMED,
    Scores,
    averaged,
    mean_accuracy,
    metrics,
    standard_error,
)
from mrp_lightning.storage.files import check_output_file, save_ours

_GROUP = ["setting", "label"]


@dataclass(frozen=True)
class Score:
    """The name of a measured quantity.

    Attributes:
        metric: `perplexity`, `relative loss` (the mean over layers of ‖δx‖² / ‖wx‖²), `seconds` of
            the pruning, its `CPU seconds`, `accuracy` (the mean over tasks), or a metric of lm-eval
            such as `acc_norm`.
        of: The text, the task or the tasks; empty for a score of the pruning.
        context: Tokens a window, for a perplexity; `None` for all others.
        zero_shot: Whether the score is that of tasks.
    """

    metric: str
    of: str = ""
    context: int | None = None
    zero_shot: bool = False

    @property
    def name(self) -> str:
        """The name in machine-readable tables; papers report `accuracy/<task>`."""
        if not self.zero_shot:
            return f"{self.metric}/{self.of}" if self.of else self.metric
        reported = self.metric == ("acc_norm" if self.of in BY_LENGTH else "acc")
        return f"{'accuracy' if reported else self.metric}/{self.of.removesuffix('_openai')}"

    def __str__(self) -> str:
        """Return the score as a heading, such as `perplexity wikitext2 @2048`."""
        if self.zero_shot:
            return self.of if self.metric == "accuracy" else f"{self.of} {self.metric}"
        name = " ".join([self.metric, *([self.of] if self.of not in ("", UNNAMED) else [])])
        return f"{name} @{self.context}" if self.context else name

    @property
    def is_perplexity(self) -> bool:
        """Whether the score is the perplexity of a text."""
        return bool(self.of) and not self.zero_shot

    @property
    def in_percent(self) -> bool:
        """Whether the score is a fraction, whose values are in percent."""
        return self.zero_shot and self.metric.startswith(("acc", "exact_match", "f1"))

    @property
    def write(self) -> Write:
        """The function that formats the values."""
        if self.in_percent:
            return numbers.points
        ways = {"relative loss": numbers.relative_loss}
        ways |= dict.fromkeys(("seconds", "CPU seconds"), numbers.seconds)
        return ways.get(self.metric, numbers.perplexity)


RELATIVE_LOSS, SECONDS, CPU_SECONDS = map(Score, ("relative loss", "seconds", "CPU seconds"))


def named(text: str) -> str:
    """Return the name of an evaluation text for a reader."""
    return "the evaluation text" if text == UNNAMED else text


def scores_of(run: RunDirectory) -> Iterator[dict[str, Any]]:
    """Yield the `score`s of a run, each with its `value`, standard `error` and `detail`.

    Non-finite values are infinite, unknown errors NaN, and fractions in percent. `detail` describes
    the measurement.
    """
    for text, entry in run.evaluation.perplexity.items():
        if "perplexity" in entry:
            context = entry.get("context")
            score = Score("perplexity", text, None if context is None else int(context))
            yield _entry(score, entry["perplexity"], _windows(entry))
    if run.report is not None:
        totals = (run.report.relative_loss, run.report.seconds, run.report.cpu_seconds)
        for score, value in zip((RELATIVE_LOSS, SECONDS, CPU_SECONDS), totals, strict=True):
            if value is not None:
                yield _entry(score, value)
    for task, entry in run.evaluation.zeroshot.items():
        for metric, value in metrics(entry).items():
            score = Score(metric, task, zero_shot=True)
            yield _entry(score, value, _samples(score, entry), standard_error(entry, metric))
    tasks = sorted(averaged(run.evaluation.zeroshot))
    if len(tasks) > 1:
        name = "average" if set(tasks) == set(PAPER_TASKS) else f"mean of {', '.join(tasks)}"
        detail = f"acc in %; acc_norm of {' and '.join(sorted(BY_LENGTH))}"
        score = Score("accuracy", name, zero_shot=True)
        yield _entry(score, mean_accuracy(run.evaluation.zeroshot), detail)


def _entry(
    score: Score, value: float | None, detail: str = "", error: float | None = None
) -> dict[str, Any]:
    scale = 100 if score.in_percent else 1
    # JSON has no infinity: records store a non-finite value as null. An error that is not known is
    # NaN, which is different.
    value = math.inf if value is None else scale * float(value)
    error = math.nan if error is None else scale * error
    return {"score": score, "value": value, "error": error, "detail": detail}


def _windows(entry: Scores) -> str:
    sizes = [f"{entry['windows']} windows"] if "windows" in entry else []
    if "prefix" in entry:
        first = entry["prefix"]
        sizes.append(f"{first} tokens such as BOS before each" if first else "no BOS before them")
    return ", ".join(sizes)


def _samples(score: Score, entry: Scores) -> str:
    parts = ["in %"] if score.in_percent else []
    parts += [f"{entry['samples']} samples"] if "samples" in entry else []
    parts += [f"{entry['num_fewshot']} examples"] if entry.get("num_fewshot") else []
    return ", ".join(parts)


class ScoreFrame:
    """All scores of a model: one row a run and score, and their means over the seeds.

    Attributes:
        rows: A frame with the columns `setting`, `label`, `run`, `seed`, `score`, `value`, `error`
            and `detail`.
        scores: Every score of any run, scores of the pruning last.
        model: The model.
        means: The mean over the runs of each (setting, label), by score; infinite if a value is
            infinite, NaN if there is none.
        texts: The formatted means of finite values ± standard deviation (± standard error of a
            single run), indexed like `means`; empty if there is none.
    """

    def __init__(self, model: ModelRuns) -> None:
        self.model = model
        names = [*_GROUP, "run", "seed", "score", "value", "error", "detail"]
        rows = [
            {
                "setting": group.setting,
                "label": group.label,
                "run": run.name,
                "seed": run.trial.seed,
                **entry,
            }
            for group in model.rows
            for run in group.runs
            for entry in scores_of(run)
        ]
        self.rows = pd.DataFrame(rows, columns=names)
        self.scores: list[Score] = sorted(
            dict.fromkeys(self.rows["score"]), key=lambda score: not score.of
        )
        order = [(group.setting, group.label) for group in model.rows]
        index = pd.MultiIndex.from_tuples(order, names=_GROUP) if order else None
        self.means = pd.DataFrame(index=index, columns=self.scores, dtype=float)
        self.texts = pd.DataFrame("", index=index, columns=self.scores, dtype=object)
        for (setting, label, score), values in self.rows.groupby([*_GROUP, "score"], sort=False):
            self.means.loc[(setting, label), score] = values["value"].mean()
            self.texts.loc[(setting, label), score] = _with_error(values, score.write)

    def values(self, group: tuple[str, str], score: Score) -> pd.Series:
        """Return the values of a score in the runs of a (setting, label), by seed."""
        is_group = (self.rows["setting"] == group[0]) & (self.rows["label"] == group[1])
        rows = self.rows[is_group & (self.rows["score"] == score)]
        return rows.set_index("seed")["value"]

    def detail(self, score: Score) -> str:
        """Return the details of a score in the runs that have it."""
        return " or ".join(dict.fromkeys(self.rows["detail"][self.rows["score"] == score]))

    def lowest(self, scores: Sequence[Score]) -> set[tuple[str, str, Score]]:
        """Return (setting, label, score) of the lowest mean of each setting whose means differ."""
        # Infinite means would make a setting with one finite value a comparison, so they are left
        # out, and `nunique` counts the finite ones.
        finite = self.means[list(scores)].replace(math.inf, math.nan)
        settings = finite.groupby(level="setting")
        is_lowest = (finite == settings.transform("min")) & (settings.transform("nunique") > 1)
        return {(*row, score) for score in scores for row in is_lowest.index[is_lowest[score]]}


def deviation(values: pd.Series) -> float | None:
    """Return the sample standard deviation; `None` of fewer than two or of non-finite values."""
    return float(values.std()) if len(values) > 1 and np.isfinite(values).all() else None


def text(values: pd.Series, write: Write) -> str:
    """Format the finite values as mean ± standard deviation, and count the others."""
    finite = values[np.isfinite(values)]
    if finite.empty:
        return MISSING if values.empty else write(math.inf)
    written = write(float(finite.mean()))
    if (spread := deviation(finite)) is not None:
        written += f" ± {write(spread)}"
    # One diverged seed would make the mean infinite and hide the others, so it is counted apart.
    lost = len(values) - len(finite)
    return f"{written} ({lost} of {len(values)} not finite)" if lost else written


def _with_error(rows: pd.DataFrame, write: Write) -> str:
    """Format several runs as mean ± standard deviation, a single run as value ± standard error."""
    written, error = text(rows["value"], write), rows["error"].iloc[0]
    is_single = len(rows) == 1 and np.isfinite(rows["value"].iloc[0]) and not math.isnan(error)
    return f"{written} ± {write(error)}" if is_single else written


@dataclass(frozen=True)
class Table:
    """A table of strings.

    Attributes:
        header: The headers of the names and of the cells.
        rows: Each row: the name of its group, its own name, and its cells.
        group: The header of the groups.
        details: A second line of headers.
        best: The cells that are the best of their group, by group, name and header.
        colored: Whether the names of rows are labels, which pictures draw in colours.
        kind: The content of the cells: `number` or `text`.
    """

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    group: str = "sparsity"
    details: Mapping[str, str] = field(default_factory=dict)
    best: Collection[tuple[str, str, str]] = ()
    colored: bool = False
    kind: str = "number"

    def groups(self) -> dict[str, list[tuple[str, list[tuple[str, bool]]]]]:
        """Return the rows by group: a name, and each cell with whether it is the best."""
        groups: dict[str, list[tuple[str, list[tuple[str, bool]]]]] = {}
        for group, name, *texts in self.rows:
            columns = zip(texts, self.header[1:], strict=True)
            cells = [(text, (group, name, column) in self.best) for text, column in columns]
            groups.setdefault(group, []).append((name, cells))
        return groups


def results_table(frame: ScoreFrame) -> Table | None:
    """Return perplexity, loss and time of all groups; `None` if nothing was measured."""
    scores = [score for score in frame.scores if not score.zero_shot]
    if not scores:
        return None
    content = "Perplexity, relative layer loss" if scores[0].of else "Relative layer loss"
    several = any(len(group.runs) > 1 for group in frame.model.groups)
    spread = " Mean ± standard deviation where there are several runs." if several else ""
    caption = f"{content} and seconds of the run.{spread}"
    lower_is_better = [score for score in scores if score.of or score == RELATIVE_LOSS]
    return _score_table(caption, frame, scores, lower_is_better, count_runs=several)


def zero_shot_table(frame: ScoreFrame) -> Table | None:
    """Return all metrics of all tasks; `None` if there are none."""
    scores = [score for score in frame.scores if score.zero_shot]
    caption = "± standard error of one run; of several runs mean ± standard deviation."
    return _score_table(caption, frame, scores) if scores else None


def _score_table(
    caption: str,
    frame: ScoreFrame,
    scores: Sequence[Score],
    lower_is_better: Sequence[Score] = (),
    *,
    count_runs: bool = False,
) -> Table:
    """Return a table of scores (columns) of the groups that have any."""
    # Infinite means are not missing: a run that diverged keeps its row.
    cells = frame.texts.loc[frame.means[scores].notna().any(axis=1), scores]
    is_pruned = cells.index.get_level_values("setting") != ""
    cells[is_pruned] = cells[is_pruned].replace("", MISSING)
    if count_runs:
        runs = {(group.setting, group.label): str(len(group.runs)) for group in frame.model.groups}
        cells["runs"] = [runs.get(row, "") for row in cells.index]
    return Table(
        caption,
        ["method", *map(str, cells)],
        cells.reset_index().to_numpy().tolist(),
        details={str(score): frame.detail(score) for score in scores},
        best={(of, label, str(score)) for of, label, score in frame.lowest(lower_is_better)},
        colored=True,
    )


def check_tables(directory: Path) -> None:
    """Raise a FileExistsError if there are tables that no sweep wrote, or that were changed."""
    for kind in ("csv", "md"):
        check_output_file(directory / f"results.{kind}", "out")


def write_tables(models: Sequence[ModelRuns], directory: Path) -> str:
    """Write `results.{csv,md}`, unless `check_tables` raises; return the text of the last."""
    check_tables(directory)
    frames = [ScoreFrame(model) for model in models]
    rows = [row for frame in frames for row in _score_rows(frame)]
    table = pd.DataFrame(rows, dtype=object)  # whole numbers stay whole
    save_ours(directory / "results.csv", table.to_csv(index=False, lineterminator="\n"))
    sections = []
    for frame in frames:
        tables = (results_table(frame), zero_shot_table(frame))
        sections += [f"## {frame.model.name}", *(markdown(table) for table in tables if table)]
    text = "\n\n".join(sections) + "\n"
    save_ours(directory / "results.md", text)
    return text


def _score_rows(frame: ScoreFrame) -> Iterator[dict[str, Any]]:
    """Yield a row for each group and score, for programs."""
    for group in frame.model.rows:
        trial = group.trial
        for score in frame.scores:
            values = frame.values((group.setting, group.label), score)
            # A group without a score has no row: a mean of nothing is not a measurement.
            if len(values):
                yield {
                    "model": frame.model.name,
                    "setting": trial.setting,
                    "method": trial.recipe or trial.method or "",
                    "block_size": trial.columns,
                    "changed": str(trial.changed or ""),
                    "measure": score.name,
                    "context": score.context,
                    "mean": float(values.mean()),
                    "deviation": deviation(values),
                    "seeds": len(values),
                }


def markdown(table: Table) -> str:
    """Return a table in Markdown, with groups as the first column if any has a name."""
    groups = table.groups()
    grouped = any(groups)
    header = [*([table.group] if grouped else []), *table.header]
    lines = [header, ["---"] * len(header)]
    for group, rows in groups.items():
        for name, cells in rows:
            names = [group or name, name if group else ""] if grouped else [name]
            lines.append([*names, *(f"**{cell}**" if best else cell for cell, best in cells)])
    escaped = (
        [str(cell).replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines
    )
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)
