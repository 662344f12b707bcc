"""Which runs a sweep is made of."""

import pytest

from mrp_lightning.errors import MethodError, OptionError
from mrp_lightning.experiments.sweep.plan import ModelRuns, Plan, Run

TWO_MODELS = {
    "a": ModelRuns({"model.model": "dir/a"}, [128, None]),
    "b": ModelRuns({"model.model": "dir/b"}),
}


def plan(**changes) -> Plan:
    given = {"models": TWO_MODELS, "runs": {"2:4": ["SS", "SM"]}, "seeds": [0, 1]}
    return Plan(**{**given, **changes})


def test_every_method_meets_every_block_size_and_seed_of_its_model():
    runs = plan().all_runs
    assert len(runs) == (1 + 2 * 2 * 2) + (1 + 2 * 2)
    assert Run("a", "2:4", "SM", None, 1) in runs
    assert Run("b", "2:4", "SM", None, 1) not in runs
    assert runs[0] == Run("a")


def test_what_changes_nothing_is_not_repeated():
    runs = plan(runs={"50%": ["magnitude", "wanda", "magnitude+M"]}).all_runs
    assert [run for run in runs if run.method == "magnitude"] == [
        Run("a", "50%", "magnitude"),
        Run("b", "50%", "magnitude"),
    ]
    assert len([run for run in runs if run.method == "wanda"]) == 2 * 2  # seeds, no block sizes
    assert len([run for run in runs if run.method == "magnitude+M"]) == 2 * 2


def test_options_varied_one_at_a_time():
    vary = {"data.num_samples": [8, 16], "trainer.callbacks.init_args.damping": [0.1]}
    runs = [run for run in plan(vary=vary, seeds=[0]).all_runs if run.model == "b"]
    assert [run.changed for run in runs if run.method == "SM"] == [
        ("data.num_samples", 8),
        ("data.num_samples", 16),
        ("trainer.callbacks.init_args.damping", 0.1),
    ]
    assert runs[-1].options()["trainer.callbacks.init_args.damping"] == 0.1


def test_each_run_has_a_directory_of_its_own():
    vary = {"data.num_samples": [8, 16]}
    runs = plan(runs={"2:4": ["SM", "wanda"], "50%": ["SM"]}, vary=vary).all_runs
    assert len({run.directory for run in runs}) == len(runs)
    assert "b/2of4-SM-s128-num_samples=8-seed1" in {str(run.directory) for run in runs}


def test_a_run_is_the_configuration_with_its_own_options():
    init = "trainer.callbacks.init_args"
    assert Run("a").options() == {"trainer.callbacks": None}
    assert Run("a", "62.5%", "SM", None, 3).options() == {
        f"{init}.pattern": None,
        f"{init}.sparsity": 0.625,
        f"{init}.method": "SM",
        f"{init}.block_size": None,
        "data.seed": 3,
    }
    assert Run("a", "2:4", "magnitude").options() == {
        f"{init}.pattern": "2:4",
        f"{init}.sparsity": None,
        f"{init}.method": "magnitude",
    }


def test_only_names_runs_and_brings_the_dense_model():
    assert plan(only="a/2of4-SM-s128-*").selected == [
        Run("a"),
        Run("a", "2:4", "SM", 128, 0),
        Run("a", "2:4", "SM", 128, 1),
    ]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"runs": {124: ["SM"]}}, OptionError, "in quotes"),
        ({"runs": {"half": ["SM"]}}, OptionError, "percentage"),
        ({"runs": {"2:4": ["sm"]}}, MethodError, "sparsegpt"),
        ({"runs": {"50%": ["MM"]}}, MethodError, "N:M"),
        ({"seeds": []}, OptionError, "seeds"),
        ({"only": ["c/*"]}, OptionError, "b/dense|a/dense"),
    ],
)
def test_mistakes(changes, error, message):
    with pytest.raises(error, match=message):
        plan(**changes)
