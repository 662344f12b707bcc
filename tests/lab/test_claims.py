"""The paper's claims and values, next to scores that are made up."""

import pytest

pytest.importorskip("matplotlib")

from pages.claims import findings
from pages.parts import results_part
from scored_models import models

from mrp_lightning.experiments.groups import ModelRuns
from mrp_lightning.experiments.scores import ScoreFrame, markdown
from mrp_lightning.experiments.trials import ChangedOption, Trial


def results(of: list[ModelRuns]) -> str:
    """The table of results of a model."""
    (model,) = of
    (table,) = results_part(ScoreFrame(model)).tables
    return markdown(table)


def test_a_recipe_is_none_of_the_papers_methods():
    of_method, of_recipe = (
        Trial("OPT-125M", "2:4", "SM", 128, recipe=name) for name in (None, "longer")
    )
    table = results(models({of_method: [52.5], of_recipe: [51.0]}))
    of_one, of_other = table.strip().splitlines()[-2:]
    assert "SM" in of_one
    assert of_other == "| 2:4 | longer | **51.000** |  |  |"
    sparsegpt = Trial("OPT-125M", "2:4", "SS", 128)
    assert findings(models({of_recipe: [51.0], sparsegpt: [60.0]})) == []


def test_the_papers_value_stands_beside_ours():
    text = results(models({Trial("OPT-125M", "2:4", "SM", 128): [52.5]}))
    assert "| 52.500 | 52.4 | +0.1 |" in text


def test_another_context_is_not_compared_with_the_paper():
    trial = Trial("OPT-125M", "2:4", "SM", 128)
    table = models({trial: [52.5]}, "wikitext2", 1024)
    assert "paper" not in results(table)
    assert "perplexity wikitext2 @1024" in results(table)


def test_an_ablation_is_not_compared_with_the_paper():
    changed = ChangedOption("data.num_samples", 8)
    table = models({Trial("OPT-125M", "2:4", "SM", 128, None, changed): [52.5]})
    assert "paper" not in results(table)


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
            Trial("m", "2:4", "SM", 128, None, ChangedOption(option, value)): [perplexity]
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
        Trial("m", "2:4", "SM", 128, None, ChangedOption("data.num_samples", value)): [7.0]
        for value in (None, "all", [1, 2], 8)  # and one number is no order
    }
    assert verdicts(values) == {}
