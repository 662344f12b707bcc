"""What the command line says of a mistake: the cause and the next step, with status 2."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import warm
from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
from huggingface_hub.utils import tqdm as hub_tqdm
from lightning.pytorch.accelerators import CUDAAccelerator, MPSAccelerator
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

import mrp_lightning
from mrp_lightning import CausalLM
from mrp_lightning.commands.main import main
from mrp_lightning.environment import without_bars

CALLBACK = ["--trainer.callbacks=callbacks.MRPCallback", "--trainer.callbacks.pattern=2:4"]


@pytest.fixture
def arguments(tiny_llama: Path, text: Path) -> list[str]:
    """A whole `predict`, but for a callback."""
    data = {"train_files": text, "num_samples": 4, "sequence_length": 32, "batch_size": 2}
    return [
        "predict",
        f"--model.model={tiny_llama}",
        *(f"--data.{key}={value}" for key, value in data.items()),
        "--trainer.accelerator=cpu",
        "--trainer.logger=false",
    ]


@pytest.fixture
def without_weights(tiny_llama: Path, tmp_path: Path) -> Path:
    """A model's directory that cannot be loaded, for mistakes that are refused before that."""
    shutil.copy(tiny_llama / "config.json", tmp_path)
    return tmp_path


def said(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The message that ends the command, in a line."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(args)
    assert stop.value.code == 2
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    assert shown.count("error: ") == 1
    (line,) = shown[shown.index("error: ") :].splitlines()
    return line


@pytest.mark.parametrize(
    "options",
    [
        ["--model.model={without_weights}"],
        ["--model.model={without_weights}", "--trainer.callbacks=[]"],
        ["--trainer.callbacks=callbacks.SaveEvaluation", "--trainer.callbacks.save_dir=out"],
    ],
)
def test_predict_with_nothing_that_prunes(options, arguments, without_weights, capsys):
    options = [option.format(without_weights=without_weights) for option in options]
    assert "--trainer.callbacks=callbacks.MRPCallback" in said([*arguments, *options], capsys)


@pytest.mark.parametrize(
    ("yaml", "wrong"),
    [
        ("data: {num_sample: 3}", "num_sample"),
        ("data: {num_samples: many}", "key \"data.num_samples\": Expected a <class 'int'>"),
        ("dta: {num_samples: 3}", "dta"),
        ("trainer: {callbacks: {class_path: MRPCalback}}", "MRPCalback"),
        (
            "trainer: {callbacks: "
            "[{class_path: callbacks.MRPCallback, init_args: {patern: '2:4'}}]}",
            "patern",
        ),
        ("data: {seed: 1, seed: 2}", "given twice: seed"),
        ("data: {seed: [1", "while parsing"),
    ],
)
def test_a_mistake_in_yaml(yaml, wrong, arguments, tmp_path, capsys):
    config = tmp_path / "run.yaml"
    config.write_text(f"{yaml}\n")
    assert wrong in said([*arguments, f"--config={config}"], capsys)


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("--data.num_samples=many", "many"),
        ("--data.num=3", "arguments: --data.num=3"),  # options are not abbreviated
        ("--pattern=2:4", "--pattern"),
        ("--config=none.yaml", "none.yaml"),
        ("--trainer.acelerator=cpu", "--trainer.acelerator"),
        ("run.yaml", "run.yaml"),
        ("--trainer.limit_predict_batches=-1", "limit_predict_batches"),
    ],
)
def test_a_mistake_in_an_option(option, meant, arguments, capsys):
    options = [*CALLBACK, "--trainer.callbacks.save_dir=out", option]
    assert meant in said([*arguments, *options], capsys)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["models: {tiny: {options: {}}}", "seed: 3"], "seed"),
        (["models: {tiny: {optons: {}}}"], "required: options"),
        (["models: {tiny: {options: {}}}", "vary: 3"], "vary"),
        (["models: {tiny: {options: {}}}", "out: here"], "given twice: out"),
    ],
)
def test_a_mistake_in_a_sweep(lines, message, tmp_path, capsys):
    config = tmp_path / "sweep.yaml"
    config.write_text("\n".join([*lines, "base: []", "out: out", "runs: {'2:4': [SM]}"]))
    assert message in said(["sweep", f"--config={config}"], capsys)


@pytest.mark.parametrize("command", ["layers", "zeroshot", "report"])
def test_other_commands_take_no_abbreviations(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--hel"])
    assert stop.value.code == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["layers"], "give MODEL once"),
        (["layers", "a", "--model=b"], "give MODEL once"),
        (["prune", "--pattern=2:4", "--model"], "`--model`: expected one argument"),
        (["generate", "model"], "required: --prompt; see `mrp-lightning generate --help`"),
        (["gguf"], "required: RUN"),
        (["predict", *CALLBACK], "model.model"),
        (["prune", "m", "--sparsity=0,5"], "`--sparsity`: invalid float value: '0,5'"),
        (["prune", "m", "--sparsty=0.5"], "`--sparsty`. Did you mean `--sparsity`?"),
        (["prune", "m", "--group_size=32"], "`--group_size`. Did you mean `--group-size`?"),
        (["prune", "m", "n", "--bits=4"], "`n` is of no option"),
        (["layers", "./absent"], "`model`: there is no directory ./absent in /"),
        (["prune", "m", "--seed=-1"], "`--seed`: expected a number from 0, got '-1'"),
        (["gguf", "model", "--type=q9"], "`--type`: invalid choice: 'q9'"),
        (["predct", "--config=x.yaml"], "`predict`"),
        (["layer"], "`layers`"),
        (["--config", "run.yaml", "predict"], "first: `mrp-lightning predict --config run.yaml`"),
    ],
)
def test_an_argument_is_named_as_it_is_typed(args, message, capsys):
    assert message in said(args, capsys)


def test_a_start_names_nothing_that_is_not_there(tiny_llama, text, tmp_path):
    """No missing devices, no seed, no bars of loading."""
    command = ["-m", "mrp_lightning", "predict", f"--model={tiny_llama}"]
    command += [f"--data.train_files={text}", "--data.num_samples=2", "--data.sequence_length=32"]
    command += ["--trainer.callbacks=MRPCallback", "--trainer.callbacks.pattern=2:4"]
    command += ["--trainer.callbacks.save_dir=out", "--trainer.accelerator=cpu"]
    command += ["--trainer.enable_progress_bar=false"]
    run = warm.run(command, cwd=tmp_path, check=True)
    lines = (run.stdout + run.stderr).splitlines()
    known = re.compile("block [12]/2 |Pruned 14 layers to 2:4 |The calibration data hold ")
    assert {match[0] for line in lines if (match := known.match(line))} >= {"block 1/2 "}
    assert [line for line in lines if line.strip() and not known.match(line)] == []


def test_bars_of_downloads_stay_where_those_of_loading_go(monkeypatch, tiny_llama, capsys):
    monkeypatch.setattr(
        sys.modules["huggingface_hub.utils.tqdm"], "HF_HUB_DISABLE_PROGRESS_BARS", None
    )
    monkeypatch.setattr(transformers_logging, "_tqdm_active", True)
    enable_progress_bars()  # which an earlier command may have disabled

    def shown(load):
        load(tiny_llama)
        state = are_progress_bars_disabled(), transformers_logging.is_progress_bar_enabled()
        assert state == (False, True)
        return capsys.readouterr().err

    assert "Loading weights" in shown(AutoModelForCausalLM.from_pretrained)
    assert "Loading weights" not in shown(CausalLM)
    with without_bars():
        assert "Loading weights" not in shown(AutoModelForCausalLM.from_pretrained)
        with hub_tqdm(total=1, desc="Downloading") as bar:
            bar.update()
    assert "Downloading" in capsys.readouterr().err
    assert "Loading weights" in shown(AutoModelForCausalLM.from_pretrained)


def test_an_accelerator_that_is_not_there(arguments, without_weights, capsys, monkeypatch):
    for accelerator in (CUDAAccelerator, MPSAccelerator):
        monkeypatch.setattr(accelerator, "is_available", staticmethod(lambda: False))
    for name in ("gpu", "cuda", "mps"):
        arguments[-2] = f"--trainer.accelerator={name}"
        line = said([*arguments, f"--model.model={without_weights}"], capsys)
        assert f"Got {name}" in line
        assert "auto" in line
        assert "cpu" in line


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        ("fsdp", "`trainer`: Lightning refuses it: The strategy `fsdp` requires a GPU"),
        ("ddp_spawn", "`trainer.strategy`: this one spawns workers .* Use `ddp`"),
        ("ddp_notebook", "DDPStrategy runs in workers .* Use strategy='ddp'"),
    ],
)
def test_strategies_that_cannot_prune_are_refused_in_a_line(strategy, reason, arguments, capsys):
    arguments += [*CALLBACK, "--trainer.callbacks.save_dir=out"]
    arguments += ["--trainer.devices=2", f"--trainer.strategy={strategy}"]
    assert re.search(reason, said(arguments, capsys))


def test_callbacks_of_the_users_stand_beside_ours(tmp_path):
    """Their folder hides our short name alone."""
    (tmp_path / "callbacks").mkdir()
    (tmp_path / "callbacks" / "__init__.py").write_text("class Mine: pass")
    code = (
        "import contextlib, sys\n"
        "for name in [name for name in sys.modules if name.partition('.')[0] == 'callbacks']:\n"
        "    del sys.modules[name]\n"
        "import callbacks, mrp_lightning.callbacks\n"
        "from mrp_lightning.commands.main import main\n"
        "assert callbacks.Mine and mrp_lightning.callbacks.MRPCallback\n"
        "for name in ('callbacks', 'mrp_lightning.callbacks'):\n"
        "    with contextlib.suppress(SystemExit):\n"
        "        main(['predict', '--model.model=a', f'--trainer.callbacks={name}.MRPCallback', "
        "'--trainer.callbacks.pattern=2:4'])"
    )
    shown = warm.run(["-c", code], cwd=tmp_path).stderr
    _, theirs, ours = shown.split("error: ")
    assert "callbacks.MRPCallback" in theirs
    assert "`--trainer.callbacks.save_dir=DIR`" in ours


@pytest.mark.parametrize(
    ("command", "option"),
    [("export", "--check-only"), ("gguf", "--like"), ("generate", "--prompt")],
)
def test_the_commands_of_export_are_commands(command, option, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert option in capsys.readouterr().out


@pytest.mark.parametrize("options", [[], ["--trainer.callbacks.sparsity=0.5"]])
def test_what_is_pruned_for_nothing_is_refused_before_a_model_is_loaded(
    options, arguments, without_weights, capsys
):
    callback = [*CALLBACK[:1], *(options or CALLBACK[1:]), f"--model.model={without_weights}"]
    assert "`--trainer.callbacks.save_dir=DIR`" in said([*arguments, *callback], capsys)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--data.train_files=[absent.txt, b.txt]", "`train_files`: no such file: absent.txt; .* b"),
        ("--data.eval_files=absent.txt", "`eval_files`: no such file: absent.txt."),
        ("--trainer.callbacks.save_dir=full", "`save_dir`: .*full exists and is not empty"),
        ("--trainer.callbacks.save_dir=full/mine.txt", "`save_dir` .*mine.txt is a file"),
        ("--model.model=./absent", "`model`: there is no directory ./absent in "),
        ("--model.model=absent.gguf", "`model`: there is no file absent.gguf"),
    ],
)
def test_what_is_absent_or_in_the_way_is_refused_before_a_model_is_loaded(
    option, message, arguments, without_weights, capsys, monkeypatch
):
    monkeypatch.chdir(without_weights)
    Path("full").mkdir()
    Path("full/mine.txt").write_text("mine")
    callback = [*CALLBACK, "--trainer.callbacks.save_dir=out", f"--model.model={without_weights}"]
    assert re.search(message, said([*arguments, *callback, option], capsys))


def test_a_lightning_checkpoint_that_is_absent(arguments, capsys):
    assert "absent.ckpt" in said(["test", *arguments[1:], "--ckpt_path=absent.ckpt"], capsys)


@pytest.mark.parametrize("name", ["callbacks.MRPCallback", "MRPCallback"])
def test_to_try_a_pruning_out_needs_no_directory(name, arguments, tmp_path):
    callback = {"class_path": name, "init_args": {"pattern": "2:4"}}
    (tmp_path / "run.yaml").write_text(json.dumps({"trainer": {"callbacks": [callback]}}))
    main([*arguments, f"--config={tmp_path / 'run.yaml'}", "--trainer.fast_dev_run=true"])


def test_a_callback_without_a_pattern_is_explained_in_a_line(arguments, tmp_path, capsys):
    callback = f"class_path: callbacks.MRPCallback, init_args: {{save_dir: {tmp_path / 'out'}}}"
    (tmp_path / "one.yaml").write_text(f"trainer: {{callbacks: {{{callback}}}}}\n")
    (tmp_path / "more.yaml").write_text(f"trainer: {{callbacks: [{{{callback}}}]}}\n")
    for name in ("one", "more"):
        line = said([*arguments, f"--config={tmp_path / name}.yaml"], capsys)
        assert "give exactly one of `sparsity` and `pattern`; got neither" in line


def test_a_group_of_options_is_longer_than_the_name_of_a_file(arguments, capsys):
    data = {"train_files": ["a" * 200 + ".txt"] * 3}
    options = [*CALLBACK, "--trainer.callbacks.save_dir=out", f"--data={json.dumps(data)}"]
    line = said([*arguments[:2], *options], capsys)
    assert "no such file: aaa" in line  # the group of options is read


def test_without_a_command_the_help_is_shown(capsys):
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 2
    assert "commands, each with its own --help:" in capsys.readouterr().err


def test_the_version(capsys):
    main(["--version"])
    assert capsys.readouterr().out == f"mrp-lightning {mrp_lightning.__version__}\n"


def test_help_names_every_command_in_a_line(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    named = {line.split()[0]: line for line in lines if line.startswith("  ") and len(line) < 80}
    commands = {"fit", "validate", "test", "predict"}
    commands |= {"layers", "zeroshot", "report", "sweep", "export", "gguf", "generate"}
    assert named.keys() >= commands


def test_a_working_directory_that_was_deleted(arguments, tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    callback = ["--trainer.callbacks=callbacks.MRPCallback", "--trainer.callbacks.pattern=2:4"]
    line = said([*arguments, *callback, "--trainer.callbacks.save_dir=out"], capsys)
    assert "the working directory was deleted. Change to one that exists." in line
