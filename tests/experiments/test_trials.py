"""Which trials a sweep is made of."""

import re

import pytest

pytest.importorskip("jsonargparse", reason="the command line needs the extra `cli`")

from mrp_lightning.errors import MethodError, OptionError, PatternError
from mrp_lightning.experiments.design import ModelTrials, Sweep
from mrp_lightning.experiments.runs import FinishedTrial
from mrp_lightning.experiments.trials import ChangedOption, Trial

TWO_MODELS = {
    "a": ModelTrials({"model.model": "dir/a"}, [128, None]),
    "b": ModelTrials({"model.model": "dir/b"}),
}


def sweep(**changes) -> Sweep:
    given = {"base": [], "out": "out", "models": TWO_MODELS}
    given |= {"runs": {"2:4": ["SS", "SM"]}, "seeds": [0, 1]}
    return Sweep(**{**given, **changes})


def test_every_method_meets_every_block_size_and_seed_of_its_model():
    trials = sweep().trials
    assert len(trials) == (1 + 2 * 2 * 2) + (1 + 2 * 2)
    assert Trial("a", "2:4", "SM", None, 1) in trials
    assert Trial("b", "2:4", "SM", None, 1) not in trials
    assert trials[0] == Trial("a")


def test_what_changes_nothing_is_not_repeated():
    trials = sweep(runs={"50%": ["magnitude", "wanda", "magnitude+M"]}).trials
    assert [trial for trial in trials if trial.method == "magnitude"] == [
        Trial("a", "50%", "magnitude"),
        Trial("b", "50%", "magnitude"),
    ]
    assert len([trial for trial in trials if trial.method == "wanda"]) == 2 * 2
    assert len([trial for trial in trials if trial.method == "magnitude+M"]) == 2 * 2
    on_grid = sweep(runs={"50%+4bit": ["magnitude"]}).trials  # the grid depends on the inputs
    assert len([trial for trial in on_grid if trial.method]) == 2 * 2


def test_settings_may_have_bits():
    trials = sweep(runs={"50%+4bit": ["JM"], "2:4+8bit": ["JM"], "3bit": ["JM"]}, seeds=[0]).trials
    mine = [trial for trial in trials if trial.model == "b" and trial.method]
    names = ["50+4bit-JM-seed0", "2of4+8bit-JM-seed0", "3bit-JM-seed0"]
    assert [trial.directory.name for trial in mine] == names
    assert [trial.sparsity for trial in mine] == [0.5, 0.5, 0]
    asked = [(0.5, None, 4), (None, "2:4", 8), (None, None, 3)]
    for trial, wanted in zip(mine, asked, strict=True):
        given = {key.rpartition(".")[2]: value for key, value in trial.options().items()}
        assert tuple(given[key] for key in ("sparsity", "pattern", "bits")) == wanted
        told = dict(zip(("sparsity", "pattern", "bits"), wanted, strict=True))
        assert Trial.of_report(told | {"method": "JM"}).setting == trial.setting
    plain = Trial("b", "50%", "SM").options()
    assert not any(key.endswith("bits") for key in plain)


@pytest.mark.parametrize("setting", ["", "+4bit", "4", "4bits", "50%4bit", "50%+", "dense", "50"])
def test_other_settings_are_refused(setting):
    with pytest.raises(OptionError, match=f"`runs` has the setting '{re.escape(setting)}'"):
        sweep(runs={setting: ["SM"]})


def test_bits_of_a_setting_are_checked():
    with pytest.raises(OptionError, match="`bits` must be 3, 4 or 8; got 5"):
        sweep(runs={"50%+5bit": ["SM"]})


def test_each_trial_has_a_directory_of_its_own():
    vary = {"data.num_samples": [8, 16]}
    trials = sweep(runs={"2:4": ["SM", "wanda"], "50%": ["SM"]}, vary=vary).trials
    assert len({trial.directory for trial in trials}) == len(trials)
    assert "b/2of4-SM-s128-num_samples=8-seed1" in {str(trial.directory) for trial in trials}


def test_a_trial_is_the_configuration_with_its_own_options():
    init = "trainer.callbacks.init_args"
    assert Trial("a").options() == {"trainer.callbacks": None}
    assert Trial("a", "62.5%", "SM", None, 3).options() == {
        f"{init}.pattern": None,
        f"{init}.sparsity": 0.625,
        f"{init}.method": "SM",
        f"{init}.block_size": None,
        "data.seed": 3,
    }
    assert Trial("a", "2:4", "magnitude").options() == {
        f"{init}.pattern": "2:4",
        f"{init}.sparsity": None,
        f"{init}.method": "magnitude",
    }


def test_only_names_trials_and_brings_the_dense_model():
    assert sweep(only="a/2of4-SM-s128-*").selected == [
        Trial("a"),
        Trial("a", "2:4", "SM", 128, 0),
        Trial("a", "2:4", "SM", 128, 1),
    ]


BEST = {"method": "JM", "target": "dense", "tuning": {"epochs": 2}, "tuning.batch_size": 4}


def test_a_recipe_may_stand_where_a_method_may():
    trials = sweep(recipes={"best": BEST}, runs={"2:4": ["SM", "best"]}).trials
    of_a = [trial for trial in trials if trial.model == "a" and trial.method == "JM"]
    assert [str(trial.directory) for trial in of_a] == ["a/2of4-best-seed0", "a/2of4-best-seed1"]
    assert [trial.label for trial in trials[:2]] == ["", "SM"]
    assert {trial.label for trial in of_a} == {"best"}
    assert len({trial.directory for trial in trials}) == len(trials)


def test_a_recipe_is_what_the_callback_is_given():
    init = "trainer.callbacks.init_args"
    of = sweep(recipes={"best": BEST}, runs={"70%": ["best"]})
    assert of.options(of.trials[1]) == {
        "model.model": "dir/a",
        f"{init}.method": "JM",
        f"{init}.target": "dense",
        f"{init}.tuning": {"epochs": 2},
        f"{init}.tuning.batch_size": 4,
        f"{init}.pattern": None,
        f"{init}.sparsity": 0.7,
        "data.seed": 0,
    }


def test_the_block_size_of_a_recipe_is_its_own():
    recipes = {"small": {"method": "SM", "block_size": 32}, "any": {"method": "SM"}}
    names = [str(t.directory) for t in sweep(recipes=recipes, runs={"2:4": [*recipes]}).trials]
    assert [name for name in names if name.startswith("a/") and name.endswith("seed0")] == [
        "a/2of4-small-s32-seed0",
        "a/2of4-any-s128-seed0",
        "a/2of4-any-sall-seed0",
    ]


def test_a_recipe_without_inputs_of_its_method_may_see_them_elsewhere():
    recipes = {"tuned": {"method": "magnitude", "tuning": True}}
    trials = sweep(recipes=recipes, runs={"2:4": ["tuned"]}).trials
    assert [trial.seed for trial in trials if trial.model == "b"] == [None, 0, 1]


def test_a_trial_comes_back_from_its_file(tmp_path):
    for trial in sweep(recipes={"best": BEST}, runs={"2:4": ["SM", "best"]}).trials:
        FinishedTrial(trial, "", {}, {}).save(tmp_path)
        assert FinishedTrial.load(tmp_path / "run.json").run == trial


def test_every_mistake_in_recipes_is_listed():
    recipes = {
        "SM": BEST,
        "S+M": BEST,
        "a/b": BEST,
        "none": {"target": "dense"},
        "half": {"method": "SM", "sparsity": 0.5},
    }
    with pytest.raises(OptionError) as caught:
        sweep(recipes=recipes)
    message = str(caught.value)
    assert message.count("is the name of a method") == 2
    for line in (
        "`recipes.a/b` names directories",
        "`recipes.none` names no `method`",
        "has `sparsity`",
    ):
        assert line in message


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"recipes": {"best": BEST}, "runs": {"2:4": ["bset"]}}, MethodError, "'bset'.*best"),
        ({"recipes": {"mm": {"method": "MM"}}, "runs": {"50%": ["mm"]}}, MethodError, "N:M"),
        ({"runs": {124: ["SM"]}}, OptionError, "in quotes"),
        ({"runs": {"half": ["SM"]}}, OptionError, "percentage"),
        ({"runs": {"2:4": ["sm"]}}, MethodError, "sparsegpt"),
        ({"runs": {"50%": ["MM"]}}, MethodError, "N:M"),
        ({"seeds": []}, OptionError, "seeds"),
        ({"out": ""}, OptionError, "`out` is empty"),
        ({"only": ["c/*"]}, OptionError, "b/dense|a/dense"),
        ({"runs": {"2:4": ["SGPT"]}}, MethodError, "`runs` has 'SGPT' at '2:4', but `method`"),
        ({"models": {"a": ModelTrials({}, [0])}}, OptionError, "at '2:4', but `block_size` must"),
        ({"models": {"a": ModelTrials({}, [30])}}, PatternError, "multiple of 4 .* Use .* 128"),
        ({"models": {"a": ModelTrials({}, [])}}, OptionError, "`models.a.block_sizes` is empty"),
        ({"models": {}}, OptionError, "`models` is empty"),
        ({"runs": {}}, OptionError, "`runs` is empty"),
        ({"runs": {"2:4": []}}, OptionError, "`runs` is empty"),
    ],
)
def test_mistakes(changes, error, message):
    with pytest.raises(error, match=message):
        sweep(**changes)


@pytest.mark.parametrize("name", ["", "..", "a/../../b", "/etc", ".", 7, "a\x1b[31m"])
def test_a_model_has_no_directory_outside_of_the_sweeps(name):
    with pytest.raises(OptionError, match="`models`: .* is no name of a directory in `out`"):
        sweep(models={name: ModelTrials({})})
    assert sweep(models={"org/opt-125m": ModelTrials({})}).directory(Trial("org/opt-125m"))


def test_one_method_is_one_trial_under_all_of_its_names():
    trials = sweep(runs={"2:4": ["sparsegpt", "SS", "S+S"]}, seeds=[0]).trials
    assert [t.method for t in trials if t.model == "b"] == [None, "SS"]
    assert str(trials[-1].directory) == "b/2of4-SS-s128-seed0"


VALUES = [0.0001, 1, 1.0, True, None, "text", "two words", "two_words", "a/b/*.txt", "x" * 300]
VALUES += [["a.txt", "b.txt"], ["a.txt"], [], {"wikitext2": 2048}, {"wikitext2": 1024}]


def test_any_value_can_be_varied(tmp_path):
    trials = sweep(vary={"data.option": VALUES}, runs={"2:4": ["SM"]}, seeds=[0]).trials
    found = [trial for trial in trials if trial.model == "b" and trial.changed]
    assert [trial.changed.value for trial in found] == VALUES
    assert [trial.options()["data.option"] for trial in found] == VALUES
    for trial in found:
        assert len(trial.directory.parts) == 2
        (tmp_path / trial.directory).mkdir(parents=True)  # fails where two are called the same
        assert not set(trial.directory.name) & set(" /*\"'[]{}")
        FinishedTrial(trial, "", {}, {}).save(tmp_path)
        assert FinishedTrial.load(tmp_path / "run.json").run == trial


def test_a_plain_value_is_the_name_of_its_directory():
    names = [
        ChangedOption.of("a.damping", value).name for value in (0.0001, 16, "wikitext2", 1e-05)
    ]
    assert names == ["damping=0.0001", "damping=16", "damping=wikitext2", "damping=1e-05"]


def test_options_that_end_alike_are_not_mixed():
    with pytest.raises(OptionError, match="end alike.*batch_size=1"):
        sweep(vary={"data.batch_size": [1], "model.batch_size": [1]})


def test_a_run_of_the_head_alone_removes_nothing():
    trial = Trial.of_report({"method": "SM", "head_grid": "q4_0", "block_size": 128})
    assert (trial.setting, trial.sparsity) == ("head", 0.0)
    beside = Trial.of_report({"method": "SM", "head_grid": "q4_0", "pattern": "2:4"})
    assert (beside.setting, beside.sparsity) == ("2:4", 0.5)
