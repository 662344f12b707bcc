"""`make evidence`: one protocol for real models of several sizes, in one table.

    python lab/evidence.py --config lab/evidence.yaml

Each run of the sweep is made by `mrp-lightning sweep` in a process of its own, so that its peak of
memory is its own, in the order of `order`. Its row is added to the table, and the page and its
picture are made anew from that table. A run whose row is in the table is not repeated, even where
its directory is gone: an interrupted command goes on, also on another machine. There `sweep`
evaluates each dense model once more.
"""

import csv
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from html import escape
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pandas as pd
from lines import line_styles
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from tables import bits_of, on_paper

from mrp_lightning.commands import numbers
from mrp_lightning.commands.parser import Parser
from mrp_lightning.experiments.design import Sweep
from mrp_lightning.experiments.pictures import INK, Picture, picture
from mrp_lightning.experiments.runs import TRIAL, RunDirectory, read_run
from mrp_lightning.experiments.scores import Table, markdown, scores_of, text
from mrp_lightning.experiments.sweep import read_sweep
from mrp_lightning.experiments.trials import Trial, parse_setting
from mrp_lightning.storage.files import save_text

COLUMNS = (
    "model", "format", "method", "seed", "text", "perplexity", "dense_perplexity", "bits_on_disk",
    "cpu_seconds", "peak_memory_mb", "tokens_per_second", "engine", "command",
)  # fmt: skip
KEY = ["model", "format", "method", "seed", "text", "engine"]
DENSE = "dense"
DECIDING = ("2:4", "50%"), ("SparseGPT", "SM", "JM", "best")
"""Formats and methods of the first table; the formats are those of the picture, too."""
_TICKS = (1, 2, 5, 10, 20, 30, 50, 70, 100, 150, 200, 300, 500, 1000, 2000)  # percent
_DARK = "filter: invert(.9) hue-rotate(180deg)"  # the colours of a picture on dark paper
_POLL = 0.2  # seconds


@dataclass(kw_only=True)
class Model:
    """A model of the page.

    Args:
        weights: The number of its parameters, for the axis of the picture.
        grid: The type from which its weights are read, which stands beside each of its results.
        note: Its source, and whom the grid of its weights flatters.
    """

    weights: float
    grid: str
    note: str


@dataclass(kw_only=True)
class Evidence:
    """Make the runs of a sweep one after another, and keep their table and its page.

    Args:
        sweep: Configurations of the sweep, as `mrp-lightning sweep --config` takes them. Its models
            are called `MODEL-TEXT`.
        models: The models by name, in the order of their size.
        title: The title of the page.
        description: The protocol.
        order: Names of runs, `MODEL-TEXT/TRIAL` with shell wildcards, the most important first.
            Those that no pattern matches are not made.
        second_machine: Names of runs, with shell wildcards, that were made on another machine than
            the others. The page marks their CPU seconds with `*`.
        table: The table, a CSV file.
        page: The page, a Markdown file. Its picture has the same name.
        limit: The most runs to make; 0 only writes the page.
    """

    sweep: list[str]
    models: dict[str, Model]
    title: str
    description: str
    order: list[str]
    second_machine: list[str] = field(default_factory=list)
    table: str = "lab/results/evidence.csv"
    page: str = "lab/results/evidence.md"
    limit: int | None = None


def main(args: Sequence[str]) -> None:
    """Make the runs that have no row yet, and write table, page and picture after each."""
    parser = Parser(prog="python lab/evidence.py", description=str(Evidence.__doc__))
    parser.add_argument("--config", action="config", help="YAML; may be repeated.")
    parser.add_class_arguments(Evidence)
    options = vars(parser.instantiate(parser.parse_args(list(args))))
    evidence = Evidence(**{key: value for key, value in options.items() if key != "config"})
    sweep = read_sweep([f"--config={path}" for path in evidence.sweep])
    rows = read_table(Path(evidence.table))
    failed = []
    for trial in waiting(evidence, sweep, rows)[: evidence.limit]:
        status, peak = 0, 0  # of a run that existed
        if not (sweep.directory(trial) / TRIAL).exists():
            status, peak = run_alone(shlex.split(command_of(evidence, trial))[1:])
        if status:
            failed.append(str(trial.directory))
            continue
        rows = with_run(rows, evidence, sweep, trial, peak)
        save_text(evidence.table, in_csv(rows))
        write_page(evidence, sweep, rows)
    write_page(evidence, sweep, rows)
    if failed:
        raise SystemExit(f"error: {len(failed)} runs failed: {', '.join(failed)}")


def read_table(path: Path) -> pd.DataFrame:
    """Return the rows of the table, all of them strings; none if there is no file."""
    if not path.exists():
        return pd.DataFrame(columns=COLUMNS, dtype=str)
    return pd.read_csv(path, dtype=str, keep_default_na=False)


def in_csv(rows: pd.DataFrame) -> str:
    """Return the table as CSV."""
    return rows.to_csv(index=False, lineterminator="\n", quoting=csv.QUOTE_MINIMAL)


def waiting(evidence: Evidence, sweep: Sweep, rows: pd.DataFrame) -> list[Trial]:
    """Return the trials without a row, the most important first, each model's dense one before."""
    done = {(row["model"], row["format"], row["method"], row["seed"], row["text"])
            for _, row in rows.iterrows()}  # fmt: skip
    ordered: dict[Trial, None] = {}
    for pattern in evidence.order:
        matching = [trial for trial in sweep.trials if fnmatchcase(str(trial.directory), pattern)]
        if not matching:
            raise SystemExit(f"error: `order`: no run of the sweep is called {pattern}")
        for trial in matching:
            ordered[Trial(trial.model)] = None
            ordered[trial] = None
    return [trial for trial in ordered if tuple(key_of(trial).values()) not in done]


def key_of(trial: Trial) -> dict[str, str]:
    """Return the columns of a trial's row that name it."""
    model, _, text_name = trial.model.rpartition("-")
    method, seed = trial.label if trial.method else "", trial.seed
    values = (model, trial.setting, method, "" if seed is None else str(seed), text_name)
    return dict(zip(KEY, values, strict=False))


def command_of(evidence: Evidence, trial: Trial) -> str:
    """Return the command that makes the run of a trial."""
    configs = [word for path in evidence.sweep for word in ("--config", path)]
    return shlex.join(
        ["python", "-m", "mrp_lightning", "sweep", *configs, "--only", str(trial.directory)]
    )


def run_alone(arguments: Sequence[str]) -> tuple[int, int]:
    """Run Python in a process of its own; return its exit status, and its peak memory in bytes.

    The kernel's usage of a child begins with the size of its parent, and so is of no use here.
    """
    process, peak = subprocess.Popen([sys.executable, *arguments]), 0
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        largest = re.search(r"VmHWM:\s+(\d+) kB", status)  # absent once the process has ended
        peak = int(largest[1]) * 2**10 if largest else peak
        time.sleep(_POLL)
    return process.returncode, peak


def with_run(
    rows: pd.DataFrame, evidence: Evidence, sweep: Sweep, trial: Trial, peak: int
) -> pd.DataFrame:
    """Return the table with the row of a run, in the order of the sweep's trials."""
    run = read_run(sweep.directory(trial), str(trial.directory))
    row = row_of(evidence, trial, run, peak, dense_perplexity(rows, trial))
    rows = pd.concat([rows, pd.DataFrame([row], columns=COLUMNS)], ignore_index=True)
    places = {tuple(key_of(each).values()): i for i, each in enumerate(sweep.trials)}
    order = [places.get(tuple(row), len(places)) for row in rows[KEY[:-1]].to_numpy()]
    return rows.iloc[pd.Series(order).argsort(kind="stable")].reset_index(drop=True)


def dense_perplexity(rows: pd.DataFrame, trial: Trial) -> str:
    """Return the perplexity of a trial's dense model, from its row."""
    key = key_of(trial) | {"format": DENSE}
    is_dense = (rows[["model", "format", "text"]] == [key["model"], DENSE, key["text"]]).all(axis=1)
    return str(rows.loc[is_dense, "perplexity"].iloc[0]) if is_dense.any() else ""


def row_of(
    evidence: Evidence, trial: Trial, run: RunDirectory, peak: int, dense: str
) -> dict[str, str]:
    """Return the row of a run."""
    (score,) = [row["value"] for row in scores_of(run) if row["score"].is_perplexity]
    bits = bits_of(parse_setting(trial.setting, trial.method)) if trial.method else 16.0
    seconds = run.report.cpu_seconds if run.report else None
    return key_of(trial) | {
        "perplexity": f"{score:.4f}",
        "dense_perplexity": dense if trial.method else f"{score:.4f}",
        "bits_on_disk": f"{bits:g}",
        "cpu_seconds": "" if seconds is None else f"{seconds:.1f}",
        "peak_memory_mb": f"{peak / 1e6:.0f}" if peak else "",
        "tokens_per_second": "",
        "engine": "",
        "command": command_of(evidence, trial),
    }


def write_page(evidence: Evidence, sweep: Sweep, rows: pd.DataFrame) -> None:
    """Write the page about the rows, and its picture."""
    page = Path(evidence.page)
    configs = " ".join(f"--config {path}" for path in evidence.sweep)
    parts = [f"# {evidence.title}"]
    parts += [markdown(deciding_table(evidence, rows)), _READING]
    drawn = loss_by_size(evidence, sweep, rows)
    if drawn is not None:
        on_light = on_paper(drawn)
        save_text(page.with_suffix(".svg"), on_light)
        on_dark = on_light.replace("<svg ", f'<svg style="{_DARK}" ', 1)
        save_text(page.with_name(f"{page.stem}-dark.svg"), on_dark)
        parts += ["## Loss and size", in_both_colours(drawn, page.stem)]
    parts += ["## The protocol", evidence.description.strip(), "```\nmake evidence\n```"]
    for name, model in evidence.models.items():
        of_model = rows[(rows["model"] == name) & (rows["engine"] == "")]
        parts += [f"## {name}", model.note.strip()]
        parts += [markdown(table) for table in tables_of(of_model, evidence.second_machine)]
        served = rows[(rows["model"] == name) & (rows["engine"] != "")]
        if len(served):
            parts += ["Decoding one sequence (`lab/engines.py`):", markdown(engines_table(served))]
    parts += list(left_out(evidence, sweep, rows))
    parts.append(f"The runs are those of `mrp-lightning sweep {configs}`; each row of "
                 f"[the table]({Path(evidence.table).name}) has its own command.")  # fmt: skip
    save_text(page, "\n\n".join(parts) + "\n")


_READING = """\
Perplexity, and in parentheses how many times that of the dense model: lower is better. ± is the
standard deviation over two seeds, which draw other calibration windows; a figure without it is of
the first seed, and a dash a run that was not made. Weights that come from a grid of few bits
flatter quantisation to few bits."""


def deciding_table(evidence: Evidence, rows: pd.DataFrame) -> Table:
    """Return perplexities by model and text, of the formats and methods that decide."""
    formats, methods = DECIDING
    rows = rows[rows["engine"] == ""]
    values = pd.to_numeric(rows["perplexity"])
    rows = rows.assign(value=values, times=values / pd.to_numeric(rows["dense_perplexity"]))
    cells = []
    for (name, text_name), of_text in rows.groupby(["model", "text"], sort=False):
        dense = of_text.loc[of_text["format"] == DENSE, "value"]
        for form in formats:
            of_format = of_text[of_text["format"] == form]
            if set(of_format["method"]) & set(methods):
                runs = [of_format[of_format["method"] == method] for method in methods]
                first = (str(name), str(text_name), evidence.models[str(name)].grid, form)
                cells.append((*first, text(dense, numbers.perplexity), *map(_with_ratio, runs)))
    header = ("text", "weights from", "format", DENSE, *methods)
    return Table("", header, cells, group="model")


def _with_ratio(runs: pd.DataFrame) -> str:
    """Format the perplexity of runs that differ by their seeds, and its ratio to the dense one."""
    if runs.empty:
        return numbers.MISSING
    return f"{text(runs['value'], numbers.perplexity)} ({runs['times'].mean():.2f})"


def in_both_colours(drawn: Picture, stem: str) -> str:
    """Return the HTML of a picture that has a light and a dark file."""
    return (
        f'<picture>\n  <source media="(prefers-color-scheme: dark)" srcset="{stem}-dark.svg">\n'
        f'  <img alt="{escape(drawn.alt)}" src="{stem}.svg">\n</picture>'
    )


def tables_of(rows: pd.DataFrame, second_machine: Sequence[str]) -> Iterator[Table]:
    """Yield a table for each text: the perplexity of each format and method, and its cost."""
    for text_name, of_text in rows.groupby("text", sort=False):
        header = ("method", "bits", "perplexity @512", "× dense", "CPU seconds", "memory, GB")
        cells = []
        for (form, method), of_row in of_text.groupby(["format", "method"], sort=False):
            perplexity = pd.to_numeric(of_row["perplexity"])
            times = perplexity / pd.to_numeric(of_row["dense_perplexity"])
            peak = pd.to_numeric(of_row["peak_memory_mb"]).max() / 1000
            cells.append((
                str(form), str(method), of_row["bits_on_disk"].iloc[0],
                text(perplexity, numbers.perplexity), f"{times.mean():.3f}",
                cpu_seconds(of_row, second_machine),
                numbers.MISSING if pd.isna(peak) else f"{peak:.1f}",
            ))  # fmt: skip
        yield Table("", header, cells, group=str(text_name))


def cpu_seconds(rows: pd.DataFrame, second_machine: Sequence[str]) -> str:
    """Format the CPU seconds of runs that differ by their seeds, by machine."""
    names = [shlex.split(command)[-1] for command in rows["command"]]
    second = pd.Series(
        [any(fnmatchcase(name, pattern) for pattern in second_machine) for name in names],
        index=rows.index,
    )
    seconds = pd.to_numeric(rows["cpu_seconds"])
    of_each = [(seconds[~second].dropna(), ""), (seconds[second].dropna(), "*")]
    shown = [f"{text(values, numbers.seconds)}{mark}" for values, mark in of_each if len(values)]
    return ", ".join(shown) or numbers.MISSING


def engines_table(rows: pd.DataFrame) -> Table:
    """Return the tokens a second of a model in the engines that ran it."""
    header = ("method", "bits", "engine", "tokens a second")
    columns = ["format", "method", "bits_on_disk", "engine", "tokens_per_second"]
    return Table("", header, rows[columns].to_numpy().tolist(), group="format")


def left_out(evidence: Evidence, sweep: Sweep, rows: pd.DataFrame) -> Iterator[str]:
    """Yield the part about the runs of the sweep that have no row yet."""
    missing = waiting(evidence, sweep, rows)
    if missing:
        counts = pd.Series([trial.model for trial in missing]).value_counts(sort=False)
        listed = "\n".join(f"* {model}: {count}" for model, count in counts.items())
        yield "## Left out"
        yield (
            f"{len(missing)} planned runs were not made yet. `make evidence` goes on with them, "
            "the most important first:"
        )
        yield listed


def loss_by_size(evidence: Evidence, sweep: Sweep, rows: pd.DataFrame) -> Picture | None:
    """Draw the share that pruning adds to the perplexity over the size of the model.

    `None` where fewer than two models have a row in one of the drawn formats.
    """
    rows = rows[
        rows["format"].isin(DECIDING[0]) & (rows["engine"] == "") & (rows["dense_perplexity"] != "")
    ]
    if rows["model"].nunique() < 2:
        return None
    added = pd.to_numeric(rows["perplexity"]) / pd.to_numeric(rows["dense_perplexity"]) - 1
    rows = rows.assign(
        added=100 * added, weights=[evidence.models[m].weights / 1e6 for m in rows["model"]]
    )
    values = rows.groupby(["text", "format", "method", "weights"], sort=False)["added"].mean()
    methods = {trial.label: trial.method for trial in sweep.trials if trial.method}
    words = "; ".join(
        f"{text_name}, {form} by {method}, {weights:g} million weights: {value:.0f}%"
        for (text_name, form, method, weights), value in values.items()
    )
    caption = "Percent added to the perplexity, over millions of weights."
    return picture(caption, words, lambda: draw(values, methods))


def draw(values: pd.Series, methods: dict[str, Any]) -> Figure:
    """Draw a field for each text (rows) and format (columns), and in it a line for each method."""
    lines = values.unstack("weights", sort=False).sort_index(axis=1)  # a column for each size
    texts, formats = (lines.index.unique(level) for level in ("text", "format"))
    figure = Figure(figsize=(3.9 * len(formats), 2.9 * len(texts)), layout="constrained")
    fields = figure.subplots(len(texts), len(formats), squeeze=False, sharex=True, sharey=True)
    labels = [label for label in methods if label in lines.index.get_level_values("method")]
    styles = dict(zip(labels, line_styles([methods[label] for label in labels]), strict=True))
    for axes, (text_name, form) in zip(fields.flat, product(texts, formats), strict=True):
        for label in labels:
            if (text_name, form, label) in lines.index:
                line = lines.loc[(text_name, form, label)].dropna()
                axes.plot(line.index, line, label=label, **styles[label])
        axes.set(xscale="log", yscale="log", title=f"{text_name}, {form}")
        axes.xaxis.set_major_locator(FixedLocator(list(lines.columns)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: in_words(value)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_locator(FixedLocator(_TICKS))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"+{value:g}%"))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.tick_params(labelcolor=INK)
    handles = {
        label: handle
        for axes in fields.flat
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    shown = [label for label in labels if label in handles]
    figure.legend([handles[label] for label in shown], shown, loc="outside upper center",
                  ncols=len(shown), frameon=False, fontsize=8)  # fmt: skip
    figure.supylabel("added to the perplexity", fontsize=9)
    return figure


def in_words(millions: float) -> str:
    """Format a number of weights, such as `494 M` or `1.5 B`."""
    return f"{millions:.3g} M" if millions < 1000 else f"{millions / 1000:.2g} B"


if __name__ == "__main__":
    main(sys.argv[1:])
