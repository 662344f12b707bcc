"""Averages, claims and the paper's values, from scores that are made up."""

import csv
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from mrp_lightning.experiments import numbers
from mrp_lightning.experiments.models import Model, Result, find_models
from mrp_lightning.experiments.page.claims import findings
from mrp_lightning.experiments.page.tables import markdown, write
from mrp_lightning.experiments.runs import FinishedTrial, Run, read_run
from mrp_lightning.experiments.scores import Score, deviation, scores, text, values
from mrp_lightning.experiments.trials import Change, Trial
from mrp_lightning.records.evaluation import Evaluation, record
from mrp_lightning.records.report import PruningReport

PTB = Score("perplexity", "ptb", 64)


def models(
    perplexities: dict[Trial, list[float]], of: str = "wikitext2", context: int = 2048
) -> list[Model]:
    """The first perplexity is that of seed 0, and so on."""
    results = []
    for trial, found in perplexities.items():
        runs = []
        for seed, value in enumerate(found):
            scores = {of: {"perplexity": value, "context": context}}
            finished = FinishedTrial(Trial.from_dict({**trial.to_dict(), "seed": seed}), "", {})
            evaluation = Evaluation(perplexity=scores)
            runs.append(Run(Path(), "", None, evaluation, finished=finished))
        results.append(Result(runs, trial.label))
    return [Model(next(iter(perplexities)).model, None, results)]


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
    measured = scores(read_run(tmp_path, "run"))
    named = {score.name: value.value for score, value in measured.items()}
    assert named["perplexity/lambada"] == 29
    assert named["accuracy/hellaswag"] == 35
    assert named["acc/hellaswag"] == 30
    expected = statistics.mean([40, 35, 25, 45, 60, 50])
    assert math.isclose(named["accuracy/average"], expected)


def finish(directory: Path, seed: int, **found: Any) -> Run:
    """A run of a sweep, and what was found about it."""
    FinishedTrial(Trial("m", "2:4", "SM", 128, seed), "a machine", {}).save(directory)
    PruningReport({"method": "SM", "pattern": "2:4"}, complete=True).save(directory)
    record(directory, **found)
    return read_run(directory, directory.name)


def test_averages_are_over_the_seeds(tmp_path):
    perplexities = [7.0, 8.0, 8.5]
    runs = [
        finish(tmp_path / f"{s}", s, perplexity={"ptb": {"perplexity": value, "context": 64}})
        for s, value in enumerate(perplexities)
    ]
    ((result,),) = [model.results for model in find_models(runs)]
    assert result.trial == Trial("m", "2:4", "SM", 128)
    found = values(result.runs, PTB)
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
    write(find_models(runs), tmp_path)
    rows = csv.DictReader((tmp_path / "results.csv").read_text().splitlines())
    found = {r["measure"]: (r["mean"], r["seeds"]) for r in rows}
    assert found["perplexity/ptb"] == ("7.0", "3")
    assert found["accuracy/piqa"] == ("62.5", "2")


def test_a_recipe_is_none_of_the_papers_methods():
    of_method, of_recipe = (
        Trial("OPT-125M", "2:4", "SM", 128, recipe=name) for name in (None, "longer")
    )
    table = markdown(models({of_method: [52.5], of_recipe: [51.0]}))
    of_one, of_other = table.strip().splitlines()[-2:]
    assert "SM" in of_one
    assert of_other == "| 2:4 | longer | **51.000** |  |  |"
    sparsegpt = Trial("OPT-125M", "2:4", "SS", 128)
    assert findings(models({of_recipe: [51.0], sparsegpt: [60.0]})) == []


def test_the_papers_value_stands_beside_ours(tmp_path):
    table = models({Trial("OPT-125M", "2:4", "SM", 128): [52.5]})
    text = markdown(table)
    assert "| 52.500 | 52.4 | +0.1 |" in text
    write(table, tmp_path)
    (row,) = csv.DictReader((tmp_path / "results.csv").read_text().splitlines())
    assert float(row["paper"]) == 52.4
    assert math.isclose(float(row["difference"]), 0.1, rel_tol=1e-9)
    assert json.loads((tmp_path / "results.json").read_text())["results"][0]["paper"] == 52.4


def test_another_context_is_not_compared_with_the_paper():
    trial = Trial("OPT-125M", "2:4", "SM", 128)
    table = models({trial: [52.5]}, "wikitext2", 1024)
    assert "paper" not in markdown(table)
    assert "perplexity wikitext2 @1024" in markdown(table)


def test_an_ablation_is_not_compared_with_the_paper():
    changed = Change("data.num_samples", 8)
    table = models({Trial("OPT-125M", "2:4", "SM", 128, None, changed): [52.5]})
    assert "paper" not in markdown(table)


@pytest.mark.parametrize("values", [[math.inf], [math.inf, 7.0], [math.inf, math.inf]])
def test_an_infinite_perplexity_has_no_mean(tmp_path, values):
    write(models({Trial("OPT-125M", "80%", "magnitude"): values}), tmp_path)
    (row,) = json.loads((tmp_path / "results.json").read_text())["results"]
    assert (row["mean"], row["deviation"]) == (None, None)
    assert "not finite" in (tmp_path / "results.md").read_text()


def test_numbers_keep_what_says_something():
    values = [6.98612, 12.3456, 5432.1, 1.5e20, math.inf, None]
    assert [numbers.perplexity(v) for v in values] == [
        *("6.986", "12.346", "5,432", "2e20", "not finite", "–"),
    ]
    assert [numbers.relative_loss(v) for v in (0.01234, 0.0, 1.234e-5)] == [
        *("0.0123", "0.0000", "1.23e−05"),
    ]


def runs(**perplexities: list[float]) -> dict[Trial, list[float]]:
    """`SS_50=[…]` is SparseGPT at 50%."""
    named = {}
    for name, found in perplexities.items():
        method, _, setting = name.partition("_")
        setting = setting.replace("of", ":") if "of" in setting else f"{setting}%"
        named[Trial("m", setting, method, 128)] = found
    return named


def verdicts(perplexities: dict[Trial, list[float]]) -> dict[str, bool]:
    return {found.claim.split(":")[0]: found.holds for found in findings(models(perplexities))}


def test_a_gain_is_judged_seed_by_seed():
    # The seeds differ by more than the methods, but in every one of them SM is better by 0.1.
    better = runs(SS_50=[10.0, 12.0, 14.0], SM_50=[9.9, 11.9, 13.8])
    assert verdicts(better) == {"SM is better than SparseGPT": True}
    named_otherwise = runs(sparsegpt_50=[10.0, 12.0, 14.0], SM_50=[9.9, 11.9, 13.8])
    assert verdicts(named_otherwise) == {"SM is better than SparseGPT": True}
    worse = runs(SS_50=[10.0, 12.0, 14.0], SM_50=[9.0, 13.0, 14.1])
    assert verdicts(worse) == {"SM is better than SparseGPT": False}


def test_claims_about_mm_and_about_growth():
    same = runs(SS_2of4=[10.0, 11.0], SM_2of4=[9.0, 10.0], MM_2of4=[9.1, 9.9])
    assert verdicts(same)["MM is as good as SM"]
    other = runs(SS_2of4=[10.0, 11.0], SM_2of4=[9.0, 10.0], MM_2of4=[9.5, 10.5])
    assert not verdicts(other)["MM is as good as SM"]
    grows = runs(SS_50=[10.0], SM_50=[9.9], SS_70=[20.0], SM_70=[15.0], SS_80=[80.0], SM_80=[40.0])
    assert verdicts(grows)["The gap to SparseGPT grows with sparsity"]
    shrinks = runs(SS_50=[10.0], SM_50=[8.0], SS_70=[20.0], SM_70=[19.0])
    assert not verdicts(shrinks)["The gap to SparseGPT grows with sparsity"]


def test_claims_about_damping_and_samples():
    def ablation(option: str, values: dict[float, float]) -> dict[Trial, list[float]]:
        return {
            Trial("m", "2:4", "SM", 128, None, Change(option, value)): [perplexity]
            for value, perplexity in values.items()
        }

    damping = "trainer.callbacks.init_args.damping"
    assert verdicts(ablation(damping, {0.1: 9.0, 0.001: 8.0, 0.01: 8.5})) == {
        "Smaller damping is better": True
    }
    assert not verdicts(ablation(damping, {0.1: 8.0, 0.01: 8.5}))["Smaller damping is better"]
    more = "More calibration samples are better"
    assert verdicts(ablation("data.num_samples", {128: 7.0, 8: 9.0, 64: 7.5}))[more]
    assert not verdicts(ablation("data.num_samples", {128: 7.6, 8: 9.0, 64: 7.5}))[more]


def test_a_claim_about_numbers_is_not_asked_of_other_values():
    values = {
        Trial("m", "2:4", "SM", 128, None, Change("data.num_samples", value)): [7.0]
        for value in (None, "all", [1, 2], 8)  # and one number is no order
    }
    assert verdicts(values) == {}
