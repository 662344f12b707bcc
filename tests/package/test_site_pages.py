"""What the pages of the site show runs, with a tiny model and text in place of the named ones."""

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
    """A command's arguments after `python -m MODULE`."""
    python, option, _, *arguments = shlex.split(line)
    assert (python, option) == ("python", "-m")
    return arguments


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("def f(x):\n    return x\n" * 400)
    return tmp_path


def test_five_minutes(tiny_llama, here, capsys):
    pytest.importorskip("matplotlib", reason="the page needs the extra `report`")
    from export.generate import main as generate
    from export.to_sparse import main as to_sparse

    page = "start.md"
    (prune,) = block(page, "mrp-lightning prune").splitlines()
    command, _, *options = shlex.split(prune)[1:]
    few = ["--num-samples=4", "--sequence-length=32", "--accelerator=cpu"]
    main([command, str(tiny_llama), *options, *few])
    assert "2:4 by SM" in capsys.readouterr().out
    layers, report = block(page, "python -m mrp_lightning layers").splitlines()
    main(words(layers))
    main(words(report))
    assert "What to do next" in Path("runs/first/report.html").read_text("utf-8")
    pack, write = block(page, "python -m export.to_sparse").splitlines()
    to_sparse(words(pack))
    capsys.readouterr()
    generate([*words(write), "--max-new-tokens=4"])
    assert "4 tokens" in capsys.readouterr().out


def test_a_run_in_yaml(tiny_llama, here, capsys):
    layers = block("checkpoint.md", "python -m mrp_lightning layers").strip()
    main(words(layers.replace("facebook/opt-125m", str(tiny_llama))))
    assert "self_attn.q_proj" in capsys.readouterr().out
    Path("run.yaml").write_text(block("checkpoint.md", "model:"))
    for name in ("calibration.txt", "test.txt"):
        Path(name).write_text(Path("text.txt").read_text())
    predict, test = block("checkpoint.md", "python -m mrp_lightning predict").splitlines()
    main([*words(predict), f"--model.model={tiny_llama}", *QUICK])
    main([*words(test), *QUICK])
    names: dict = {}
    exec(block("files.md", "from safetensors"), names)
    assert names["pruned"].float().mean() == 0.5
    listed = re.findall(r"`(\.?[\w-]+\.\w+)`", (ROOT / "docs/files.md").read_text())
    assert {file.name for file in Path("runs/mine").iterdir()} <= {*listed}


def test_the_keys_of_the_yaml_page_are_read(here):
    """The published texts are not here: the configuration alone is read."""
    Path("run.yaml").write_text(block("yaml.md", "model:"))
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

    text = (ROOT / "docs/errors.md").read_text()
    named = set(re.findall(r"`(\w+(?:Error|Warning))`", text)) - {"FileExistsError"}
    assert len(named) > 8
    assert all(hasattr(errors, name) for name in named)
