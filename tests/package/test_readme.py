"""What the README shows runs, with a tiny model and text in place of the named ones."""

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    every = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.M | re.S)
    found = [text for name, text in every if name == language]
    assert found, language
    return found


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.jsonl").write_text('{"text": "def f(x):\\n    return x\\n"}\n' * 400)
    return tmp_path


def test_python_blocks_run(tiny_llama, here):
    model, stock, matrix = blocks("python")
    model = model.replace('"facebook/opt-125m"', repr(str(tiny_llama)))
    model = model.replace('calibration="c4"', 'train_files="text.jsonl"')
    model = model.replace("num_samples=128", "num_samples=2").replace("=2048", "=64")
    names: dict = {}
    exec(model, names)
    assert names["prune"].report.layers
    assert (here / "runs" / "opt-125m-2of4" / "pruning_report.json").is_file()
    exec(stock, names)
    assert names["prune"].report.config["sparsity"] == 0.5
    assert names["prune"].report.complete
    exec(matrix, names)
    assert ((names["solution"].weight.view(64, -1, 4) == 0).sum(2) == 2).all()


def test_commands_run(tiny_llama, here):
    from mrp_lightning.commands.main import main

    commands = [block for block in blocks("") if "python -m mrp_lightning predict" in block]
    text = commands[0].replace("\\\n", " ").replace("configs/", f"{ROOT}/configs/")
    lines = [line for line in text.splitlines() if line]
    assert len(lines) == 2
    tiny = ["--data.calibration=null", "--data.evaluation=null"]
    tiny += ["--data.train_files=text.jsonl", "--data.eval_files=text.jsonl"]
    tiny += ["--data.num_samples=2", "--data.sequence_length=64", "--trainer.logger=false"]
    for line in lines:
        _, _, module, *arguments = shlex.split(line)
        assert module == "mrp_lightning"
        if arguments[0] == "predict":
            tiny_model = [f"--model.model={tiny_llama}"]
            main([*arguments, *tiny, *tiny_model])
        else:
            main([*arguments, *tiny])
    pruned = here / "runs" / "opt-125m-2of4"
    assert (pruned / "model.safetensors").is_file()
    pytest.importorskip("matplotlib", reason="the page needs the extra `report`")
    (line,) = re.findall(r"^python -m mrp_lightning report .*$", README, flags=re.M)
    main(shlex.split(line)[3:])
    (found,) = json.loads((pruned / "evaluation.json").read_text())["perplexity"].values()
    assert f">{found['perplexity']:,.0f}<" in (pruned / "report.html").read_text()


def test_the_first_command_runs(tiny_llama, here, capsys):
    from mrp_lightning.commands.main import main

    program, *words = shlex.split(blocks("")[0], comments=True)
    assert program == "mrp-lightning"
    Path("mine.txt").write_text("def f(x):\n    return x\n" * 400)
    words[words.index("facebook/opt-125m")] = str(tiny_llama)
    main([*words, "--num-samples=2", "--sequence-length=64"])
    assert Path(f"{tiny_llama.name}-2of4", "model.safetensors").is_file()
    assert "dense" in capsys.readouterr().out


def test_the_layers_command_runs(tiny_llama, capsys):
    from mrp_lightning.commands.main import main

    (command,) = re.findall(r"^python -m mrp_lightning layers .*$", README, flags=re.M)
    main(shlex.split(command.replace("facebook/opt-125m", str(tiny_llama)))[3:])
    assert "self_attn.q_proj" in capsys.readouterr().out


def test_the_yaml_is_a_run(tiny_llama, here):
    from mrp_lightning.commands.main import main

    (config,) = blocks("yaml")
    parsed = yaml.safe_load(config)
    for key in ("train_files", "eval_files"):
        for name in parsed["data"][key]:
            Path(name).write_text("import this\n" * 3000)
    Path("run.yaml").write_text(config)
    options = ["--trainer.logger=false", "--data.sequence_length=64", "--data.num_samples=2"]
    main(["predict", "--config=run.yaml", f"--model.model={tiny_llama}", *options])
    assert Path("runs/mine/model.safetensors").is_file()


def test_the_files_to_read_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| `(\w+)/` \|.*\|(.*)\|$", text, flags=re.M)
    named = [(folder, name) for folder, cell in rows for name in re.findall(r"`(\w+\.py)`", cell)]
    assert len(named) > 15
    for folder, name in named:
        packages = ("mrp_lightning", "mrp_sparse", "export")
        paths = [ROOT / package / folder / name for package in packages]
        assert any(path.is_file() for path in paths), (folder, name)


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 120
