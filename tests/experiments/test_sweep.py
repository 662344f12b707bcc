"""The command, as a user starts it, on a tiny model."""

import csv
import json
import shutil
from pathlib import Path

import pytest
import yaml
from lightning.pytorch import seed_everything

pytest.importorskip("jsonargparse", reason="the command line needs the extra `cli`")

from slow_pruning import killed_after
from small_sweeps import RECIPES, run_sweep

from mrp_lightning import CausalLM, TextDataModule, Trainer
from mrp_lightning.experiments import running
from mrp_lightning.experiments.groups import find_models
from mrp_lightning.experiments.runs import find_runs

MADE = {"dense", "2of4-magnitude", "2of4-SM-s128-seed0", "2of4-SM-s128-seed1"}


def rows() -> list[dict[str, str]]:
    with Path("out/results.csv").open() as file:
        return list(csv.DictReader(file))


def perplexity(run: str) -> float:
    content = json.loads(Path("out/tiny", run, "evaluation.json").read_text())
    return content["perplexity"]["text"]["perplexity"]


def test_a_sweep_keeps_every_value_and_is_not_repeated(finished, capsys):
    runs = {path.parent.name for path in Path("out/tiny").glob("*/run.json")}
    assert runs == MADE  # magnitude does not depend on the seed

    # Each is what the two commands of Lightning would have given.
    pruned = Path("out/tiny/2of4-SM-s128-seed1")
    seed_everything(0)
    data = TextDataModule(eval_files=["test.txt"], sequence_length=32, batch_size=3)
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    (scores,) = trainer.test(CausalLM(str(pruned)), datamodule=data, verbose=False)
    assert scores["perplexity"] == pytest.approx(perplexity(pruned.name), rel=1e-5)
    assert json.loads((pruned / "pruning_report.json").read_text())["config"]["method"] == "SM"

    # The tables show what the runs gave.
    seeds = [perplexity(f"2of4-SM-s128-seed{seed}") for seed in (0, 1)]
    asked = ("2:4", "SM", "perplexity/text")
    (row,) = [r for r in rows() if (r["setting"], r["method"], r["measure"]) == asked]
    assert float(row["mean"]) == pytest.approx(sum(seeds) / 2)
    assert float(row["deviation"]) == pytest.approx(abs(seeds[0] - seeds[1]) / 2**0.5)
    assert row["seeds"] == "2"
    assert rows()[0]["setting"] == "dense"
    assert "perplexity @32" in Path("out/results.md").read_text()

    # One run lost: that one is made again, and no other.
    lost = Path("out/tiny/2of4-SM-s128-seed0")
    (lost / "run.json").unlink()
    times = {path: path.stat().st_mtime_ns for path in Path("out/tiny").glob("*/run.json")}
    capsys.readouterr()
    run_sweep("--save_checkpoints=true", "--only=tiny/2of4-[Sm][Ma]*")
    assert "of which 1 are to be made" in capsys.readouterr().out
    assert (lost / "run.json").exists()
    assert all(path.stat().st_mtime_ns == time for path, time in times.items())


def test_recipes_are_rows_of_the_tables(finished):
    Path("recipes.yaml").write_text(RECIPES)
    run_sweep("--config=recipes.yaml")
    moved = Path("out/tiny/2of4-tuned-seed0/pruning_report.json")
    config = json.loads(moved.read_text())["config"]
    assert config["method"] == "JM"
    tuning = {"epochs": 1, "batch_size": 2, "held_out": 0.5, "learning_rate": 5e-4}
    assert config["tuning"] == tuning
    lines = Path("out/results.md").read_text().splitlines()
    cells = [line.split(" | ")[:2] for line in lines if line.startswith("| 2:4 |")]
    assert [name for _, name in cells] == ["SM", "tuned", "SM+dense"]
    assert {row["method"] for row in rows()} == {"", "SM", "tuned", "SM+dense"}

    # The path of the model distinguishes no runs: it may have been moved.
    text = moved.read_text()
    moved.write_text(text.replace(f'"{config["base_model"]}"', '"/elsewhere/tiny"'))
    shutil.copytree(moved.parent, "out/tiny/again")
    (model,) = find_models(find_runs(Path("out")))
    labels = [(group.label, len(group.runs)) for group in model.groups]
    assert labels == [("magnitude", 1), ("SM", 2), ("SM+dense", 1), ("tuned", 2)]
    shutil.rmtree("out/tiny/again")
    moved.write_text(text)

    # The same runs are found again; a recipe that is now another one is not mixed in.
    run_sweep("--config=recipes.yaml")
    Path("recipes.yaml").write_text(RECIPES.replace("epochs: 1", "epochs: 2"))
    with pytest.raises(SystemExit):
        run_sweep("--config=recipes.yaml")


def test_dense_runs_alone_vary_nothing(here):
    run_sweep("--only=*/dense", '--vary={"data.num_samples": [2, 4]}')
    assert Path("out/tiny/dense/run.json").is_file()


def test_two_sweeps_at_once_share_the_runs(finished, monkeypatch):
    made = []
    execute = running.execute

    def execute_while_another_process_runs(trial, *args, **options):
        made.append(trial)
        execute(trial, *args, **options)
        if len(made) == 1:
            run_sweep("--only=tiny/50-SM-*")

    monkeypatch.setattr(running, "execute", execute_while_another_process_runs)
    run_sweep("--only=tiny/50-SM-*")
    assert len(made) == len(set(made)) == 2


def test_an_interrupted_run_goes_on_at_its_block(finished, capsys):
    with killed_after(1):
        run_sweep("--only=tiny/50-SM-*-seed0")
    assert Path("out/tiny/.50-SM-s128-seed0.partial").is_dir()
    run_sweep("--only=tiny/50-SM-*-seed0")
    report = json.loads(Path("out/tiny/50-SM-s128-seed0/pruning_report.json").read_text())
    assert report["totals"]["resumed_blocks"] == 1
    assert len(report["layers"]) == 14
    assert {path.name for path in Path("out/tiny").iterdir()} == {"50-SM-s128-seed0", *MADE}

    capsys.readouterr()
    journal = Path("out/tiny/.50-SM-s128-seed0.partial")
    journal.mkdir()  # of a process that was killed between its last two steps
    (journal / "manifest.json").write_text("{}")
    run_sweep("--only=tiny/50-SM-*-seed0", "--save_checkpoints=true")
    assert not journal.exists()
    shown = capsys.readouterr().out
    assert "of which 0 are to be made" in shown
    assert "without keeping the model, since `save_checkpoints` was false: tiny/50-SM" in shown


def test_a_run_that_fails_costs_no_other(finished, capsys):
    options = '{"trainer.callbacks.init_args.targets": [absent, q_proj]}'
    with pytest.raises(SystemExit) as stop:
        run_sweep("--only=tiny/2of4-SM-*-seed0", f"--vary={options}")
    assert stop.value.code == 1
    message = capsys.readouterr().err
    assert "1 run failed, all others were made" in message
    assert "targets=absent" in message
    assert "Remove the cause, and give the same sweep again" in message
    assert Path("out/tiny/2of4-SM-s128-targets=q_proj-seed0/run.json").exists()
    assert not Path("out/tiny/2of4-SM-s128-targets=absent-seed0/run.json").exists()
    assert "q_proj" in Path("out/results.md").read_text()


def test_a_model_that_cannot_be_had_is_named_once(here, capsys):
    content = yaml.safe_load(Path("sweep.yaml").read_text())
    names = ("someone/something", "someone/other")
    content["models"] = {name: {"options": {"model.model": name}} for name in names}
    Path("sweep.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(SystemExit) as stop:
        run_sweep("--only=*/2of4-SM-*-seed0")
    assert stop.value.code == 1
    shown = capsys.readouterr().err
    for name in names:
        assert shown.count(f"{name} is neither a complete local") == 1


def test_any_kind_of_value_is_varied(finished):
    Path("other.txt").write_text(Path("text.txt").read_text().replace("compute", "measure"))
    options = {
        "model.dtype": ["float32", "bfloat16"],
        "data.train_files": [["text.txt", "other.txt"]],
    }
    run_sweep("--only=tiny/2of4-SM-*-seed0", f"--vary={json.dumps(options)}")
    table = Path("out/results.md").read_text()
    assert "| SM, dtype bfloat16 |" in table
    assert '["text.txt", "other.txt"]' in table
    means = {r["changed"]: float(r["mean"]) for r in rows() if "perp" in r["measure"]}
    without = perplexity("2of4-SM-s128-seed0")
    assert means.pop("dtype=float32") == pytest.approx(without, rel=1e-9)
    assert len({without, *means.values()}) == len(means) + 1 == 4


@pytest.fixture
def calls(tmp_path) -> list[str]:
    """The options of a sweep that evaluate a task of six samples."""
    samples = [{"context": f"value_{i} = ", "choices": ["compute", "7"]} for i in range(6)]
    file = tmp_path / "samples.json"
    file.write_text("\n".join(map(json.dumps, samples)))
    task = {
        "task": "calls",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}],
    }
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/calls.yaml").write_text(yaml.safe_dump(task))
    return ["--zeroshot=[calls]", "--include_path=tasks"]


def test_tasks_are_part_of_a_run_and_refused_if_they_changed_under_their_name(here, calls, capsys):
    run_sweep("--only=tiny/2of4-SM-*-seed0", *calls)
    measured = {(row["method"], row["measure"]): row for row in rows()}
    for method, directory in {"": "dense", "SM": "2of4-SM-s128-seed0"}.items():
        evaluation = json.loads(Path(f"out/tiny/{directory}/evaluation.json").read_text())
        scores = evaluation["zeroshot"]["calls"]
        assert scores["samples"] == 6
        mean = float(measured[method, "accuracy/calls"]["mean"])
        assert mean == pytest.approx(100 * scores["acc"])

    samples = Path("samples.json").read_text()
    Path("samples.json").write_text(samples.replace("value_3", "value_7"))
    with pytest.raises(SystemExit):
        run_sweep("--only=tiny/2of4-S[MS]-*-seed0", *calls)
    message = capsys.readouterr().err
    assert "other samples or prompts of them: tiny/dense (calls), tiny/2of4-SM-s128" in message
    assert len(list(Path("out/tiny").iterdir())) == 2

    # As they were, they are the same tasks, whatever the date of their file.
    Path("samples.json").write_text(samples)
    run_sweep("--only=tiny/2of4-S[MS]-*-seed0", *calls)
    scored = {row["method"] for row in rows() if row["measure"] == "accuracy/calls"}
    assert scored == {"", "SM", "SS"}


def test_tasks_that_finished_runs_lack_are_refused(finished, calls, capsys):
    with pytest.raises(SystemExit):
        run_sweep("--only=tiny/dense", *calls)
    message = capsys.readouterr().err
    assert "without these tasks" in message
    assert "tiny/dense (calls)" in message
    assert "`mrp-lightning zeroshot --model RUN` adds" in message
