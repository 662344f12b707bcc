"""Whether two runs are of one configuration."""

import json

import pytest

pytest.importorskip("jsonargparse", reason="the command line needs the extra `cli`")

from jsonargparse.typing import Path_fr

from mrp_lightning.experiments.design import ModelTrials, Sweep
from mrp_lightning.experiments.running import configure
from mrp_lightning.experiments.trials import Trial
from mrp_lightning.journal.manifest import differences

CALLBACK = "trainer.callbacks.0.init_args"


@pytest.fixture
def command(tmp_path):
    """The command line of a run with some options of the callback."""

    def make(**options):
        (tmp_path / "base.yaml").write_text("trainer: {callbacks: [callbacks.MRPCallback]}")
        given = {f"trainer.callbacks.init_args.{key}": value for key, value in options.items()}
        sweep = Sweep(
            base=[Path_fr(str(tmp_path / "base.yaml"))],
            models={"a": ModelTrials(options={"model.model": "somewhere", **given})},
            runs={"50%": ["SM"]},
            out="out",
        )
        return configure(Trial("a", "50%", "SM", 64, 0), sweep)

    return make


def stored(cli, *without):
    """What a run keeps of a command line, but for what begins like this."""
    config = json.loads(json.dumps(cli.described()))
    left = {key: value for key, value in config.items() if not key.startswith(without or ("-",))}
    assert (len(left) < len(config)) == bool(without)
    return left


def difference(earlier, cli):
    return "; ".join(differences(earlier, cli.described()))


def test_the_same_configuration_is_the_same(command):
    assert difference(stored(command()), command()) == ""
    tuned = {"tuning": {"epochs": 3}, "target": "dense"}
    assert difference(stored(command(**tuned)), command(**tuned)) == ""


@pytest.mark.parametrize(
    ("option", "given", "message"),
    [
        ("target", {"target": "dense"}, '`{}.target` was null, is "dense"'),
        ("damping", {}, "`{}.damping` was null, is 0.01"),
        ("tuning.held_out", {"tuning": {"held_out": 0.5}}, "`{}.tuning.held_out` was null, is 0.5"),
    ],
)
def test_an_option_that_the_earlier_run_lacks_is_a_difference(command, option, given, message):
    now = command(**given)
    assert message.format(CALLBACK) in difference(stored(now, f"{CALLBACK}.{option}"), now)


def test_a_value_of_none_is_kept_and_is_no_default(command):
    assert command().described()[f"{CALLBACK}.pattern"] is None
    whole = command(tuning={"epochs": 3}, ignore="mlp")
    before = stored(whole) | {f"{CALLBACK}.damping": None, f"{CALLBACK}.ignore": None}
    assert difference(before, whole) == (
        f'`{CALLBACK}.damping` was null, is 0.01; `{CALLBACK}.ignore` was null, is "mlp"'
    )


def test_options_without_a_say_may_differ(command):
    before = stored(command()) | {f"{CALLBACK}.resume": False, "model.streaming": True}
    assert difference(before, command()) == ""
