"""`python -m mrp_lightning sweep`: many runs, resumed after an interruption, and their tables."""

import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from jsonargparse import ArgumentParser
from jsonargparse.typing import Path_fr
from rich.console import Console
from rich.markdown import Markdown

from mrp_lightning.errors import OptionError
from mrp_lightning.evaluation.zeroshot import load_tasks
from mrp_lightning.experiments.sweep import page, tables
from mrp_lightning.experiments.sweep.execute import (
    configure,
    described,
    difference,
    execute,
    require_pruning,
    stored_config,
)
from mrp_lightning.experiments.sweep.plan import Plan, Run
from mrp_lightning.experiments.sweep.results import Result, averages, read_result
from mrp_lightning.files import save_text


@dataclass(kw_only=True)
class Sweep(Plan):
    """Prune models in many ways, evaluate each, and compare.

    Every run is what `predict` and `test` would do with the configuration `base`, the options of
    the model, and those of the run. Its results are kept in `<out>/<model>/<run>`; a run that is
    there is not made again. The tables are `<out>/results.{md,csv,json}`, with the paper's figures
    beside ours where it has any.

    Args:
        base: Configurations that all runs share, as `predict --config` takes them; the last of
            `trainer.callbacks` prunes.
        models: By the name that tables show.
        runs: The methods at each setting: a percentage ("50%") or a pattern ("2:4"), quoted.
        out: Directory of the results.
        seeds: Calibration sets: every run is repeated with each.
        vary: Ablations: the values of one option at a time, by its dotted key, such as
            `data.num_samples`. Where it is given, only these runs are made.
        only: Names of the runs to make, `<model>/<run>` with shell wildcards, such as
            `*/2of4-SM-*`. All if empty.
        zeroshot: Tasks of lm-eval to evaluate beside perplexity.
        include_path: Directory with YAML files of more tasks.
        save_checkpoints: Whether to keep the pruned models, each with the results of its run.
        page: A Markdown file to write: claims, tables and pictures.
        title: Of the page.
        description: Of the page: what is run, and why.
    """

    base: list[Path_fr]
    out: str
    zeroshot: list[str] = field(default_factory=list)
    include_path: str | None = None
    save_checkpoints: bool = False
    page: str | None = None
    title: str = "Results"
    description: str = ""


_WHAT = str(Sweep.__doc__).partition("Args:")[0].strip()


def main(args: list[str]) -> None:
    """Make the runs that are not there yet, then write the tables.

    Raises:
        OptionError: The sweep, or the configuration of a run, is wrong; before any run.
        SystemExit: With status 1 if a run failed; the others were made.
    """
    sweep = read_sweep(args)
    console = Console()
    failed = make_runs(sweep, console)
    results = collect(sweep)
    if results:
        table = averages(results)
        tables.write(table, Path(sweep.out))
        console.print(Markdown(tables.markdown(table)))
        console.print(f"The tables are in {sweep.out}/results.md, results.csv and results.json.")
    if results and sweep.page:
        command = shlex.join(["python", "-m", "mrp_lightning", "sweep", *args])
        write_page(sweep, results, command)
        console.print(f"The page is {sweep.page}.")
    if failed:
        lines = "".join(f"\n  {run.directory}: {error}" for run, error in failed.items())
        sys.stderr.write(f"error: {len(failed)} runs failed, all others were made:{lines}\n")
        raise SystemExit(1)


def read_sweep(args: list[str]) -> Sweep:
    """The sweep of a command line.

    Raises:
        OptionError: A setting, a method or `only` is wrong.
    """
    parser = ArgumentParser(prog="python -m mrp_lightning sweep", description=_WHAT)
    parser.add_argument("--config", action="config", help="YAML of a sweep; may be repeated.")
    parser.add_class_arguments(Sweep)
    parsed = parser.instantiate(parser.parse_args(args))
    return Sweep(**{key: value for key, value in vars(parsed).items() if key != "config"})


def make_runs(sweep: Sweep, console: Console) -> dict[Run, str]:
    """Make what is not there; returns what failed, and why."""
    base = [Path(path.absolute) for path in sweep.base]
    for model in dict.fromkeys(run.model for run in sweep.selected if run.method):
        require_pruning(model, sweep, base)
    waiting: list[Run] = []
    differing: dict[str, list[str]] = {}
    for run in sweep.selected:
        config = described(configure(run, sweep, base))
        before = stored_config(Path(sweep.out, run.directory))
        if before is None:
            waiting.append(run)
        elif before != config:
            differing.setdefault(difference(before, config), []).append(str(run.directory))
    if differing:
        found = "; and ".join(f"{what} ({', '.join(names)})" for what, names in differing.items())
        raise OptionError(
            f"`out`: {sweep.out} holds runs with another configuration: {found}. "
            "Name another directory, or delete these runs to repeat them."
        )
    console.print(f"{len(sweep.selected)} runs, of which {len(waiting)} are to be made.")
    tasks = None
    if sweep.zeroshot and waiting:
        tasks = load_tasks(sweep.zeroshot, include_path=sweep.include_path)
    failed: dict[Run, str] = {}
    for number, run in enumerate(waiting, start=1):
        directory = Path(sweep.out, run.directory)
        try:
            cli = configure(run, sweep, base)
            if stored_config(directory) is None:  # another process may have made it since
                execute(run, cli, directory, tasks=tasks, save_checkpoint=sweep.save_checkpoints)
            said = str(read_result(directory))
        except Exception as error:
            # Hours of other runs should not be lost; the command ends with an error all the same.
            failed[run] = f"{type(error).__name__}: {error}"
            said = f"{run.directory} failed: {error}"
        console.print(f"[{number}/{len(waiting)}] {said}", markup=False, soft_wrap=True)
    return failed


def collect(sweep: Sweep) -> list[Result]:
    """The results of the sweep that are there, in its order: also those that `only` leaves out."""
    directories = [Path(sweep.out, run.directory) for run in sweep.all_runs]
    return [read_result(path) for path in directories if (path / "run.json").exists()]


def write_page(sweep: Sweep, results: Iterable[Result], command: str) -> None:
    """The page, and its pictures beside it."""
    from mrp_lightning.experiments.sweep import plots  # needs matplotlib, which tables do not

    assert sweep.page is not None
    results, path = list(results), Path(sweep.page)
    pictures = plots.write(averages(results), path.with_suffix(""))
    text = page.page(
        results,
        title=sweep.title,
        description=sweep.description,
        command=command,
        pictures=[picture.relative_to(path.parent) for picture in pictures],
    )
    save_text(path, text)
