"""Calls that the sweep refuses, before its first run or before results are mixed."""

import csv
import shutil
from pathlib import Path

import pytest
import yaml

pytest.importorskip("jsonargparse", reason="the command line needs the extra `cli`")

from small_sweeps import RECIPES, rewrite, run_sweep

from mrp_lightning.errors import OptionError
from mrp_lightning.experiments import running
from mrp_lightning.records.evaluation import read, record


def test_tables_of_others_are_refused_before_any_run(here, capsys):
    name = "out/results.csv"
    Path(name).parent.mkdir(parents=True)
    Path(name).write_text("mine")
    with pytest.raises(SystemExit):
        run_sweep()
    message = capsys.readouterr().err
    assert Path(name).name in message
    assert "did not write" in message or "is not known to be written" in message
    assert Path(name).read_text() == "mine"
    assert not Path("out/tiny").exists()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ('--vary={"dampin": [1]}', "dampin"),
        ('--vary={"data.num_sample": 1}', "num_sample"),
        ('--vary={"trainer.callbacks.init_args.dampin": 0.1}', "dampin"),
        ("--config=elsewhere.yaml", "gone.yaml"),
        ("--out=file", "file is a file"),
        ("--out=/", "`out`: / is the root of all files"),
        ("--out=/proc/self/fdinfo", "`out`: /proc/"),
        ('--vary={"data.eval_files": [["gone.txt"]]}', "`eval_files`: no such file: gone.txt"),
        ("--config=typo.yaml", "modles"),
        ("--config=key.yaml", "'option.x' is not accepted"),
        ('--models={"a": {"options": {"model.modl": "x"}}}', "modl"),
        ('--vary={"trainer.callbacks.init_args.damping": [-1]}', "`damping` must be a finite num"),
        ('--vary={"data.num_samples": ["many"]}', "many"),
        ('--vary={"data.seed": [1]}', "`vary` has data.seed, which"),
        ('--models={"a": {"options": {"model.model": "./gone"}}}', "no directory ./gone"),
    ],
)
def test_what_no_run_could_have_is_told_before_any(option, message, here, capsys):
    (here / "file").touch()
    (here / "typo.yaml").write_text("modles: {a: {options: {x: 1}}}")
    (here / "key.yaml").write_text("models: {a: {options: {}}, a.1: {option: {x: 1}, options: {}}}")
    (here / "elsewhere.yaml").write_text("base: [gone.yaml]")
    with pytest.raises(SystemExit) as stop:
        run_sweep(option)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not (here / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("held_out: 0.5", "held_out: 1.5"), "`tuning.held_out`"),
        (("target: dense}", "allocation: output}"), "allocation: output"),
        (("target: dense}", "traget: dense}"), "traget"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused_before_any_run(here, capsys, change, message):
    Path("recipes.yaml").write_text(RECIPES.replace(*change))
    with pytest.raises(SystemExit):
        run_sweep("--config=recipes.yaml")
    assert message in capsys.readouterr().err
    assert not Path("out").exists()


def test_an_unknown_task_is_refused_before_any_run(here, capsys, monkeypatch):
    def load(names, **_):
        raise OptionError(f"lm-eval has no task {names[0]}.", "tasks")

    monkeypatch.setattr(running, "load_tasks", load)  # an index of all tasks takes a minute
    with pytest.raises(SystemExit):
        run_sweep("--zeroshot=[absent]")
    assert "`zeroshot`: lm-eval has no task absent." in capsys.readouterr().err
    assert not Path("out").exists()


def test_another_configuration_is_not_mixed_in(finished, capsys):
    rewrite("base.yaml", ("num_samples: 4", "num_samples: 5"))
    with pytest.raises(SystemExit):
        run_sweep("--only=tiny/2of4-SM-*")
    message = capsys.readouterr().err
    assert "`data.num_samples` was 4, is 5" in message
    assert "`out`" in message
    for name in ("tiny/dense", "tiny/2of4-SM-s128-seed0", "tiny/2of4-SM-s128-seed1"):
        assert name in message

    # Beside runs that are made again or anew, its figures are not shown, nor kept.
    Path("out/tiny/dense/run.json").unlink()
    record("out/tiny/dense", zeroshot={"piqa": {"acc": 0.7}})
    run_sweep("--only=tiny/50-SM-*-seed0")
    shown = capsys.readouterr().out
    names = ("tiny/2of4-magnitude", "tiny/2of4-SM-s128-seed0", "tiny/2of4-SM-s128-seed1")
    assert f"configuration or other files: {', '.join(names)}." in shown
    with Path("out/results.csv").open() as file:
        rows = {(row["setting"], row["measure"]) for row in csv.DictReader(file)}
    assert {setting for setting, _ in rows} == {"dense", "50%"}
    assert not any(measure.startswith("piqa") for _, measure in rows)
    assert read("out/tiny/dense").zeroshot == {}


def test_runs_from_files_that_changed_since_are_not_mixed_in(finished, capsys):
    rewrite("text.txt")  # the same content at another time
    Path("model/README.md").write_text("of no effect")
    run_sweep("--only=tiny/2of4-SM-*-seed0")
    for name, file, change in (
        ("the evaluation text", "test.txt", ("7", "9")),
        ("the calibration text", "text.txt", ("7", "9")),
        ("the model", "model/config.json", ('"llama"', ' "llama"')),
    ):
        content = Path(file).read_text()
        rewrite(file, change)
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            run_sweep("--only=tiny/2of4-SM-*-seed0")
        assert stop.value.code == 2
        names = "tiny/2of4-SM-s128-seed0"
        names = names if name == "the calibration text" else f"tiny/dense, {names}"
        message = f"with another configuration: other files of {name} ({names})"
        assert message in capsys.readouterr().err
        Path(file).write_text(content)


def test_a_text_that_is_replaced_meanwhile_leaves_earlier_runs_out(finished, monkeypatch, capsys):
    execute = running.execute

    def execute_and_replace(*args, **options):
        execute(*args, **options)
        rewrite("test.txt", ("compute", "measure"))

    monkeypatch.setattr(running, "execute", execute_and_replace)
    run_sweep("--only=tiny/50-SM-*-seed0")
    assert "configuration or other files: tiny/dense, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("fast_dev_run: true", "`trainer.fast_dev_run` makes no result"),
        ("limit_test_batches: 0", "`trainer.limit_test_batches` is 0"),
        ("limit_predict_batches: 0.0", "`trainer.limit_predict_batches` is 0"),
    ],
)
def test_runs_without_figures_are_refused(here, capsys, option, message):
    rewrite("base.yaml", ("trainer:", f"trainer:\n  {option}"))
    with pytest.raises(SystemExit) as stop:
        run_sweep()
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not Path("out").exists()


def test_no_text_to_evaluate_on_is_said_before_any_run(here, capsys):
    rewrite("base.yaml", ("eval_files:\n  - test.txt", "hold_out: false"))
    with pytest.raises(SystemExit) as stop:
        run_sweep()
    assert stop.value.code == 2
    assert "`eval_files`: this stage reads text, and was given none" in capsys.readouterr().err
    assert not Path("out").exists()


def test_a_base_that_does_not_prune_is_refused(here, capsys):
    base = yaml.safe_load(Path("base.yaml").read_text())
    del base["trainer"]["callbacks"]
    Path("base.yaml").write_text(yaml.safe_dump(base))
    with pytest.raises(SystemExit):
        run_sweep()
    assert "callbacks.MRPCallback" in capsys.readouterr().err
    for other in ("callbacks.KeepSparsity", "callbacks.MRPCallback"):
        callbacks = [{"class_path": name} for name in ("callbacks.MRPCallback", other)]
        base["trainer"]["callbacks"] = callbacks
        Path("base.yaml").write_text(yaml.safe_dump(base))
        with pytest.raises(SystemExit):
            run_sweep()
        assert "`base`: the last of `trainer.callbacks`, and no other" in capsys.readouterr().err
    assert not Path("out").exists()


@pytest.mark.parametrize("file", ["out/tiny", "out/tiny/50-SM-s128-seed1"])
def test_a_file_in_the_way_of_a_run_is_named_before_any(here, capsys, monkeypatch, file):
    monkeypatch.setattr(running, "execute", lambda *_, **__: pytest.fail("a run was made"))
    Path(file).parent.mkdir(parents=True)
    Path(file).write_text("of a user")
    with pytest.raises(SystemExit) as stop:
        run_sweep()
    assert stop.value.code == 2
    assert f"{file} is a file. Name another directory, or move it away" in capsys.readouterr().err


def test_a_directory_of_others_at_a_checkpoint_is_named_before_any_run(here, capsys):
    file = Path("out/tiny/50-SM-s128-seed1/notes.txt")
    file.parent.mkdir(parents=True)
    file.write_text("of a user")
    with pytest.raises(SystemExit) as stop:
        run_sweep("--save_checkpoints=true")
    assert stop.value.code == 2
    message = f"{file.parent} holds what mrp-lightning did not write"
    assert message in capsys.readouterr().err
    assert [path for path in Path("out").rglob("*") if path.is_file()] == [file]


def test_a_sweep_takes_language_models(here, capsys):
    base = yaml.safe_load(Path("base.yaml").read_text())
    base["model"] = {"class_path": "lightning.pytorch.demos.boring_classes.BoringModel"}
    Path("base.yaml").write_text(yaml.safe_dump(base))
    content = yaml.safe_load(Path("sweep.yaml").read_text())
    content["models"]["tiny"]["options"] = {"trainer.max_epochs": 1}
    Path("sweep.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(SystemExit):
        run_sweep()
    assert "`class_path`: a sweep measures perplexity" in capsys.readouterr().err


def test_a_damaged_run_is_named(finished, capsys):
    path = Path("out/tiny/dense/run.json")
    for content in ("{", "[]", '{"format_version": 1, "run": {"mode": "tiny"}}'):
        path.write_text(content)
        with pytest.raises(SystemExit):
            run_sweep("--only=tiny/dense")
        assert str(path) in capsys.readouterr().err


def test_a_finished_run_without_its_results_is_named(here, capsys):
    for trial, name in (("50-SM-s128-seed0", "pruning_report.json"), ("dense", "evaluation.json")):
        directory = Path("out/tiny", trial)
        directory.mkdir(parents=True)
        (directory / "run.json").touch()
        (directory / "evaluation.json").touch()
        (directory / name).unlink(missing_ok=True)
        with pytest.raises(SystemExit):
            run_sweep(f"--only=tiny/{trial}")
        message = f"{directory} is a finished run without {name}. Delete run.json there"
        assert message in capsys.readouterr().err
        shutil.rmtree(directory)
