"""The command line as a user starts it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mrp_lightning.commands.lightning_cli import PruningCLI
from mrp_lightning.commands.main import main
from mrp_lightning.errors import OptionError
from mrp_lightning.records import evaluation as records

CONFIGS = Path(__file__).parents[2] / "configs"
TINY = [f"--trainer.{option}" for option in ("accelerator=cpu", "logger=false")]


def arguments(command: str, model: Path, text: str, *more: str) -> list[str]:
    data = [f"--data.{key}_files={text}" for key in ("train", "eval")]
    size = ["--data.num_samples=4", "--data.sequence_length=32", "--data.batch_size=2"]
    return [command, f"--model.model={model}", *data, *size, *TINY, *more]


def prune(model: Path, text: str, *more: str) -> None:
    main(arguments("predict", model, text, "--trainer.callbacks=callbacks.MRPCallback", *more))


def test_a_command_builds_no_parser_of_another():
    assert PruningCLI.of("predict").subcommands() == {
        "predict": PruningCLI.subcommands()["predict"]
    }


def test_a_model_is_named_as_in_other_commands(tiny_llama, text, tmp_path, capsys):
    _, _, *rest = arguments("test", tiny_llama, text)
    (tmp_path / "run.yaml").write_text(f"model: {tiny_llama}\n")
    (tmp_path / "options.yaml").write_text(f"model: {tiny_llama}\n")
    for named in (
        ["--model", str(tiny_llama), "--model.dtype=bfloat16"],
        [f"--config={tmp_path / 'run.yaml'}"],
        [f"--model={tmp_path / 'options.yaml'}"],  # a file of options
    ):
        made = PruningCLI([*named, *rest], run=False)
        assert made.model.hparams["model"] == str(tiny_llama)
    main(["test", f"--model={tiny_llama}", *rest])
    assert "perplexity" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["test", "--model=./absent.gguf", *rest])
    assert "absent.gguf" in capsys.readouterr().err


def test_the_papers_data_from_local_copies(tiny_llama, corpora_dir, tmp_path, capsys, caplog):
    """Prune on C4 and evaluate on three texts, as configured for a published model."""
    out = tmp_path / "pruned"
    config = CONFIGS / "models" / "opt-125m.yaml"
    short = ["--data.sequence_length=16", "--data.num_samples=6", "--data.batch_size=3", *TINY]
    options = [f"--config={config}", f"--data.corpora_dir={corpora_dir}", *short]
    pattern = f"--config={CONFIGS / 'patterns' / '2of4.yaml'}"
    save = f"--trainer.callbacks.init_args.save_dir={out}"
    main(["predict", *options, pattern, f"--model.model={tiny_llama}", save])
    with caplog.at_level("INFO"):
        main(["test", *options, f"--model.model={out}"])
    found_text = r"c4: perplexity \d+\.\d{3} \(context 16, 256 windows, no BOS .*, 3,840 predicted"
    assert re.search(found_text, caplog.text)
    found = records.read(out).perplexity
    assert sorted(found) == ["c4", "ptb", "wikitext2"]
    assert found["c4"]["windows"] == 256
    assert found["c4"]["context"] == 16
    with pytest.raises(SystemExit) as stop:
        missing = f"--data.corpora_dir={tmp_path}"
        main(["test", *options, missing, f"--model.model={out}"])
    assert stop.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: `corpora_dir`: {tmp_path} lacks files of wikitext2, ptb")
    assert "hf download Salesforce/wikitext wikitext-2-raw-v1/test-00000-of-00001.parquet" in error


def test_text_that_is_given_wins_over_the_configurations(
    tiny_llama, text, tmp_path, capsys, caplog
):
    """Calibrate on own text where a configuration names a published one, which is not there."""
    config = f"--config={CONFIGS / 'models' / 'opt-125m.yaml'}"
    options = arguments("predict", tiny_llama, text)[1:]
    save = [f"--trainer.callbacks.{key}" for key in ("pattern=2:4", f"save_dir={tmp_path / 'out'}")]
    with caplog.at_level("INFO"):
        main(["predict", config, *options, "--trainer.callbacks=callbacks.MRPCallback", *save])
    assert (
        "Text is read by `data.train_files`, `data.eval_files`, which was given last: "
        "not by `data.calibration`, `data.evaluation` of "
        f"{CONFIGS / 'models' / '..' / 'data' / 'paper.yaml'}."
    ) in caplog.messages
    report = json.loads((tmp_path / "out" / "pruning_report.json").read_text())
    assert report["layers"][0]["tokens"] == 4 * 32


def test_text_of_a_later_file_wins(tiny_llama, text, tmp_path, capsys):
    (tmp_path / "own.yaml").write_text(f"data: {{train_files: [{text}]}}\n")
    (tmp_path / "both.yaml").write_text(f"data: {{train_files: [{text}], calibration: c4}}\n")
    published = CONFIGS / "models" / "opt-125m.yaml"

    def data(*files):
        made = PruningCLI(
            [*(f"--config={file}" for file in files), f"--model.model={tiny_llama}"], run=False
        )
        return made.datamodule

    assert data(published, tmp_path / "own.yaml").calibration_source == "text.txt"
    assert data(tmp_path / "own.yaml", published).calibration_source == "c4"
    with pytest.raises(OptionError, match="both.yaml: `data` takes either .*: keep one"):
        data(tmp_path / "both.yaml")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--trainer.callbacks.pattern=2:4", "--trainer.callbacks.sparsity=0.5"], "sparsity"),
        (["--trainer.callbacks.pattern=2:4", "--trainer.callbacks.targets=[q_porj]"], "q_proj"),
        (["--trainer.callbacks.pattern=2:4", "--data.sequence_length=4096"], "positions"),
        (["--trainer.callbacks.pattern=2:4", "--data.calibration=c4"], "not several of them"),
    ],
)
def test_a_mistake_is_one_line_and_no_traceback(
    tiny_llama, text, tmp_path, capsys, options, message
):
    with pytest.raises(SystemExit) as stop:
        prune(tiny_llama, text, *options, f"--trainer.callbacks.save_dir={tmp_path / 'out'}")
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith("error: ")
    assert message in error.splitlines()[-1]
    assert "Traceback" not in error


def test_the_module_and_the_console_script_start(tmp_path):
    script = Path(sys.executable).parent / "mrp-lightning"
    for command in ([sys.executable, "-m", "mrp_lightning"], [str(script)]):
        shown = subprocess.run([*command, "--help"], capture_output=True, text=True, cwd=tmp_path)
        assert shown.returncode == 0, shown.stderr
        assert "predict" in shown.stdout


def test_predict_prunes_and_both_perplexities_meet_on_the_page(tiny_llama, tmp_path, capsys):
    from transformers import AutoModelForCausalLM

    pytest.importorskip("matplotlib", reason="the page needs the extra `report`")
    text = tmp_path / "text.txt"
    text.write_text(Path(__file__).read_text())
    options = [f"--data.train_files={text}", f"--data.eval_files={text}", "--data.num_samples=4"]
    options += ["--data.sequence_length=32", "--data.batch_size=4", *TINY]
    runs = tmp_path / "runs"
    prune = ["--trainer.callbacks=callbacks.MRPCallback", "--trainer.callbacks.pattern=2:4"]
    prune.append(f"--trainer.callbacks.save_dir={runs / 'pruned'}")
    main(["predict", *options, *prune, f"--model.model={tiny_llama}"])
    pruned = AutoModelForCausalLM.from_pretrained(runs / "pruned")
    weight = pruned.model.layers[1].mlp.down_proj.weight
    assert ((weight.reshape(-1, 4) == 0).sum(1) == 2).all()
    assert (runs / "pruned" / "pruning_report.json").is_file()
    assert (runs / "pruned" / "tokenizer.json").is_file()
    before = sorted(tiny_llama.iterdir())
    main(["test", *options, f"--model.model={tiny_llama}"])
    assert sorted(tiny_llama.iterdir()) == before  # the user's own directory
    capsys.readouterr()
    main(["test", *options, f"--model.model={runs / 'pruned'}"])
    assert "perplexity" in capsys.readouterr().out

    # A dense run of another model stands there, too, and is not the base.
    records.record(runs / "dense", perplexity={"text": {"perplexity": 3.0}}, model="someone/other")
    keep = ["--trainer.callbacks=callbacks.SaveEvaluation"]
    keep.append(f"--trainer.callbacks.save_dir={runs / 'base'}")
    main(["test", *options, *keep, f"--model.model={tiny_llama}"])
    main(["report", str(runs)])
    page = (runs / "report.html").read_text()
    dense, pruned = (
        records.read(runs / name).perplexity["text"]["perplexity"] for name in ("base", "pruned")
    )
    assert f"{dense:,.0f} → {pruned:,.0f}" in page


def test_a_record_that_cannot_be_written_is_no_reason_to_fail(
    tiny_llama, tmp_path, monkeypatch, caplog
):
    (tmp_path / "text.txt").write_text(Path(__file__).read_text())
    copy = shutil.copytree(tiny_llama, tmp_path / "pruned")
    (copy / "pruning_report.json").write_text("{}")
    monkeypatch.setattr("os.access", lambda *_: False)
    options = [f"--data.eval_files={tmp_path / 'text.txt'}", "--data.sequence_length=32", *TINY]
    with pytest.warns(UserWarning, match="is read-only: the perplexity will not be recorded"):
        main(["test", *options, f"--model.model={copy}"])
    assert not (copy / records.NAME).exists()


def test_a_test_that_sigterm_ends_has_not_succeeded(tiny_llama, text, monkeypatch):
    from mrp_lightning import CausalLM

    def step(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(CausalLM, "test_step", step)
    with pytest.raises(SystemExit) as ended:
        main(arguments("test", tiny_llama, text))
    assert ended.value.code == 143
