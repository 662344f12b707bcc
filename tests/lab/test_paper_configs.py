"""configs/paper: every row of the paper's tables, and no other."""

from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("jsonargparse", reason="the command line needs the extra `cli`")

from paper import paper_values

from mrp_lightning.commands.zeroshot import PAPER_TASKS
from mrp_lightning.experiments.design import Sweep
from mrp_lightning.experiments.running import configure
from mrp_lightning.experiments.sweep import read_sweep
from mrp_lightning.experiments.trials import Trial

PAPER = Path(__file__).parents[2] / "configs" / "paper"
SWEEPS = sorted(p for p in PAPER.glob("*.yaml") if "runs" in yaml.safe_load(p.read_text("utf-8")))
ROWS = list(paper_values().itertuples())


def read(path: Path, *arguments: str) -> Sweep:
    return read_sweep([f"--config={path}", *arguments])


def options_of(trial: Trial, sweep: Sweep) -> dict[str, Any]:
    return configure(trial, sweep).described()


def pruned(sweep: Sweep) -> list[Trial]:
    return [trial for trial in sweep.selected if trial.method is not None]


def names_of(trial: Trial) -> set[tuple[str, ...]]:
    # A table without a block size is any run's; those of dense models have none.
    sizes = ("", "all" if trial.block_size is None else str(trial.block_size))
    return {(trial.model, trial.setting, trial.method or "", size) for size in sizes}


@pytest.fixture(scope="module")
def sweeps() -> dict[str, Sweep]:
    return {path.stem: read(path) for path in SWEEPS}


def test_every_row_of_the_paper_is_run(sweeps):
    runs = {name for sweep in sweeps.values() for run in sweep.selected for name in names_of(run)}
    rows = {(f.model, f.setting, f.method, f.block_size) for f in ROWS}
    mamba = {row for row in rows if row[0].startswith("Mamba")}
    assert len(rows) > 150
    assert len(mamba) == 19
    assert rows - runs == set()


def test_nothing_else_is_run(sweeps):
    rows = {(f.model, f.setting, f.method, f.block_size) for f in ROWS}
    runs = [run for sweep in sweeps.values() for run in pruned(sweep)]
    assert [run for run in runs if not names_of(run) & rows] == []


def test_every_metric_of_the_paper_is_measured(sweeps):
    for name, sweep in sweeps.items():
        run = pruned(sweep)[0]
        options = options_of(run, sweep)
        measured = {f"perplexity/{text}" for text in options["data.evaluation"]}
        if sweep.zeroshot:
            assert set(sweep.zeroshot) == set(PAPER_TASKS)
            names = [task.removesuffix("_openai") for task in PAPER_TASKS]
            measured |= {f"accuracy/{task}" for task in [*names, "average"]}
            measured |= {"perplexity/lambada"}
        models = {run.model for run in pruned(sweep)}
        settings = {run.setting for run in pruned(sweep)}
        values = [f for f in ROWS if f.model in models and f.setting in settings]
        assert {f.metric for f in values} <= measured, name


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_the_command_line_takes_every_model(path):
    sweep = read(path)
    for model in sweep.models:
        dense, *_, run = [run for run in sweep.selected if run.model == model]
        assert options_of(dense, sweep)["trainer.callbacks"] is None
        options = options_of(run, sweep)
        assert options["model.model"] == sweep.models[model].options["model.model"]
        assert options["data.num_samples"] == (run.changed.value if run.changed else 128)
        assert options["data.sequence_length"] == 2048
        callback = "trainer.callbacks.0.init_args"
        assert options[f"{callback}.damping"] == 0.01
        assert options[f"{callback}.method"] == run.method
        assert options.get(f"{callback}.block_size") == run.block_size


def test_one_row_is_one_command():
    sweep = read(PAPER / "50_and_2of4.yaml", "--only=LLaMA2-7B/2of4-SM-s2048-*")
    assert [run.method for run in sweep.selected] == [None, "SM"]


def test_sweeps_do_not_write_over_each_others_tables(sweeps):
    assert len({sweep.out for sweep in sweeps.values()}) == len(sweeps) > 1
