"""The command, as a user starts it, on a tiny model."""

import csv
import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml
from lightning.pytorch import seed_everything

pytest.importorskip("jsonargparse", reason="the command line needs the extra `cli`")

from mrp_lightning import CausalLM, TextDataModule, Trainer
from mrp_lightning.commands.main import main
from mrp_lightning.experiments import running
from mrp_lightning.experiments.groups import find_models
from mrp_lightning.experiments.runs import find_runs
from mrp_lightning.models import gguf
from mrp_lightning.records.evaluation import read, record

BASE = {
    "data": {"num_samples": 4, "sequence_length": 32, "batch_size": 2},
    "trainer": {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": [{"class_path": "callbacks.MRPCallback"}],
    },
}


@pytest.fixture
def here(tmp_path, monkeypatch, tiny_llama) -> Path:
    monkeypatch.chdir(tmp_path)
    lines = "\n".join(f"value_{i} = compute({i}) + {i * 7}" for i in range(400))
    Path("text.txt").write_text(lines)
    for key in ("train_files", "eval_files"):
        BASE["data"][key] = ["text.txt"]
    Path("base.yaml").write_text(yaml.safe_dump(BASE))
    sweep = {
        "base": ["base.yaml"],
        "models": {"tiny": {"options": {"model.model": str(tiny_llama)}}},
        "runs": {"2:4": ["magnitude", "SS", "SM", "MM"], "50%": ["SM"]},
        "seeds": [0, 1],
        "out": "out",
    }
    Path("sweep.yaml").write_text(yaml.safe_dump(sweep))
    return tmp_path


def sweep(*more: str) -> None:
    main(["sweep", "--config=sweep.yaml", *more])


def test_tables_of_others_are_refused_before_any_run(here, capsys):
    name = "out/results.csv"
    Path(name).parent.mkdir(parents=True)
    Path(name).write_text("mine")
    with pytest.raises(SystemExit):
        sweep()
    message = capsys.readouterr().err
    assert Path(name).name in message
    assert "did not write" in message or "is not known to be written" in message
    assert Path(name).read_text() == "mine"
    assert not Path("out/tiny").exists()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ('--vary={"dampin": [1]}', "Did you mean `trainer.callbacks.init_args.damping`?"),
        ('--vary={"data.num_sample": 1}', "`data.num_sample`. Did you mean `data.num_samples`?"),
        ("--vary.dampin=0.1", "`vary`: there is no option `dampin`. Did you mean `trainer.callba"),
        ('--vary={"zzz": [1]}', "`vary`: there is no option `zzz`. Name one by its dotted key"),
        ("--config=elsewhere.yaml", "elsewhere.yaml, line 1: `base`: there is no file gone.yaml"),
        ("--out=file", "file is a file"),
        ("--out=/", "`out`: / is the root of all files"),
        ("--out=/proc/self/fdinfo", "`out`: /proc/"),
        ('--vary={"data.eval_files": [["gone.txt"]]}', "`eval_files`: no such file: gone.txt"),
        ("--config=typo.yaml", "typo.yaml, line 1: there is no option `modles`. Did you mean `mod"),
        ("--config=key.yaml", "key.yaml, line 1: `models.a.1` has no key `option`. Did you mean"),
        (
            '--models={"a": {"options": {"model.modl": "x"}}}',
            "`model.modl`. Did you mean `mod",
        ),
        ('--vary={"trainer.callbacks.init_args.damping": [-1]}', "`damping` must be a finite num"),
        ('--vary={"data.num_samples": ["many"]}', "many"),
        ("--zeroshot=[lambda_openai]", "`zeroshot`: lm-eval has no task lambda_openai (nearest: "),
    ],
)
def test_what_no_run_could_have_is_told_before_any(option, message, here, capsys):
    (here / "file").touch()
    (here / "typo.yaml").write_text("modles: {}")
    (here / "key.yaml").write_text("models: {a: {options: {}}, a.1: {option: {}, options: {}}}")
    (here / "elsewhere.yaml").write_text("base: [gone.yaml]")
    with pytest.raises(SystemExit) as stop:
        sweep(option)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not (here / "out").exists()


def test_a_sweep_keeps_every_value_and_is_not_repeated(here, tiny_llama, capsys):
    sweep("--save_checkpoints=true")
    runs = sorted(path.parent.name for path in Path("out/tiny").glob("*/run.json"))
    assert len(runs) == 1 + 1 + 3 * 2 + 2

    # Each is what the two commands of Lightning would have given.
    pruned = Path("out/tiny/2of4-SM-s128-seed1")
    recorded = json.loads((pruned / "evaluation.json").read_text())["perplexity"]["text"]
    seed_everything(0)
    data = TextDataModule(
        eval_files=["text.txt"], train_files=["text.txt"], sequence_length=32, batch_size=3
    )
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    (scores,) = trainer.test(CausalLM(str(pruned)), datamodule=data, verbose=False)
    assert scores["perplexity"] == pytest.approx(recorded["perplexity"], rel=1e-5)
    assert json.loads((pruned / "pruning_report.json").read_text())["config"]["method"] == "SM"

    # The tables say what the runs gave.
    with Path("out/results.csv").open() as file:
        rows = list(csv.DictReader(file))
    seeds = [
        json.loads((path / "evaluation.json").read_text())["perplexity"]["text"]["perplexity"]
        for path in Path("out/tiny").glob("2of4-SM-*")
    ]
    (row,) = [
        r
        for r in rows
        if (r["setting"], r["method"], r["measure"]) == ("2:4", "SM", "perplexity/text")
    ]
    assert float(row["mean"]) == pytest.approx(sum(seeds) / 2)
    assert float(row["deviation"]) == pytest.approx(abs(seeds[0] - seeds[1]) / 2**0.5)
    assert row["seeds"] == "2"
    assert json.loads(Path("out/results.json").read_text())["results"][0]["setting"] == "dense"
    assert "perplexity @32" in Path("out/results.md").read_text()

    # Again: nothing is made. One run lost: that one is made.
    (lost,) = Path("out/tiny").glob("50-SM-s128-seed0")
    (lost / "run.json").unlink()
    before = {path: path.stat().st_mtime_ns for path in Path("out/tiny").glob("*/run.json")}
    capsys.readouterr()
    sweep("--save_checkpoints=true")
    assert "of which 1 are to be made" in capsys.readouterr().out
    assert (lost / "run.json").exists()
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())


def test_a_sweep_says_where_its_runs_are(here, capsys, caplog):
    caplog.set_level("INFO")
    sweep("--only=tiny/50-SM-*-seed0")
    lines = [message for message in caplog.messages if message.startswith("block ")]
    assert [line.split(" · ")[0] for line in lines] == ["block 1/2", "block 2/2"]
    assert "left" in lines[0]
    assert "[2/2] tiny/50-SM-s128-seed0 …" in capsys.readouterr().out
    base = yaml.safe_load(Path("base.yaml").read_text())
    del base["trainer"]["enable_progress_bar"]  # has no say in the result
    Path("base.yaml").write_text(yaml.safe_dump(base))
    sweep("--only=tiny/50-SM-*-seed0")
    assert "of which 0 are to be made" in capsys.readouterr().out


def test_a_run_that_fails_has_a_way_on(here, capsys, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device", "out/tiny")

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr("mrp_lightning.loop.pruned_module.save_pretrained", full)
        sweep("--only=tiny/50-SM-*-seed0", "--save_checkpoints=true")
    assert stop.value.code == 1
    message = capsys.readouterr().err
    assert "1 run failed, all others were made" in message
    assert "No space left on device: 'out/tiny'" in message
    assert "Remove the cause, and give the same sweep again" in message
    sweep("--only=tiny/50-SM-*-seed0", "--save_checkpoints=true")
    assert "of which 1 are to be made" in capsys.readouterr().out


RECIPES = """
recipes:
  tuned: {method: JM, target: dense, tuning: {epochs: 1, batch_size: 2}, tuning.held_out: 0.5}
  SM+dense: {method: SM, target: dense}
runs: {"2:4": [SM, tuned, SM+dense]}
seeds: [0]
"""


def test_recipes_are_rows_of_the_tables(here):
    Path("recipes.yaml").write_text(RECIPES)
    sweep("--config=recipes.yaml")
    report = json.loads(Path("out/tiny/2of4-tuned-seed0/pruning_report.json").read_text())
    assert report["config"]["method"] == "JM"
    assert report["config"]["tuning"] == {
        "epochs": 1,
        "batch_size": 2,
        "held_out": 0.5,
        "learning_rate": 5e-4,
    }
    lines = Path("out/results.md").read_text().splitlines()
    cells = [line.split(" | ")[:2] for line in lines if line.startswith("| 2:4 |")]
    assert [name for _, name in cells] == ["SM", "tuned", "SM+dense"]
    with Path("out/results.csv").open() as file:
        assert {row["method"] for row in csv.DictReader(file)} == {"", "SM", "tuned", "SM+dense"}
    (model,) = find_models(find_runs(Path("out")))
    assert [result.label for result in model.groups] == ["SM", "SM+dense", "tuned"]

    # Where the model was when a run was made tells it from no other.
    moved = Path("out/tiny/2of4-tuned-seed0/pruning_report.json")
    config = json.loads(moved.read_text())["config"]
    moved.write_text(moved.read_text().replace(config["base_model"], "/elsewhere/tiny"))
    shutil.copytree("out/tiny/2of4-tuned-seed0", "out/tiny/again")
    (model,) = find_models(find_runs(Path("out")))
    labels = [(r.label, len(r.runs)) for r in model.groups]
    assert labels == [("SM", 1), ("SM+dense", 1), ("tuned", 2)]
    shutil.rmtree("out/tiny/again")
    moved.write_text(moved.read_text().replace("/elsewhere/tiny", config["base_model"]))

    # The same runs are found again; a recipe that is now another one is not mixed in.
    sweep("--config=recipes.yaml")
    Path("recipes.yaml").write_text(RECIPES.replace("epochs: 1", "epochs: 2"))
    with pytest.raises(SystemExit):
        sweep("--config=recipes.yaml")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("held_out: 0.5", "held_out: 1.5"), "`tuning.held_out`"),
        (("target: dense}", "allocation: output}"), "allocation: output"),
        (("target: dense}", "traget: dense}"), "`target`"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused_before_any_run(here, capsys, change, message):
    Path("recipes.yaml").write_text(RECIPES.replace(*change))
    with pytest.raises(SystemExit):
        sweep("--config=recipes.yaml")
    assert message in capsys.readouterr().err
    assert not Path("out").exists()


def test_two_sweeps_at_once_share_the_runs(here, monkeypatch):
    made = []
    execute = running.execute

    def execute_while_another_process_runs(trial, *args, **options):
        made.append(trial)
        execute(trial, *args, **options)
        if len(made) == 1:
            sweep("--only=tiny/50-SM-*")

    monkeypatch.setattr(running, "execute", execute_while_another_process_runs)
    sweep("--only=tiny/50-SM-*")
    assert len(made) == len(set(made)) == 1 + 2


def test_an_interrupted_run_goes_on_at_its_block(here, monkeypatch, capsys):
    from mrp_lightning.journal.journal import Journal

    write = Journal.write

    class Killed(BaseException):
        pass

    def write_and_die(self, step, record):
        write(self, step, record)
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Journal, "write", write_and_die)
        sweep("--only=tiny/50-SM-*-seed0")
    assert Path("out/tiny/.50-SM-s128-seed0.partial").is_dir()
    sweep("--only=tiny/50-SM-*-seed0")
    report = json.loads(Path("out/tiny/50-SM-s128-seed0/pruning_report.json").read_text())
    assert report["totals"]["resumed_blocks"] == 1
    assert len(report["layers"]) == 14
    assert sorted(path.name for path in Path("out/tiny").iterdir()) == ["50-SM-s128-seed0", "dense"]

    # A run that was made before there were these options is the same.
    finished = Path("out/tiny/50-SM-s128-seed0/run.json")
    told = json.loads(finished.read_text())
    assert told["config"].pop("trainer.callbacks.0.init_args.resume") is True
    assert told["config"].pop("model.streaming") is False
    assert told["config"].pop("trainer.callbacks.0.init_args.target") == "own"
    finished.write_text(json.dumps(told))
    capsys.readouterr()
    sweep("--only=tiny/50-SM-*-seed0")
    assert "of which 0 are to be made" in capsys.readouterr().out


def test_another_configuration_is_not_mixed_in(here, capsys):
    sweep("--only=tiny/50-SM-*")
    text = Path("base.yaml").read_text().replace("num_samples: 4", "num_samples: 5")
    Path("base.yaml").write_text(text)
    with pytest.raises(SystemExit):
        sweep("--only=tiny/50-SM-*")
    message = capsys.readouterr().err
    assert "`data.num_samples` was 4, is 5" in message
    assert "`out`" in message
    for name in ("tiny/dense", "tiny/50-SM-s128-seed0", "tiny/50-SM-s128-seed1"):
        assert name in message

    # Beside runs that are made again or anew, its figures are not shown, nor kept.
    Path("out/tiny/dense/run.json").unlink()
    record("out/tiny/dense", zeroshot={"piqa": {"acc": 0.7}})
    sweep("--only=tiny/2of4-magnitude")
    said = capsys.readouterr().out
    assert "configuration or other files: tiny/50-SM-s128-seed0, tiny/50-SM-s128-seed1." in said
    with Path("out/results.csv").open() as file:
        shown = {(row["setting"], row["measure"]) for row in csv.DictReader(file)}
    assert {setting for setting, _ in shown} == {"dense", "2:4"}
    assert not any(measure.startswith("piqa") for _, measure in shown)
    assert read("out/tiny/dense").zeroshot == {}


def rewrite(path: str, *changed: tuple[str, str]) -> None:
    text = Path(path).read_text()
    for change in changed:
        text = text.replace(*change)
    Path(path).write_text(text)


@pytest.mark.parametrize("name", ["the evaluation text", "the calibration text", "the model"])
def test_runs_from_files_that_changed_since_are_not_mixed_in(here, tiny_llama, capsys, name):
    shutil.copytree(tiny_llama, "model")
    shutil.copy("text.txt", "test.txt")
    rewrite("base.yaml", ("eval_files:\n  - text.txt", "eval_files: [test.txt]"))
    content = Path("sweep.yaml").read_text().replace(str(tiny_llama), "model")
    Path("sweep.yaml").write_text(content)
    sweep("--only=tiny/50-SM-*-seed0")
    rewrite("text.txt")  # the same content at another time
    Path("model/README.md").write_text("of no effect")
    sweep("--only=tiny/50-SM-*-seed0")
    capsys.readouterr()

    model = {"the model": "config.json", "the evaluation text": "../test.txt"}
    rewrite(f"model/{model.get(name, '../text.txt')}", ("7", "9"), ('"llama"', ' "llama"'))
    with pytest.raises(SystemExit) as stop:
        sweep("--only=tiny/50-SM-*")
    assert stop.value.code == 2
    names = "tiny/50-SM-s128-seed0"
    names = names if name == "the calibration text" else f"tiny/dense, {names}"
    assert f"with another configuration: other files of {name} ({names})" in capsys.readouterr().err
    assert len(list(Path("out/tiny").glob("*/run.json"))) == 2

    # A run that an earlier version made has no digests.
    for path in Path("out/tiny").glob("*/run.json"):
        recorded = json.loads(path.read_text())
        assert recorded.pop("inputs")
        path.write_text(json.dumps(recorded))
    sweep("--only=tiny/50-SM-*-seed0")
    assert "of which 0 are to be made" in capsys.readouterr().out


def test_a_text_that_is_replaced_meanwhile_leaves_earlier_runs_out(here, monkeypatch, capsys):
    execute = running.execute

    def execute_and_replace(*args, **options):
        execute(*args, **options)
        rewrite("text.txt", ("compute", "measure"))

    monkeypatch.setattr(running, "execute", execute_and_replace)
    sweep("--only=tiny/2of4-magnitude")
    assert "configuration or other files: tiny/dense." in capsys.readouterr().out


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
        sweep()
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not Path("out").exists()


def test_no_text_to_evaluate_on_is_said_before_any_run(here, capsys):
    rewrite("base.yaml", ("eval_files:\n  - text.txt", "hold_out: false"))
    with pytest.raises(SystemExit) as stop:
        sweep()
    assert stop.value.code == 2
    assert "`eval_files`: this stage reads text, and was given none" in capsys.readouterr().err
    assert not Path("out").exists()


def test_a_file_is_dequantized_once_and_the_runs_are_the_same(here, tiny_gguf, monkeypatch, capsys):
    content = yaml.safe_load(Path("sweep.yaml").read_text())
    options = {"model.model": str(tiny_gguf), "trainer.limit_test_batches": 1}
    content["models"] = {"tiny": {"options": options}}
    content |= {"runs": {"2:4": ["magnitude", "SM"]}, "seeds": [0], "save_checkpoints": True}
    Path("sweep.yaml").write_text(yaml.safe_dump(content))
    made = []
    dequantize = gguf._dequantize
    monkeypatch.setattr(gguf, "_dequantize", lambda *how: made.append(how) or dequantize(*how))
    sweep()
    assert len(made) == 1
    assert "de-quantizing" not in capsys.readouterr().err
    monkeypatch.setattr(running, "dequantized_once", nullcontext)
    sweep("--out=again", "--only=*/2of4-SM-*")
    assert len(made) == 1 + 2
    for name in ("dense", "2of4-SM-s128-seed0"):
        runs = [Path(out, "tiny", name) for out in ("out", "again")]
        texts = [json.loads((run / "evaluation.json").read_text()) for run in runs]
        assert texts[0]["perplexity"] == texts[1]["perplexity"]
        assert texts[0]["model"] == texts[1]["model"] == str(tiny_gguf)
    weights = [(run / "model.safetensors").read_bytes() for run in runs]
    assert weights[0] == weights[1]
    report = json.loads((runs[0] / "pruning_report.json").read_text())
    assert report["config"]["base_model"] == str(tiny_gguf)


def test_a_base_that_does_not_prune_is_refused(here, capsys):
    base = yaml.safe_load(Path("base.yaml").read_text())
    del base["trainer"]["callbacks"]
    Path("base.yaml").write_text(yaml.safe_dump(base))
    with pytest.raises(SystemExit):
        sweep()
    assert "callbacks.MRPCallback" in capsys.readouterr().err
    for other in ("callbacks.KeepSparsity", "callbacks.MRPCallback"):
        callbacks = [{"class_path": name} for name in ("callbacks.MRPCallback", other)]
        base["trainer"]["callbacks"] = callbacks
        Path("base.yaml").write_text(yaml.safe_dump(base))
        with pytest.raises(SystemExit):
            sweep()
        assert "`base`: the last of `trainer.callbacks`, and no other" in capsys.readouterr().err
    assert not Path("out").exists()


@pytest.mark.parametrize("file", ["out/tiny", "out/tiny/50-SM-s128-seed1"])
def test_a_file_in_the_way_of_a_run_is_named_before_any(here, capsys, monkeypatch, file):
    monkeypatch.setattr(running, "execute", lambda *_, **__: pytest.fail("a run was made"))
    Path(file).parent.mkdir(parents=True)
    Path(file).write_text("of a user")
    with pytest.raises(SystemExit) as stop:
        sweep()
    assert stop.value.code == 2
    assert f"{file} is a file. Name another directory, or move it away" in capsys.readouterr().err


def test_a_directory_of_others_at_a_checkpoint_is_named_before_any_run(here, capsys):
    file = Path("out/tiny/50-SM-s128-seed1/notes.txt")
    file.parent.mkdir(parents=True)
    file.write_text("of a user")
    with pytest.raises(SystemExit) as stop:
        sweep("--save_checkpoints=true")
    assert stop.value.code == 2
    message = f"{file.parent} holds what mrp-lightning did not write"
    assert message in capsys.readouterr().err
    assert [path for path in Path("out").rglob("*") if path.is_file()] == [file]


def test_a_run_that_fails_costs_no_other(here, capsys):
    options = '{"trainer.callbacks.init_args.targets": [absent, q_proj]}'
    with pytest.raises(SystemExit) as stop:
        sweep("--only=tiny/2of4-SM-*-seed0", f"--vary={options}")
    assert stop.value.code == 1
    assert "targets=absent" in capsys.readouterr().err
    assert Path("out/tiny/2of4-SM-s128-targets=q_proj-seed0/run.json").exists()
    assert not Path("out/tiny/2of4-SM-s128-targets=absent-seed0/run.json").exists()
    assert "q_proj" in Path("out/results.md").read_text()


def test_a_model_that_cannot_be_had_is_said_once(here, capsys, monkeypatch):
    made = []
    monkeypatch.setattr(running, "execute", lambda trial, *_, **__: made.append(trial))
    content = yaml.safe_load(Path("sweep.yaml").read_text())
    for name in ("someone/something", "./absent"):
        content["models"][name] = {"options": {"model.model": name}}
    Path("sweep.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(SystemExit) as stop:
        sweep("--only=*/2of4-SM-*")
    assert stop.value.code == 1
    said = capsys.readouterr().err
    assert said.count("`model`: there is no directory ./absent") == 1
    assert said.count("someone/something is neither a complete local") == 1
    assert {trial.model for trial in made} == {"tiny"}


def test_a_sweep_takes_language_models(here, capsys):
    base = yaml.safe_load(Path("base.yaml").read_text())
    base["model"] = {"class_path": "lightning.pytorch.demos.boring_classes.BoringModel"}
    Path("base.yaml").write_text(yaml.safe_dump(base))
    content = yaml.safe_load(Path("sweep.yaml").read_text())
    content["models"]["tiny"]["options"] = {"trainer.max_epochs": 1}
    Path("sweep.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(SystemExit):
        sweep()
    assert "`class_path`: a sweep measures perplexity" in capsys.readouterr().err


def test_any_kind_of_value_is_varied(here):
    Path("other.txt").write_text(Path("text.txt").read_text().replace("compute", "measure"))
    options = {
        "model.dtype": ["float32", "bfloat16"],
        "data.train_files": [["text.txt"], ["text.txt", "other.txt"]],
    }
    sweep("--only=tiny/2of4-SM-*-seed0", f"--vary={json.dumps(options)}")
    table = Path("out/results.md").read_text()
    assert "| SM, dtype bfloat16 |" in table
    assert '["text.txt", "other.txt"]' in table
    with Path("out/results.csv").open() as file:
        means = {r["changed"]: r["mean"] for r in csv.DictReader(file) if "perp" in r["measure"]}
    assert means["dtype=float32"] == means['train_files=["text.txt"]']  # as they are without it
    assert len(set(means.values())) == len(means) - 1 == 4


@pytest.fixture
def calls(here) -> list[str]:
    """The options of a sweep that evaluate a task of six samples."""
    samples = [{"context": f"value_{i} = ", "choices": ["compute", "7"]} for i in range(6)]
    Path("samples.json").write_text("\n".join(map(json.dumps, samples)))
    task = {
        "task": "calls",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(here / "samples.json")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}],
    }
    Path("tasks").mkdir()
    Path("tasks/calls.yaml").write_text(yaml.safe_dump(task))
    return ["--zeroshot=[calls]", "--include_path=tasks"]


def measured() -> dict[tuple[str, str], dict[str, str]]:
    with Path("out/results.csv").open() as file:
        return {(row["method"], row["measure"]): row for row in csv.DictReader(file)}


def test_zero_shot_tasks_are_part_of_a_run(here, calls):
    sweep("--only=tiny/2of4-SM-*-seed0", *calls)
    rows = measured()
    for method, directory in {"": "dense", "SM": "2of4-SM-s128-seed0"}.items():
        evaluation = json.loads(Path(f"out/tiny/{directory}/evaluation.json").read_text())
        found = evaluation["zeroshot"]["calls"]
        assert found["samples"] == 6
        assert float(rows[method, "accuracy/calls"]["mean"]) == pytest.approx(100 * found["acc"])


def test_the_models_may_be_gguf_files(here, tiny_gguf, calls):
    """The pruned model is not looked for by the name of the file that it came from."""
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(tiny_gguf, here / name)
    options = [
        f"--models.tiny.options={json.dumps({'model.model': '.', 'model.gguf_file': 'a.gguf'})}",
        "--only=tiny/2of4-SM-*-seed0",
        "--save_checkpoints=true",
    ]
    sweep(*options)
    sweep(*options, *calls)
    assert {method for method, measure in measured() if measure == "accuracy/calls"} == {"", "SM"}


def test_tasks_are_added_to_finished_runs_whose_models_were_kept(here, calls, capsys):
    only = "--only=tiny/2of4-SM-*-seed0"
    sweep(only, "--save_checkpoints=true")
    runs = {path: path.stat().st_mtime_ns for path in Path("out/tiny").glob("*/run.json")}
    assert ("SM", "accuracy/calls") not in measured()
    capsys.readouterr()
    sweep(only, "--save_checkpoints=true", *calls)
    assert "0 are to be made" in capsys.readouterr().out
    assert all(path.stat().st_mtime_ns == time for path, time in runs.items())
    added = {key: row["mean"] for key, row in measured().items() if "accuracy" in key[1]}
    assert set(added) == {("", "accuracy/calls"), ("SM", "accuracy/calls")}

    # They are those of a sweep that evaluates them at once.
    shutil.rmtree("out")
    sweep(only, *calls)
    assert {key: row["mean"] for key, row in measured().items() if "accuracy" in key[1]} == added

    # More seeds, without the tasks: a table with gaps.
    sweep("--only=tiny/2of4-SM-*")
    assert measured()["SM", "accuracy/calls"]["seeds"] == "1"
    assert measured()["SM", "perplexity/text"]["seeds"] == "2"


def test_tasks_cannot_be_added_where_the_model_was_not_kept(here, calls, capsys):
    sweep("--only=tiny/2of4-SM-*-seed0")
    with pytest.raises(SystemExit):
        sweep("--only=tiny/2of4-SM-*-seed0", *calls)
    message = capsys.readouterr().err
    assert "`zeroshot`: 1 finished runs" in message
    assert "tiny/2of4-SM-s128-seed0" in message
    assert "Delete these runs" in message


def test_a_damaged_run_is_named(here, capsys):
    sweep("--only=tiny/dense")
    path = Path("out/tiny/dense/run.json")
    for content in ("{", "[]", '{"format_version": 1, "run": {"mode": "tiny"}}'):
        path.write_text(content)
        with pytest.raises(SystemExit):
            sweep("--only=tiny/dense")
        assert str(path) in capsys.readouterr().err


def test_a_finished_run_without_its_results_is_named(here, capsys):
    for trial, name in (("50-SM-s128-seed0", "pruning_report.json"), ("dense", "evaluation.json")):
        directory = Path("out/tiny", trial)
        directory.mkdir(parents=True)
        (directory / "run.json").touch()
        (directory / "evaluation.json").touch()
        (directory / name).unlink(missing_ok=True)
        with pytest.raises(SystemExit):
            sweep(f"--only=tiny/{trial}")
        message = f"{directory} is a finished run without {name}. Delete run.json there"
        assert message in capsys.readouterr().err
        shutil.rmtree(directory)
