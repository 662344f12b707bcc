"""Making the runs of a sweep, resumed after an interruption, and telling which can be compared."""

from collections.abc import Mapping, Sequence
from itertools import groupby

from rich.console import Console

from mrp_lightning.errors import OptionError
from mrp_lightning.evaluation.zeroshot import Tasks, load_tasks
from mrp_lightning.experiments.execute import (
    configure,
    evaluate_again,
    execute,
    require_pruning,
    require_text,
    why_no_model,
)
from mrp_lightning.experiments.runs import TRIAL, Run, read_run
from mrp_lightning.experiments.scores import scores
from mrp_lightning.experiments.sweep import Sweep
from mrp_lightning.experiments.trials import Trial
from mrp_lightning.models.gguf import dequantized_once


def make_runs(sweep: Sweep, console: Console) -> dict[Trial, str]:
    """Make the runs that are not there, and evaluate those that lack tasks.

    Returns:
        The trials that failed, and why.

    Raises:
        OptionError: What is there is of another configuration, or cannot be evaluated any more.
        FileNotFoundError: A text that a run would read is not there.
    """
    require_pruning(sweep)
    finished = finished_runs(sweep, sweep.selected)
    _require_same_configurations(sweep, finished)
    waiting = [trial for trial in sweep.selected if trial not in finished]
    incomplete = [trial for trial, run in finished.items() if _lacks(run, sweep.zeroshot)]
    tasks = None
    if sweep.zeroshot and (waiting or incomplete):
        tasks = load_tasks(sweep.zeroshot, include_path=sweep.include_path)
        incomplete = [trial for trial in incomplete if _lacks(finished[trial], tasks.names)]
        _require_models(sweep, {trial: finished[trial] for trial in incomplete})
    for trial in {(t.model, t.changed and t.changed.key): t for t in waiting}.values():
        require_text(configure(trial, sweep))  # a mistake in it is told of before any run
    console.print(f"{len(sweep.selected)} runs, of which {len(waiting)} are to be made.")
    if incomplete:
        console.print(f"{len(incomplete)} more are to be evaluated on `zeroshot`.")
    reasons = {
        model: why_no_model(model, sweep) for model in dict.fromkeys(t.model for t in waiting)
    }
    failed = {trial: reason for trial in waiting if (reason := reasons[trial.model])}
    work = [trial for trial in [*waiting, *incomplete] if trial not in failed]
    for _, numbered in groupby(enumerate(work, start=1), key=lambda pair: pair[1].model):
        with dequantized_once():
            for number, trial in numbered:
                at = f"[{number}/{len(work)}]"
                console.print(f"{at} {trial.directory} …", markup=False, soft_wrap=True)
                try:
                    said = _make(trial, sweep, tasks)
                except Exception as error:
                    # Hours of other runs should not be lost; the command ends with an error.
                    failed[trial] = f"{type(error).__name__}: {error}"
                    said = f"{trial.directory} failed: {error}"
                console.print(f"{at} {said}", markup=False, soft_wrap=True)
    return failed


def finished_runs(sweep: Sweep, trials: Sequence[Trial]) -> dict[Trial, Run]:
    """The runs that are there, in the order of their trials."""
    made = [trial for trial in trials if (sweep.directory(trial) / TRIAL).exists()]
    return {trial: read_run(sweep.directory(trial), str(trial.directory)) for trial in made}


def _make(trial: Trial, sweep: Sweep, tasks: Tasks | None) -> str:
    """Make a run or, where another process made it meanwhile, what it lacks; returns its scores."""
    directory = sweep.directory(trial)
    if not (directory / TRIAL).exists():
        execute(trial, sweep, tasks)
    run = read_run(directory, str(trial.directory))
    if tasks is not None and _lacks(run, tasks.names):
        evaluate_again(trial, sweep, tasks)
        run = read_run(directory, str(trial.directory))
    found = [f"{score} {score.write(value.value)}" for score, value in scores(run).items()]
    return f"{trial.directory}: {', '.join(found)}"


def _require_same_configurations(sweep: Sweep, finished: Mapping[Trial, Run]) -> None:
    differing: dict[str, list[str]] = {}
    for trial, run in finished.items():
        if found := _differs(sweep, trial, run):
            differing.setdefault(found, []).append(run.name)
    if differing:
        listed = "; and ".join(f"{what} ({', '.join(names)})" for what, names in differing.items())
        raise OptionError(
            f"`out`: {sweep.out} holds runs with another configuration: {listed}. "
            "Name another directory, or delete these runs to repeat them."
        )


def comparable_runs(sweep: Sweep, console: Console) -> list[Run]:
    """The finished runs without those that were not selected and are of another configuration."""
    runs = finished_runs(sweep, sweep.trials)
    others = {trial: run for trial, run in runs.items() if trial not in sweep.selected}
    stale = [trial for trial, run in others.items() if _differs(sweep, trial, run)]
    if stale:
        names = ", ".join(runs[trial].name for trial in stale)
        console.print(f"Left out, as made with another configuration: {names}.", soft_wrap=True)
    return [run for trial, run in runs.items() if trial not in stale]


def _differs(sweep: Sweep, trial: Trial, run: Run) -> str:
    """How the configuration of a run differs from the sweep's, if it does."""
    return configure(trial, sweep).difference(run.finished.config) if run.finished else ""


def _lacks(run: Run, tasks: Sequence[str]) -> bool:
    """Whether a run was not evaluated on all of the tasks."""
    return not set(tasks) <= run.evaluation.zeroshot.keys()


def _require_models(sweep: Sweep, runs: Mapping[Trial, Run]) -> None:
    """Refuse to evaluate pruned models that were not kept."""
    gone = [run.name for trial, run in runs.items() if trial.method and not run.weight_bytes]
    if gone:
        raise OptionError(
            f"`zeroshot`: {len(gone)} finished runs were not evaluated on all of "
            f"{', '.join(sweep.zeroshot)}, and their pruned models were not kept "
            f"(`save_checkpoints` was false): {', '.join(gone)}. Delete these runs in {sweep.out} "
            "to make them again, or name another `out`."
        )
