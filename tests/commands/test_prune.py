"""`mrp-lightning prune`: one command from a model to a pruned one and what it cost."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

pytest.importorskip("jsonargparse", reason="the command line needs the extra `cli`")

from mrp_lightning import TextDataModule
from mrp_lightning.callbacks import PruningCallback
from mrp_lightning.commands.main import main
from mrp_lightning.commands.prune import _RECIPES, _parser, _recipe

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = ["--num-samples=4", "--sequence-length=32", "--batch-size=2", "--accelerator=cpu"]


@pytest.fixture
def text(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "text.txt"
    path.write_text("\n".join(f"value_{i} = compute({i}) + {i * 7}" for i in range(400)))
    return path


def perplexity(directory: Path, text: str, windows: int) -> float:
    """By transformers' own loss over the first windows, each behind what begins a text."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    start = tokenizer.build_inputs_with_special_tokens([]) if tokenizer.bos_token_id else []
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    size, losses = 32 - len(start), []
    for k in range(windows):
        window = torch.tensor([start + ids[k * size : (k + 1) * size]])
        assert window.shape == (1, 32)
        labels = window.clone()
        labels[:, : len(start) + 1] = -100
        with torch.no_grad():
            losses.append(model(window, labels=labels).loss.item())
    return float(torch.tensor(losses).mean().exp())


def test_one_command_prunes_compares_and_says_what_is_next(tiny_llama, text, capsys):
    main(["prune", str(tiny_llama), "--pattern=2:4", f"--text={text}", "--eval-samples=6", *SMALL])
    shown = capsys.readouterr().out
    out = Path(f"{tiny_llama.name}-2of4")
    weight = AutoModelForCausalLM.from_pretrained(out).model.layers[0].mlp.up_proj.weight
    assert ((weight.reshape(-1, 4) == 0).sum(1) == 2).all()
    held_out = TextDataModule([text], hold_out=True).documents("test")[0]
    assert text.read_text().endswith(held_out)
    assert 0.05 < len(held_out) / len(text.read_text()) < 0.11
    for directory, name in ((tiny_llama, "dense"), (out, "2:4 by SM")):
        expected = perplexity(directory, held_out, 6)
        (told,) = re.findall(rf"│ {name} +│ +([\d.,]+) │", shown)
        assert float(told.replace(",", "")) == pytest.approx(expected, rel=2e-3)
    evaluation = json.loads((out / "evaluation.json").read_text())
    recorded = evaluation["perplexity"]["text"]
    assert recorded["perplexity"] == pytest.approx(perplexity(out, held_out, 6), rel=2e-3)
    assert recorded["windows"] == 6
    before = evaluation["dense"]["text"]["perplexity"]
    assert before == pytest.approx(perplexity(tiny_llama, held_out, 6), rel=2e-3)
    assert "Pruning may take" in shown
    assert f"mrp-lightning export {out}" in shown
    with pytest.raises(SystemExit) as stop:  # before the model is evaluated
        main(["prune", str(tiny_llama), "--pattern=2:4", f"--text={text}", *SMALL])
    assert stop.value.code == 2
    ended = capsys.readouterr()
    assert "--overwrite" in ended.err or "overwrite" in ended.err
    assert "Evaluating" not in ended.out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "one of `--pattern` (such as 2:4"),
        (["--pattern=2:4", "--sparsity=0.5"], "Got both"),
        (["--pattern=2:4", "--recipe=best", "--method=SM"], "either `--recipe` or `--method`"),
        (["--pattern=2:4", "--recipe=bets"], "best"),
        (["--pattern=2:4", "--text=absent.txt"], "`--text`: absent.txt"),
        (["--pattern=2:4", "--text=."], "`--text`: . is a directory; name files"),
        (["--pattern=4"], "4"),
        (["--sparsity=1.5"], "1.5"),
        (["--pattern=2:4", "--method=SN"], "SN"),
        (["--pattern=2:4", "--num-samples=0"], "num-samples"),
        (["--pattern=2:4", "--accelerator=quantum"], "`--accelerator`"),
        (["--pattern=2:4", "--accelerator=tpu"], "Got tpu"),
    ],
    ids=str,
)
def test_a_mistake_is_told_in_a_line_before_the_model_is_loaded(options, said, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["prune", "./no-such-model", *options])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert "no-such-model" not in line


@pytest.mark.parametrize(
    ("pattern", "columns"), [("2:4", 128), ("2:3", 126), ("5:7", 126), ("100:200", 200)]
)
def test_columns_are_chosen_together_as_a_pattern_divides_them(pattern, columns):
    recipe = _recipe(_parser().parse_args(["model", f"--pattern={pattern}"]))
    assert PruningCallback(**recipe).settings.recipe.block_size == columns


def test_recipes_are_those_of_the_files():
    files = {path.stem: path for path in (CONFIGS / "recipes").glob("*.yaml")}
    assert files.keys() == _RECIPES.keys()
    for name, path in files.items():
        (callback,) = yaml.safe_load(path.read_text())["trainer"]["callbacks"]
        assert callback["init_args"] == _RECIPES[name]


def test_of_many_documents_whole_ones_are_held_out(tmp_path):
    file = tmp_path / "text.jsonl"
    file.write_text("".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(40)))
    data = TextDataModule([file], hold_out=True)
    held_out, rest = data.documents("test"), data.documents("train")
    assert held_out == [f"document {i}" for i in (9, 19, 29, 39)]
    assert sorted([*held_out, *rest]) == sorted(f"document {i}" for i in range(40))


def test_without_text_the_model_writes_what_it_is_calibrated_on(
    tiny_llama, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    options = ["--num-samples=4", "--sequence-length=32", "--eval-samples=4", "--accelerator=cpu"]
    main(["prune", str(tiny_llama), "--sparsity=0.5", *options])
    shown = " ".join(capsys.readouterr().out.split())
    assert "calibrated on 4 windows that the model writes itself" in shown
    assert re.search(r"Pruning may take .* \(.* of it to write that text\) and", shown)
    assert "Evaluating the dense model on the source of Python's standard library" in shown
    out = Path(f"{tiny_llama.name}-50")
    report = json.loads((out / "pruning_report.json").read_text())
    assert report["provenance"]["data"]["source"] == "the model's own text"


def test_messages_name_what_was_typed(tiny_llama, text, capsys):
    asked = [f"--text={text}", "--sequence-length=32", "--accelerator=cpu", "--eval-samples=2"]
    few = text.with_name("few.txt")
    few.write_text(text.read_text()[:300])
    for options, said in (
        (["--num-samples=100000", *asked], "or `--num-samples "),
        (["--sequence-length=100000", *asked[:1]], "`--sequence-length` is 100000"),
        ([*asked, "--num-samples=2", "--method=SN"], "`--method`"),
        (["--num-samples=2", "--out=/", *asked], "`--out`"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(["prune", str(tiny_llama), "--pattern=2:4", *options])
        assert stop.value.code == 2
        error = capsys.readouterr().err
        assert said in error
        assert "data." not in error
    many = ["--num-samples=20", f"--text={few}", "--sequence-length=16", "--accelerator=cpu"]
    with pytest.warns(UserWarning, match="or `--num-samples [0-9]+`"):
        main(["prune", str(tiny_llama), "--pattern=2:4", *many, "--out=few"])


def test_sigterm_ends_the_tokenizing_of_a_long_text_at_once(tiny_llama, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("value = compute(1) + value\n" * 1_500_000)  # of which a tenth is held out
    command = [sys.executable, "-m", "mrp_lightning", "prune", str(tiny_llama), "--pattern=2:4"]
    command += [f"--text={text}", f"--out={tmp_path / 'out'}", *SMALL]
    said = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout:
            said.append(line)
            if line.startswith("Tokenizing 4 million"):
                time.sleep(0.2)
                process.terminate()
        assert process.wait(timeout=60) == 143
    assert said[-1].startswith("Tokenizing"), said  # and not that a long operation was stopped
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]
