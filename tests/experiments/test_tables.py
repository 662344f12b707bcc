"""Averages and tables, from scores that are made up."""

import csv
import math
import statistics
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from scored_models import models

from mrp_lightning.commands import numbers
from mrp_lightning.experiments.groups import find_models
from mrp_lightning.experiments.runs import FinishedTrial, RunDirectory, read_run
from mrp_lightning.experiments.scores import (
    Score,
    ScoreFrame,
    deviation,
    scores_of,
    text,
    write_tables,
)
from mrp_lightning.experiments.trials import Trial
from mrp_lightning.records.evaluation import record
from mrp_lightning.records.report import PruningReport

PTB = Score("perplexity", "ptb", 64)


def test_zero_shot_results_are_named_and_averaged_as_in_the_paper(tmp_path):
    zeroshot = {
        "lambada_openai": {"acc": 0.4, "perplexity": 29.0},
        "hellaswag": {"acc": 0.30, "acc_norm": 0.35},  # whose published accuracy is by length
        "arc_challenge": {"acc": 0.20, "acc_norm": 0.25},
        "arc_easy": {"acc": 0.45, "acc_norm": 0.40},
        "piqa": {"acc": 0.6},
        "winogrande": {"acc": 0.5},
    }
    record(tmp_path, zeroshot=zeroshot)
    named = {row["score"].name: row["value"] for row in scores_of(read_run(tmp_path, "run"))}
    assert named["perplexity/lambada"] == 29
    assert named["accuracy/hellaswag"] == 35
    assert named["acc/hellaswag"] == 30
    expected = statistics.mean([40, 35, 25, 45, 60, 50])
    assert math.isclose(named["accuracy/average"], expected)


def finish(directory: Path, seed: int, **found: Any) -> RunDirectory:
    """A run of a sweep, and what was found about it."""
    FinishedTrial(Trial("m", "2:4", "SM", 128, seed), "a machine", {}, {}).save(directory)
    PruningReport({"method": "SM", "pattern": "2:4"}, complete=True).save(directory)
    record(directory, **found)
    return read_run(directory, directory.name)


def test_averages_are_over_the_seeds(tmp_path):
    perplexities = [7.0, 8.0, 8.5]
    runs = [
        finish(tmp_path / f"{s}", s, perplexity={"ptb": {"perplexity": value, "context": 64}})
        for s, value in enumerate(perplexities)
    ]
    (model,) = find_models(runs)
    (group,) = model.groups
    assert group.trial == Trial("m", "2:4", "SM", 128)
    found = ScoreFrame(model).values(("2:4", "SM"), PTB)
    assert dict(found) == dict(enumerate(perplexities))
    assert found.mean() == statistics.mean(perplexities)
    assert deviation(found) == statistics.stdev(perplexities)
    assert text(found, numbers.perplexity) == "7.833 ± 0.764"
    assert text(pd.Series([7.0, math.inf]), numbers.perplexity) == "7.000 (1 of 2 not finite)"


def test_runs_that_were_evaluated_on_different_tasks_share_a_table(tmp_path):
    runs = [
        finish(tmp_path / f"{s}", s, perplexity={"ptb": {"perplexity": 7.0}}, zeroshot=tasks)
        for s, tasks in enumerate([{}, {"piqa": {"acc": 0.5}}, {"piqa": {"acc": 0.75}}])
    ]
    write_tables(find_models(runs), tmp_path)
    rows = csv.DictReader((tmp_path / "results.csv").read_text().splitlines())
    found = {r["measure"]: (r["mean"], r["seeds"]) for r in rows}
    assert found["perplexity/ptb"] == ("7.0", "3")
    assert found["accuracy/piqa"] == ("62.5", "2")


@pytest.mark.parametrize("values", [[math.inf], [math.inf, 7.0], [math.inf, math.inf]])
def test_an_infinite_perplexity_has_no_mean(tmp_path, values):
    write_tables(models({Trial("OPT-125M", "80%", "magnitude"): values}), tmp_path)
    (row,) = csv.DictReader((tmp_path / "results.csv").read_text().splitlines())
    assert (row["mean"], row["deviation"]) == ("inf", "")
    assert "not finite" in (tmp_path / "results.md").read_text()


def test_numbers_keep_what_says_something():
    values = [6.98612, 12.3456, 5432.1, 1.5e20, math.inf, None]
    assert [numbers.perplexity(v) for v in values] == [
        *("6.986", "12.346", "5,432", "2e20", "not finite", "–")
    ]
    assert [numbers.relative_loss(v) for v in (0.01234, 0.0, 1.234e-5)] == [
        *("0.0123", "0.0000", "1.23e−05")
    ]
