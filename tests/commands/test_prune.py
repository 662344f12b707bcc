"""`mrp-lightning prune`: one command from a model to a pruned one and what it cost."""

import errno
import io
import json
import re
import shlex
import shutil
import signal
import sys
import time
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from warm import Piped

pytest.importorskip("jsonargparse", reason="the command line needs the extra `cli`")

from mrp_lightning import CausalLM, TextDataModule
from mrp_lightning.commands import comparison
from mrp_lightning.commands.comparison import Conversion, amount, method, why_useless
from mrp_lightning.commands.main import main
from mrp_lightning.commands.prune import _next_steps, _parser, _settings
from mrp_lightning.commands.subject import Subject
from mrp_lightning.errors import OptionError
from mrp_lightning.loop import pruned_module
from mrp_lightning.pruning.settings import Settings
from mrp_lightning.terminal import Console

SMALL = ["--num-samples=4", "--sequence-length=32", "--batch-size=2", "--accelerator=cpu"]


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


@pytest.mark.parametrize(
    ("settings", "command"),
    [
        ({"sparsity": 0.5}, "export out"),
        ({"sparsity": 0.5, "bits": 4}, "export out"),
        ({"bits": 4}, "export out"),
        ({"grid": "q4_0"}, "gguf out"),
        ({"grid": "int4-g64"}, "export out"),
        ({"sparsity": 0.3, "structure": "neurons", "method": "SM"}, "gguf out"),
        ({"sparsity": 0.3, "structure": "blocks", "method": "SM"}, "gguf out"),
    ],
)
def test_the_next_step_converts_for_what_runs_the_model(settings, command):
    settings = Settings(**{"method": "JM", **settings})
    steps = _next_steps(Path("out"), [], settings, None).splitlines()
    assert steps[1].removeprefix("  mrp-lightning ") == command
    encoders = _next_steps(Path("out"), [], settings, "BertModel")
    assert "BertModel.from_pretrained loads it" in encoders
    assert ("gguf" in encoders, command in encoders) == (False, command == "export out")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--grid=iq4_nl", "--pack"], "`--pack`: iq4_nl is a type of llama.cpp"),
        (["--head-grid=q4_0", "--pack"], "`--pack`: q4_0 is a type of llama.cpp"),
        (["--structure=neurons", "--sparsity=0.2", "--pack"], "`--pack`: neither `--structure`"),
        (["--bits=4", "--out=a", "--gguf=a/b.gguf"], "`--gguf`: expected a file outside of a."),
        (["--bits=4", "--out=a", "--gguf=/proc/b.gguf"], "`--gguf`: /proc/b.gguf cannot be made"),
    ],
)
def test_what_an_engine_does_not_write_is_refused(options, message, tiny_llama, capsys):
    """Before the pruning: only `prune` of all commands knows what the result will be."""
    with pytest.raises(SystemExit):
        main(["prune", str(tiny_llama), *options])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("arcee", {}, "`model_type` 'arcee' is none of those"),
        ("llama", {"hidden_act": "relu"}, "`hidden_act` is 'relu'"),
    ],
)
def test_a_model_of_which_no_gguf_file_is_made_is_refused_before_the_pruning(
    kind, values, message, tiny_llama, tmp_path, text, capsys
):
    shutil.copytree(tiny_llama, tmp_path / "dense")  # with its tokenizer
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    sizes = json.loads((tiny_llama / "config.json").read_text())
    config = AutoConfig.for_model(kind, **{name: sizes[name] for name in kept}, **values)
    config.num_attention_heads = config.num_key_value_heads = sizes["num_attention_heads"]
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "dense")
    options = ["--sparsity=0.5", f"--text={text}", f"--out={tmp_path / 'out'}", *SMALL]
    with pytest.raises(SystemExit):
        main(["prune", str(tmp_path / "dense"), *options, f"--gguf={tmp_path / 'out.gguf'}"])
    ended = capsys.readouterr()
    assert "error: `--gguf`: " in ended.err
    assert message in ended.err
    assert "\nLeave it out: `prune` has no --like" in ended.err
    assert "Evaluating" not in ended.out
    assert not (tmp_path / "out").exists()


def test_a_failed_conversion_is_named(capsys, monkeypatch):
    def fail(_):
        raise OptionError("no such type")

    monkeypatch.setattr(comparison, "command_named", lambda name: fail)
    with pytest.raises(OptionError, match="no such type"):
        Conversion("gguf", Path("out.gguf"), ["--overwrite"]).convert(Path("o [x]"), Console())
    expected = "The model is saved. What failed is: mrp-lightning gguf 'o [x]' --out out.gguf"
    assert capsys.readouterr().out == f"{expected} --overwrite\n"


def test_one_command_prunes_compares_and_says_what_is_next(tiny_llama, text, capsys):
    main(["prune", str(tiny_llama), "--pattern=2:4", f"--text={text}", "--eval-samples=6", *SMALL])
    shown = capsys.readouterr().out
    out = Path(f"{tiny_llama.name}-2of4")
    weight = AutoModelForCausalLM.from_pretrained(out).model.layers[0].mlp.up_proj.weight
    assert ((weight.reshape(-1, 4) == 0).sum(1) == 2).all()
    held_out = TextDataModule([text], hold_out=True).documents("test")[0]
    assert text.read_text().endswith(held_out)
    assert 0.05 < len(held_out) / len(text.read_text()) < 0.11
    for directory, name in ((tiny_llama, "dense"), (out, "2:4 by JM")):
        expected = perplexity(directory, held_out, 6)
        (told,) = re.findall(rf"│ {name} +│ +([\d.,]+) │", shown)
        assert float(told.replace(",", "")) == pytest.approx(expected, rel=2e-3)
    evaluation = json.loads((out / "evaluation.json").read_text())
    (recorded,) = evaluation["perplexity"].values()
    assert recorded["perplexity"] == pytest.approx(perplexity(out, held_out, 6), rel=2e-3)
    assert recorded["windows"] == 6
    before = evaluation["dense"]["held-out part of text.txt"]["perplexity"]
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
        (["--pattern=2:4", "--text=absent.txt"], "`--text`: no such file: absent.txt."),
        (["--pattern=2:4", "--text=https://a.b/c.txt"], "c.txt (download it first"),
        (["--bits=4", "--structure=heads", "--sparsity=0.5"], "goes with no `bits` or `grid`"),
        (["--bits=5"], "`bits`"),
        (["--grid=q9"], "q9"),
        (["--pattern=2:4", "--gguf=out"], "`--gguf`: expected a file that ends in .gguf"),
        (["--pattern=2:4", "--tunin"], "`--tuning`"),
        (["--pattern=4"], "4"),
        (["--sparsity=1.5"], "1.5"),
        (["--pattern=2:4", "--method=SN"], "SN"),
        (["--pattern=2:4", "--num-samples=0"], "num-samples"),
        (["--pattern=2:4", "--accelerator=quantum"], "`--accelerator`"),
        (["--pattern=2:4", "--accelerator=tpu"], "Got tpu"),
    ],
    ids=str,
)
def test_a_mistake_is_told_in_a_line_before_the_model_is_loaded(options, said, tiny_llama, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["prune", str(tiny_llama), *options])
    assert stop.value.code == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ")
    assert said in shown.err
    assert "Loading" not in shown.out


@pytest.mark.parametrize(
    ("pattern", "columns"), [("2:4", 128), ("2:3", 126), ("5:7", 126), ("100:200", 200)]
)
def test_columns_are_chosen_together_as_a_pattern_divides_them(pattern, columns):
    settings = _settings(_parser().parse_args(["model", f"--pattern={pattern}"]))
    assert settings.recipe.block_size == columns


def test_a_recipe_is_shown_as_what_it_is():
    settings = _settings(_parser().parse_args(["model", "--recipe=best_4bit", "--pattern= 3 : 4"]))
    assert settings.config()["pattern"] == "3:4"
    assert (amount(settings), method(settings)) == ("3:4+4bit", "JM, dense target, tuned")


def test_of_fewer_units_the_removed_part_is_shown():
    settings = _settings(_parser().parse_args(["model", "--structure=blocks", "--sparsity=0.2"]))
    assert amount(settings) == "20% fewer blocks"


def test_a_balanced_grid_is_shown_as_balanced():
    settings = _settings(_parser().parse_args(["model", "--grid=int4-g64", "--balance"]))
    assert (amount(settings), method(settings)) == ("int4-g64", "JM, balanced")


def test_help_has_a_text_on_each_setting():
    texts = {action.dest: action.help for action in _parser(["--help"])._actions}
    assert all(texts[field.name] for field in fields(Settings) if field.init)
    assert texts["damping"].endswith("is added to the diagonal (default: 0.01)")


def test_of_many_documents_whole_ones_are_held_out(tmp_path):
    file = tmp_path / "text.jsonl"
    file.write_text("".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(40)))
    data = TextDataModule([file], hold_out=True)
    held_out, rest = data.documents("test"), data.documents("train")
    assert held_out == [f"document {i}" for i in (9, 19, 29, 39)]
    assert sorted([*held_out, *rest]) == sorted(f"document {i}" for i in range(40))


@pytest.mark.usefixtures("short_library")
def test_without_text_the_model_writes_what_it_is_calibrated_on(
    tiny_llama, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    options = ["--num-samples=4", "--sequence-length=32", "--eval-samples=4", "--accelerator=cpu"]
    main(["prune", str(tiny_llama), "--sparsity=0.5", *options])
    shown = " ".join(capsys.readouterr().out.split())
    assert "calibrated on 4 windows of text that the model writes itself" in shown
    assert re.search(r"Pruning may take .* \(.* of it to write own text\) and", shown)
    assert "Evaluating the dense model on the source of Python's standard library" in shown
    out = Path(f"{tiny_llama.name}-50")
    report = json.loads((out / "pruning_report.json").read_text())
    assert report["provenance"]["data"]["source"] == "the model's own text"


def test_own_text_beside_files(tiny_llama, tmp_path, capsys):
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text(" ".join(map(str, range(9999))))
    options = ["--num-samples=8", "--sequence-length=32", "--eval-samples=4", "--accelerator=cpu"]
    prune = ["prune", str(tiny_llama), "--sparsity=0.5", *options, f"--out={out}"]
    for wrong in (["--own=0.5"], [f"--text={text}", "--own=1"], [f"--text={text}", "--own=-0.1"]):
        with pytest.raises(SystemExit):
            main([*prune, *wrong])
        assert "`--own`: expected a share of the text, from 0 to less" in capsys.readouterr().err
    main([*prune, f"--text={text}", "--own=0.25"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "on 8 windows of text.txt and of text that the model writes itself." in shown
    assert "of it to write own text" in shown
    assert "Evaluated on 4 windows of 32 tokens of the held-out part of text.txt." in shown
    report = json.loads((out / "pruning_report.json").read_text())
    data = report["provenance"]["data"]
    assert data["source"] == "0.25 the model's own text + 0.75 train_files"
    assert {layer["tokens"] for layer in report["layers"]} == {8 * 32}


def test_a_small_model_writes_no_more_than_its_widest_layer_needs(tiny_llama):
    source = {"model": str(tiny_llama), "dtype": None, "gguf_file": None, "revision": None}
    text = {"train_files": None, "sequence_length": 64}
    subject = Subject({**source, "trust_remote_code": False}, text, 1, "cpu")
    plan = subject.plan(Settings(method="magnitude", sparsity=0.5))
    assert max(layer.columns for layers in plan.layers.values() for layer in layers) == 64
    assert subject.num_samples == subject.data.num_samples == 32  # 32 tokens a column


def test_what_a_pattern_does_not_divide_is_told_by_the_options(tiny_llama, text, capsys):
    with pytest.raises(SystemExit):
        main(["prune", str(tiny_llama), "--pattern=7:9", f"--text={text}", *SMALL])
    shown = capsys.readouterr().err
    assert "`ignore`, or leave them dense by `skip_indivisible`" in shown
    assert "layers.*.mlp.down_proj (2 layers): " in shown


def test_the_journal_of_another_model_is_named(tiny_llama, text, tmp_path, capsys, monkeypatch):
    other = tmp_path / "other"
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    model.save_pretrained(other)
    AutoTokenizer.from_pretrained(tiny_llama).save_pretrained(other)
    asked = ["--pattern=2:4", f"--text={text}", "--out=out", "--eval-samples=2", *SMALL]
    with monkeypatch.context() as patch:
        patch.setattr(
            pruned_module, "save_pretrained", lambda *_, **__: (_ for _ in ()).throw(OSError())
        )
        with pytest.raises(SystemExit):
            main(["prune", str(tiny_llama), *asked])
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["prune", str(other), *asked])
    shown = " ".join(capsys.readouterr().err.split())
    assert f"of the model {tiny_llama}, and this one prunes {other}." in shown
    assert "`prune --restart`" in shown
    main(["prune", str(other), *asked, "--restart"])


def test_messages_name_what_was_typed(tiny_llama, text, capsys):
    asked = [f"--text={text}", "--sequence-length=32", "--accelerator=cpu", "--eval-samples=2"]
    Path("few.txt").write_text("x = 1")
    Path("few.jsonl").write_text('{"text": "a"}\n')
    Path("white.txt").write_text(" \n")
    for options, said in (
        (["--sequence-length=100000", *asked[:1]], "`--sequence-length`: the windows have 100000"),
        (["--text=few.txt"], "`--text`: the text has 5 bytes, of which a tenth is held out"),
        (["--text-column=body", "--text=few.jsonl"], "`--text`: few.jsonl, line 1 is no object"),
        (["--num-samples=2", "--out=/", *asked], "`--out`"),
        (["--text-column=body"], "`--text-column`: it is about the files of `--text`"),
        (["--text="], "the name of a text file is empty"),
        (["--text=white.txt"], "`--text`: the text has 2 bytes"),
        (["--restrt"], "Did you mean `--restart`?"),
        (["--tokenizer=nowhere/at-all", *asked], "nowhere/at-all"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(["prune", str(tiny_llama), "--pattern=2:4", *options])
        assert stop.value.code == 2
        shown = capsys.readouterr()
        assert said in shown.err
        assert "data." not in shown.err
        assert "Evaluating" not in shown.out


@pytest.mark.parametrize(
    ("file", "denied", "message"),
    [
        (
            "rows.csv",
            "cache/datasets",
            "`--text`: rows.csv cannot be read as csv (PermissionError: ",
        ),
        ("text.txt", "text.txt", "text.txt: permission denied. Change its permissions"),
    ],
)
def test_files_that_may_not_be_touched(
    file, denied, message, tiny_llama, text, capsys, monkeypatch
):
    """By an error of the system, since permissions do not hold for root."""
    datasets = pytest.importorskip("datasets", reason="tables need the extra `data`")
    Path("rows.csv").write_text("text\n" + "a row of words\n" * 200)

    def refused(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", denied)

    monkeypatch.setattr(datasets, "load_dataset", refused)
    monkeypatch.setattr(Path, "read_bytes", refused)
    with pytest.raises(SystemExit) as stop:
        main(["prune", str(tiny_llama), "--pattern=2:4", f"--text={file}", *SMALL])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_a_short_text_is_used_and_said_to_be_short(tiny_llama, text, capsys):
    text.write_text(text.read_text()[:1500])
    with pytest.warns(UserWarning, match="windows of") as warned:
        main(["prune", str(tiny_llama), "--pattern=2:4", f"--text={text}", "--method=magnitude"])
    messages = " ".join(str(warning.message) for warning in warned)
    assert re.search(r"128 windows of \d+ tokens .* `num_samples: \d+`", messages)
    assert "The held-out text has only" in messages
    (scores,) = json.loads(Path("tiny-llama-2of4/evaluation.json").read_text())["dense"].values()
    held_out = TextDataModule([text], hold_out=True).documents("test")[0]
    ids = AutoTokenizer.from_pretrained(tiny_llama)(held_out, add_special_tokens=False).input_ids
    assert scores["context"] - scores["prefix"] == len(ids)
    assert "Evaluated on 1 window of" in capsys.readouterr().out


def test_windows_do_not_depend_on_the_size_of_batches(tiny_llama, text, capsys):
    """The second directory has a name that rich would read as styles and an emoji."""
    asked = ["--pattern=2:4", "--method=magnitude", f"--text={text}", "--num-samples=2"]
    asked += ["--sequence-length=16", "--eval-samples=5", "--accelerator=cpu"]
    scores, outs = [], ("out", "résultat [x] b[/r] :x: %d")
    for out, size in zip(outs, (1, 3), strict=True):
        main(["prune", str(tiny_llama), *asked, f"--batch-size={size}", f"--out={out}"])
        content = json.loads(Path(out, "evaluation.json").read_text())
        scores += [*content["dense"].values(), *content["perplexity"].values()]
    assert {score["windows"] for score in scores} == {5}
    dense = [score["perplexity"] for score in scores[::2]]
    assert dense == pytest.approx([dense[0]] * 2, rel=1e-5)
    shown = capsys.readouterr().out
    assert f"The result is in {outs[1]};" in shown
    _, report = re.findall(r"mrp-lightning report (.*)", shown)
    assert shlex.split(report) == [outs[1]]


def test_what_people_ask_for_in_one_command(tiny_llama, text, capsys, monkeypatch):
    """Bits and a pattern, some layers ignored, text of a directory; packed, and run as it is."""
    Path("corpus").mkdir()
    text.rename("corpus/text.txt")
    asked = ["--text=corpus", "--bits=4", "--group-size=32", "--pattern=2:4"]
    asked += [*SMALL, "--ignore", "k_proj", "layers.1"]
    main(["prune", "--model", str(tiny_llama), *asked, "--out=out", "--pack"])
    shown = capsys.readouterr().out
    report = json.loads(Path("out/pruning_report.json").read_text())
    assert report["config"]["ignore"] == ["k_proj", "layers.1"]
    assert {row["name"] for row in report["layers"]} == {
        f"model.layers.0.{name}_proj"
        for name in ("self_attn.q", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
    }
    assert {(row["grid"]["bits"], row["sparsity"]) for row in report["layers"]} == {(4, 0.5)}
    size = Path("out-packed/model.safetensors").stat().st_size
    assert size < Path("out/model.safetensors").stat().st_size
    assert f"{size / 2**10:,.2f} KiB" in shown
    ids = torch.arange(8)[None]
    models = [CausalLM(name).model.eval() for name in ("out", "out-packed")]
    with torch.no_grad():
        assert torch.equal(models[0](ids).logits, models[1](ids).logits)
    assert "mrp-lightning generate out-packed" in shown
    Path("other-packed").mkdir()
    Path("other-packed/mine.txt").touch()
    with pytest.raises(SystemExit):  # an output that is in the way, before any work
        main(["prune", str(tiny_llama), *asked, "--out=other", "--pack"])
    assert "`--pack`: " in capsys.readouterr().err
    assert not Path("other").exists()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"x = compute(3)\n" * 400)))
    main(["prune", str(tiny_llama), "--sparsity=0.999", "--method=wanda", "--text=-", *SMALL])
    report = json.loads(Path("tiny-llama-99.9/pruning_report.json").read_text())
    assert report["provenance"]["data"]["source"] == "stdin.txt"


def test_a_ruined_model_is_told_in_a_sentence():
    dense = {"perplexity": 1.0}
    assert "is 1.42e+04 times that of the dense model" in why_useless(dense, {"perplexity": 14200})
    assert "is not finite times" in why_useless(dense, {"perplexity": None})
    of_blocks = why_useless(dense, {"perplexity": 4}, structure="blocks")
    assert "Remove fewer blocks (a lower `--sparsity`), or train those left: `mrp-li" in of_blocks
    assert why_useless(dense, {"perplexity": 1.2}) is None
    assert "those before is 0.3, which is of little" in why_useless({}, {"cosine": 0.3})
    assert "those before is not finite" in why_useless({}, {"cosine": float("nan")})
    assert why_useless({}, {"cosine": 0.97}) is None


def test_sigterm_ends_the_tokenizing_of_a_long_text(tiny_llama, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("value = compute(1) + value\n" * 200_000)  # of which a tenth is held out
    command = ["-m", "mrp_lightning", "prune", str(tiny_llama), "--pattern=2:4"]
    process = Piped([*command, f"--text={text}", f"--out={tmp_path / 'out'}", *SMALL])
    for line in process.stdout:
        if line.startswith("Tokenizing 5 million"):
            time.sleep(0.2)
            process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 143
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


@pytest.mark.parametrize(
    ("options", "method"),
    [
        (["--pattern=2:4"], "JM"),
        (["--sparsity=0.2", "--structure=neurons"], "SM"),
        (["--sparsity=0.5", "--block-size=64"], "SM"),
        (["--sparsity=0.5", "--recipe=paper"], "SM"),
    ],
)
def test_the_default_method_has_what_is_asked_for(options, method):
    assert _settings(_parser().parse_args(["model", *options])).method == method


@pytest.mark.parametrize("options", [[], ["--overwrite"]])
def test_an_output_of_others_is_refused_before_the_pruning(options, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("notes", "file"):
        with pytest.raises(FileExistsError):
            Conversion("export", tmp_path / name, options).check(None)
