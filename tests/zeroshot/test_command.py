"""`python -m mrp_lightning zeroshot`, and packed checkpoints through the whole command line."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

from callbacks import MRPCallback
from mrp_lightning import Trainer
from mrp_lightning.commands.main import main
from mrp_lightning.embedded import STDLIB_LLAMA
from mrp_lightning.errors import TargetError
from mrp_lightning.records.evaluation import read, record

PAGE = (Path(__file__).parents[2] / "docs" / "evaluate.md").read_text().replace("\\\n", "")


def zeroshot(model: Path | str, *more: str) -> None:
    main(["zeroshot", f"--model={model}", "--device=cpu", *more])


def failure(capsys: pytest.CaptureFixture, *options: str) -> str:
    """The one line of an error."""
    with pytest.raises(SystemExit) as stop:
        main(["zeroshot", *options])
    assert stop.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.fixture
def own(task_directory: Path) -> str:
    return f"--include-path={task_directory}"


def test_results_are_printed_and_added_to_what_is_recorded(checkpoint, own, tmp_path, capsys):
    model = checkpoint("dense")
    record(model, perplexity={"wikitext2": {"perplexity": 5.0}})
    capsys.readouterr()
    out = tmp_path / "all.json"
    zeroshot(model, own, "--tasks=continuation,last_word", "--limit=4", f"--out={out}")
    found = read(model)
    assert found.perplexity == {"wikitext2": {"perplexity": 5.0}}
    assert found.model == str(model)
    assert list(found.zeroshot) == ["continuation", "last_word"]
    accuracies = [found.zeroshot[task]["acc"] for task in found.zeroshot]
    assert found.zeroshot["continuation"]["samples"] == 4
    assert {"lm_eval", "transformers"} <= set(found.versions)

    shown = capsys.readouterr().out
    assert f"mean accuracy: {sum(accuracies) / 2:.4f}" in shown
    for number in (*accuracies, found.zeroshot["last_word"]["perplexity"]):
        assert f"{number:.4f}".rstrip("0") in shown  # the table may leave zeros out
    full = json.loads(out.read_text())
    assert full["results"]["last_word"]["acc,none"] == accuracies[1]
    assert full["configs"]["last_word"]["output_type"] == "loglikelihood"

    # A quicker look does not replace it.
    zeroshot(model, own, "--tasks=last_word", "--limit=2")
    assert read(model).zeroshot == found.zeroshot
    shown = " ".join(capsys.readouterr().out.split())
    assert "but for last_word: 4 samples are recorded there, these were fewer" in shown


def test_one_sample_has_no_standard_error(checkpoint, own):
    model = checkpoint("dense")
    zeroshot(model, own, "--tasks=last_word", "--limit=1")
    assert set(read(model).zeroshot["last_word"]) == {
        *("acc", "perplexity", "samples", "num_fewshot", "checksum"),
    }


def test_lm_evals_own_command_gives_the_same(
    checkpoint, own, task_directory, tmp_path, monkeypatch
):
    from lm_eval.api import metrics

    model, out = checkpoint("packed"), tmp_path / "own"
    tasks = "continuation,last_word"
    zeroshot(model, own, f"--tasks={tasks}", "--batch-size=4", "--limit=6")
    (shown,) = re.findall("^python -c .*$", PAGE, flags=re.M)
    shown = re.sub(r"pretrained=\S+", f"pretrained={model}", shown).replace("piqa", tasks)
    _, flag, code, *options = shlex.split(shown)
    assert flag == "-c"
    options += ["--include_path", str(task_directory), "--batch_size", "4", "--limit", "6"]
    options += ["--device", "cpu", "--output_path", str(out)]
    monkeypatch.setattr(sys, "argv", ["-c", *options])
    # Errors by 100,000 samples take longer than all the rest.
    monkeypatch.setattr(metrics, "bootstrap_stderr", lambda *_, **__: 0.0)
    exec(code, {})
    (written,) = out.rglob("results_*.json")
    theirs = json.loads(written.read_text())["results"]
    for task, figures in read(model).zeroshot.items():
        for metric in {"acc", "acc_norm", "perplexity", "acc_stderr"} & figures.keys():
            assert figures[metric] == theirs[task][f"{metric},none"], (task, metric)


def test_a_packed_checkpoint_is_not_pruned_again(checkpoints):
    windows, callback = torch.ones(2, 8, dtype=torch.long), MRPCallback(pattern="2:4")
    message = (
        r"q_proj \(4 layers\): it is a packed Sparse24Linear; call `model.dequantize\(\)` first"
    )
    with pytest.raises(TargetError, match=message):
        Trainer(accelerator="cpu").predict(
            str(checkpoints["packed"]), windows, callbacks=[callback]
        )


def test_an_unknown_task_is_answered_with_the_nearest_names(own, capsys):
    options = [f"--model={STDLIB_LLAMA}", own]
    error = failure(capsys, *options, "--tasks=continuatoin,last_*,lambda_openai")
    assert "continuatoin (nearest: continuation" in error
    assert "lambda_openai (nearest: lambada_openai" in error
    assert "last_" not in error


@pytest.mark.parametrize(
    ("text", "metric", "message"),
    [("{{words}}", "acc", "'words' is undefined"), ("{{text}}", "accurracy", "KeyError")],
)
def test_a_wrong_task_is_named_before_the_model_is_loaded(text, metric, message, tmp_path, capsys):
    (tmp_path / "data.jsonl").write_text('{"text": "a b"}\n')
    (tmp_path / "mine.yaml").write_text(
        "task: mine\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path}/data.jsonl}}}}\n"
        f'output_type: loglikelihood\ntest_split: test\ndoc_to_text: "{text}"\n'
        f"doc_to_target: b\nmetric_list: [{{metric: {metric}}}]\n"
    )
    error = failure(capsys, f"--model={STDLIB_LLAMA}", f"--include-path={tmp_path}", "--tasks=mine")
    assert "`--tasks`: lm-eval cannot make mine of its YAML file" in error
    assert message in error


def test_all_missing_data_is_named(tmp_path, capsys):
    for name in ("first", "second"):
        data = f"dataset_path: nobody/{name}\n"
        kind = "output_type: loglikelihood\ntest_split: test\ndoc_to_text: x\ndoc_to_target: y\n"
        (tmp_path / f"{name}.yaml").write_text(f"task: {name}\n{data}{kind}")
    options = [f"--include-path={tmp_path}", "--tasks=first,second"]
    error = failure(capsys, f"--model={STDLIB_LLAMA}", *options)
    for name in ("first", "second"):
        assert f"{name} (dataset nobody/{name}: " in error
    assert "datasets.load_dataset" in error


def test_a_missing_lm_eval_is_named_with_its_extra(monkeypatch, own, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval.models.huggingface", None)
    error = failure(capsys, f"--model={STDLIB_LLAMA}", own, "--tasks=last_word")
    assert "pip install " in error
    assert "[zeroshot]'" in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model=./absent"], "`model`: there is no directory ./absent"),
        (["--model=."], "holds no config.json"),
        ([f"--model={STDLIB_LLAMA}", "--include-path=./absent"], "`--include-path`"),
        ([f"--model={STDLIB_LLAMA}", "--out=absent/all.json"], "`--out`: expected a file in a d"),
        ([f"--model={STDLIB_LLAMA}", "--out=."], "`--out`: expected a file in a d"),
        ([f"--model={STDLIB_LLAMA}", "--device=gpu"], "`--device`"),
        ([f"--model={STDLIB_LLAMA}", "--batch-size=0"], "`--batch-size`: expected a number from 1"),
        ([f"--model={STDLIB_LLAMA}", "--tasks=,"], "`--tasks`: expected names"),
    ],
)
def test_a_mistake_is_one_line(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert message in failure(capsys, *options)


def test_what_is_recorded_must_be_readable_before_any_work(checkpoint, own, capsys):
    model = checkpoint("dense")
    (model / "evaluation.json").write_text("{")
    error = failure(capsys, f"--model={model}", own, "--tasks=last_word")
    assert "evaluation.json is not JSON" in error


def test_a_model_without_a_tokenizer_is_refused(checkpoint, own, capsys):
    model = checkpoint("dense")
    for file in model.glob("tokenizer*"):
        file.unlink()
    error = failure(capsys, f"--model={model}", own, "--tasks=last_word")
    assert "without a tokenizer" in error


def test_a_model_of_the_hub_has_no_place_to_record(checkpoint, own, tmp_path, monkeypatch, capsys):
    """The hub's cache is laid out as the hub would fill it."""
    cached = tmp_path / "hub" / "models--some--model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    (cached / "snapshots").mkdir()
    checkpoint("dense").rename(cached / "snapshots" / ("0" * 40))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    zeroshot("some/model", own, "--tasks=last_word", "--limit=2")
    shown = " ".join(capsys.readouterr().out.split())
    assert "Not recorded: some/model is no local directory" in shown
    assert not list(tmp_path.rglob("evaluation.json"))


def test_a_gguf_file_is_evaluated_and_its_directory_left_alone(tiny_gguf, own, tmp_path, capsys):
    out = tmp_path / "all.json"
    named = [f"--gguf-file={tiny_gguf.name}", own, "--tasks=continuation", "--limit=2"]
    zeroshot(tiny_gguf.parent, *named, f"--out={out}")
    assert json.loads(out.read_text())["n-samples"]["continuation"]["effective"] == 2
    assert list(tiny_gguf.parent.iterdir()) == [tiny_gguf]
    assert "Not recorded" not in capsys.readouterr().out
