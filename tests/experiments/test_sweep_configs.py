"""configs/sweeps: each is a sweep whose runs the command line takes."""

from pathlib import Path

import pytest
import yaml

pytest.importorskip("jsonargparse", reason="the command line needs the extra `cli`")

from mrp_lightning.errors import OptionError
from mrp_lightning.experiments.running import configure
from mrp_lightning.experiments.sweep import read_sweep

CONFIGS = Path(__file__).parents[2] / "configs"
LAB = CONFIGS.parent / "lab" / "sweeps"
SWEEPS = sorted(
    p
    for p in (*CONFIGS.glob("sweeps/*.yaml"), *LAB.glob("*.yaml"))
    if {"base", "runs"} <= yaml.safe_load(p.read_text()).keys()
)


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_every_run_can_be_configured(path):
    sweep = read_sweep([f"--config={path}"])
    assert len(sweep.selected) > 5
    # One run of each model, recipe and varied option: the others have the same keys.
    parts = [(t.model, t.recipe, t.changed and t.changed.key) for t in sweep.selected]
    kinds = {(i, of[i]): t for t, of in zip(sweep.selected, parts, strict=True) for i in range(3)}
    for trial in dict.fromkeys(kinds.values()):
        options = configure(trial, sweep).described()
        assert options["model.model"] == sweep.models[trial.model].options["model.model"]
        assert options.get("trainer.callbacks.0.init_args.method") == trial.method


def test_results_are_of_all_methods_families_and_sparsities():
    sweep = read_sweep([f"--config={CONFIGS}/sweeps/results.yaml"])
    assert list(sweep.models) == ["LLaMA", "OPT", "BLOOM", "Mamba"]
    assert set(sweep.runs) == {"50%", "2:4", "70%", "80%"}
    assert set(sweep.runs["2:4"]) == {"magnitude", "wanda", "SS", "SM", "MS", "MM"}
    assert all(
        {"magnitude", "wanda", "SS", "SM"} <= set(methods) for methods in sweep.runs.values()
    )
    assert len(sweep.seeds) >= 3


def test_yaml_reads_an_unquoted_pattern_as_a_number(tmp_path, tiny_llama):
    text = (CONFIGS / "sweeps" / "quickstart.yaml").read_text().replace('"2:4"', "2:4")
    path = tmp_path / "sweep.yaml"
    path.write_text(text.replace("local.yaml", f"{CONFIGS}/sweeps/local.yaml"))
    with pytest.raises((OptionError, ValueError), match="in quotes"):
        read_sweep([f"--config={path}"])
