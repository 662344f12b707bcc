"""Averages, claims and the paper's figures, from results that are made up."""

import csv
import json
import math
import statistics
from dataclasses import asdict

from mrp_lightning.evaluation.records import record
from mrp_lightning.experiments.sweep.claims import findings
from mrp_lightning.experiments.sweep.plan import Run
from mrp_lightning.experiments.sweep.results import Result, averages, read_result, rounded
from mrp_lightning.experiments.sweep.tables import markdown, write


def results(
    perplexities: dict[Run, list[float]], text: str = "wikitext2", context: int = 2048
) -> list[Result]:
    return [
        Result(
            Run(run.model, run.setting, run.method, run.block_size, seed, run.changed),
            {f"perplexity/{text}": value},
            {f"perplexity/{text}": context},
            "a machine",
        )
        for run, values in perplexities.items()
        for seed, value in enumerate(values)
    ]


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
    finished = {"run": {**asdict(Run("Mamba-130M"))}, "machine": "a machine"}
    (tmp_path / "run.json").write_text(json.dumps(finished))
    measures = read_result(tmp_path).measures
    assert measures["perplexity/lambada"] == 29
    assert measures["accuracy/hellaswag"] == 35
    expected = statistics.mean([40, 35, 25, 45, 60, 50])
    assert math.isclose(measures["accuracy/average"], expected)


def test_averages_are_over_the_seeds():
    run = Run("m", "2:4", "SM", 128)
    found = averages(results({run: [7.0, 8.0, 8.5]}))[run]["perplexity/wikitext2"]
    assert found.mean == statistics.mean([7.0, 8.0, 8.5])
    assert found.deviation == statistics.stdev([7.0, 8.0, 8.5])
    assert str(found) == "7.833 ± 0.764"


def test_the_papers_figure_stands_beside_ours(tmp_path):
    table = averages(results({Run("OPT-125M", "2:4", "SM", 128): [52.5]}))
    text = markdown(table)
    assert "| 52.50 | 52.4 | +0.1000 |" in text
    write(table, tmp_path)
    (row,) = csv.DictReader((tmp_path / "results.csv").read_text().splitlines())
    assert float(row["paper"]) == 52.4
    assert math.isclose(float(row["difference"]), 0.1, rel_tol=1e-9)
    assert json.loads((tmp_path / "results.json").read_text())["results"][0]["paper"] == 52.4


def test_another_context_is_not_compared_with_the_paper():
    table = averages(results({Run("OPT-125M", "2:4", "SM", 128): [52.5]}, context=1024))
    assert "paper" not in markdown(table)
    assert "perplexity wikitext2 @1024" in markdown(table)


def test_an_ablation_is_not_compared_with_the_paper():
    changed = ("data.num_samples", 8)
    table = averages(results({Run("OPT-125M", "2:4", "SM", 128, None, changed): [52.5]}))
    assert "paper" not in markdown(table)


def test_an_infinite_perplexity_is_written_as_none(tmp_path):
    write(averages(results({Run("m", "80%", "magnitude"): [math.inf]})), tmp_path)
    assert json.loads((tmp_path / "results.json").read_text())["results"][0]["mean"] is None


def test_rounding_keeps_what_says_something():
    values = [0.01234, 6.98612, 12.3456, 123.456, 5432.1, 1.5e20, math.inf]
    assert [rounded(v) for v in values] == [
        *("0.0123", "6.986", "12.35", "123.5", "5432", "2e20", "inf"),
    ]


def runs(**perplexities: list[float]) -> dict[Run, list[float]]:
    """`SS_50=[…]` is SparseGPT at 50%."""
    named = {}
    for name, values in perplexities.items():
        method, _, setting = name.partition("_")
        setting = setting.replace("of", ":") if "of" in setting else f"{setting}%"
        named[Run("m", setting, method, 128)] = values
    return named


def verdicts(perplexities: dict[Run, list[float]]) -> dict[str, bool]:
    return {found.claim.split(":")[0]: found.holds for found in findings(results(perplexities))}


def test_a_gain_is_judged_seed_by_seed():
    # The seeds differ by more than the methods, but in every one of them SM is better by 0.1.
    better = runs(SS_50=[10.0, 12.0, 14.0], SM_50=[9.9, 11.9, 13.8])
    assert verdicts(better) == {"SM is better than SparseGPT": True}
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
    def ablation(option: str, values: dict[float, float]) -> dict[Run, list[float]]:
        return {
            Run("m", "2:4", "SM", 128, None, (option, value)): [perplexity]
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
