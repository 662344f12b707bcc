"""What the pages of the site show runs, with a tiny model and text in place of the named ones."""

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

pytest.importorskip("jsonargparse", reason="the command line needs the extra `cli`")

from mrp_lightning.commands.main import main

ROOT = Path(__file__).parents[2]
QUICK = ["--data.num_samples=2", "--data.sequence_length=64", "--trainer.logger=false"]
QUICK += ["--trainer.accelerator=cpu"]


def block(page: str, beginning: str) -> str:
    text = (ROOT / "docs" / page).read_text("utf-8")
    every = re.findall(r"^```\w*\n(.*?)^```$", text, flags=re.M | re.S)
    (found,) = (block for block in every if block.startswith(beginning))
    return found.replace("\\\n", " ")


def words(line: str) -> list[str]:
    """A command's arguments after `mrp-lightning`."""
    program, *arguments = shlex.split(line)
    assert program == "mrp-lightning"
    return arguments


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("def f(x):\n    return x\n" * 400)
    return tmp_path


def test_five_minutes(tiny_llama, here, capsys):
    pytest.importorskip("matplotlib", reason="the page needs the extra `report`")
    page = "start.md"
    _, prune = block(page, "MODEL=").splitlines()
    model = {"$MODEL": str(tiny_llama)}
    few = ["--num-samples=4", "--sequence-length=32", "--accelerator=cpu"]
    main([*(model.get(word, word) for word in words(prune)), *few])
    assert "50% by JM" in capsys.readouterr().out
    layers, report = block(page, "mrp-lightning layers").splitlines()
    main([model.get(word, word) for word in words(layers)])
    main(words(report))
    assert "What to do next" in Path("runs/first/report.html").read_text("utf-8")
    pack, write = block(page, "mrp-lightning export").splitlines()
    main(words(pack))
    capsys.readouterr()
    main([*words(write), "--max-new-tokens=4", "--eager"])
    assert "4 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("page", ["index.md", "checkpoint.md"])
def test_half_of_the_weights(page, tiny_llama, here, capsys):
    """The commands of a page that begin with `prune`, and those of another that evaluate."""
    pytest.importorskip("matplotlib", reason="the page needs the extra `report`")
    Path("mine.txt").write_text(Path("text.txt").read_text())
    Path("calibration.txt").write_text(Path("text.txt").read_text())
    prune, *more = block(page, "mrp-lightning prune").splitlines()
    arguments = words(prune.replace("facebook/opt-125m", str(tiny_llama)))
    main([*arguments, "--num-samples=2", "--sequence-length=64", "--accelerator=cpu"])
    assert "50% by JM" in capsys.readouterr().out
    if page == "checkpoint.md":
        return
    for line in more:
        main(words(line))
    assert Path("runs/half-bitmask/config.json").is_file()
    Path("test.txt").write_text(Path("text.txt").read_text())
    main([*words(block("evaluate.md", "mrp-lightning test")), *QUICK[1:]])
    assert "text" in json.loads(Path("runs/half/evaluation.json").read_text())["perplexity"]
    Path("runs/other").symlink_to(Path("runs/half").resolve())
    one, _ = block("evaluate.md", "mrp-lightning report").splitlines()
    main(words(one))


def test_a_run_in_yaml(tiny_llama, here, capsys):
    layers = block("checkpoint.md", "mrp-lightning layers").strip()
    main(words(layers.replace("facebook/opt-125m", str(tiny_llama))))
    assert "self_attn.q_proj" in capsys.readouterr().out
    Path("run.yaml").write_text(block("checkpoint.md", "model:"))
    for name in ("calibration.txt", "test.txt"):
        Path(name).write_text(Path("text.txt").read_text())
    predict, test = block("checkpoint.md", "mrp-lightning predict").splitlines()
    main([*words(predict), f"--model.model={tiny_llama}", *QUICK])
    main([*words(test), *QUICK])
    names: dict = {}
    exec(block("reference.md", "from safetensors"), names)
    assert names["pruned"].float().mean() == 0.5
    page = (ROOT / "docs/reference.md").read_text()
    rows = re.findall(r"^\| (`.+?) \|", page, flags=re.M)
    listed = {name for row in rows for name in re.findall(r"`(\.?[\w-]+\.\w+)`", row)}
    assert {file.name for file in Path("runs/mine").iterdir()} <= listed


def test_a_run_in_python(tiny_llama, here):
    Path("calibration.txt").write_text(Path("text.txt").read_text())
    code = block("checkpoint.md", "from callbacks import")
    code = code.replace('"facebook/opt-125m"', repr(str(tiny_llama)))
    code = code.replace("num_samples=128", "num_samples=2").replace("=2048", "=64")
    names: dict = {}
    exec(code.replace("Trainer()", "Trainer(accelerator='cpu', logger=False)"), names)
    assert names["prune"].report.complete


def test_the_keys_of_the_yaml_page_are_read(here):
    """The published texts are not here: the configuration alone is read."""
    Path("run.yaml").write_text(block("reference.md", "model:"))
    parsed = yaml.safe_load(Path("run.yaml").read_text())
    assert parsed["trainer"]["callbacks"][0]["init_args"]["pattern"] == "2:4"
    with pytest.raises(SystemExit) as ended:
        main(["predict", "--config=run.yaml", "--print_config"])
    assert ended.value.code == 0


def test_a_module_of_ones_own(here, monkeypatch):
    names: dict = {}
    exec(block("module.md", "import lightning"), names)
    rows = {row.name: row.skipped for row in names["prune"].report.layers}
    assert [name for name, skipped in rows.items() if skipped is None] == [
        f"blocks.{i}.0" for i in range(4)
    ]
    assert Path("runs/regression/model.safetensors").is_file()


def test_the_errors_of_the_page_exist():
    from mrp_lightning import errors

    text = (ROOT / "docs/reference.md").read_text()
    named = set(re.findall(r"`(\w+(?:Error|Warning))`", text)) - {"FileExistsError"}
    assert len(named) > 8
    assert all(hasattr(errors, name) for name in named)
