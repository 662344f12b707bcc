"""The page about GPUs: its commands run, and its table of launches is what is counted."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from launches import counted
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from mrp_lightning import prune_weight
from mrp_lightning.commands.main import main
from mrp_lightning.embedded import STDLIB_LLAMA

PAGE = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text("utf-8")
METHODS = {
    "SM, 2:4": {"pattern": "2:4", "method": "SM"},
    "SM, 50%": {"sparsity": 0.5, "method": "SM"},
    "JM, 2:4": {"pattern": "2:4", "method": "JM"},
    "SS, 2:4": {"pattern": "2:4", "method": "SS"},
    "4 bits": {"bits": 4, "method": "SM"},
}


def block(beginning: str) -> list[str]:
    (text,) = re.findall(rf"^```\n({re.escape(beginning)}.*?)^```$", PAGE, flags=re.M | re.S)
    return text.splitlines()


@pytest.mark.parametrize("method", METHODS)
def test_the_table_of_launches_is_what_is_counted(second, method):
    """Rounding may add an iteration or two elsewhere; a kernel more a column is seen."""
    if second.type == "cuda":
        pytest.skip("operators are counted on the stand-in")
    (row,) = re.findall(rf"^\| {re.escape(method)} \| (\d+) \| (\d+) \|$", PAGE, flags=re.M)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 256, generator=generator)
    mixing = torch.randn(256, 256, generator=generator) / 16
    inputs = torch.randn(1024, 256, generator=generator) @ mixing * torch.linspace(0.1, 2, 256)
    hessian = 2 * inputs.T @ inputs / len(inputs)
    with counted() as launches:
        prune_weight(weight.to(second), hessian.to(second), **METHODS[method])
    assert [launches["kernels"], launches["syncs"]] == pytest.approx([*map(int, row)], rel=0.1)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A directory with a model DIR whose layers have the sizes that vLLM's kernels take."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("llama", vocab_size=2048, eos_token_id=0, **sizes, **heads)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "DIR")
    AutoTokenizer.from_pretrained(STDLIB_LLAMA).save_pretrained(tmp_path / "DIR")
    (tmp_path / "text.txt").write_text("def f(self, x): return [x, None]\nimport list\n" * 99)
    monkeypatch.chdir(tmp_path)
    return tmp_path


QUICK = ["--text=text.txt", "--num-samples=8", "--sequence-length=32"]


def test_the_commands_of_a_packed_model_run(here, capsys):
    prune, pack, write = block("mrp-lightning prune DIR --pattern")
    main([*shlex.split(prune)[1:], *QUICK])
    main(shlex.split(pack)[1:])
    eager = [] if torch.cuda.is_available() else ["--eager"]  # a CPU would compile for minutes
    main([*shlex.split(write)[1:], "--max-new-tokens=4", *eager])
    assert "times the tokens a second" in capsys.readouterr().out


def test_the_commands_of_a_server_run(here):
    prune, pack, serve = block("mrp-lightning prune DIR --grid")
    main([*shlex.split(prune)[1:], *QUICK])
    main(shlex.split(pack)[1:])
    directory = Path(shlex.split(serve)[-1])
    with safe_open(directory / "model.safetensors", framework="pt") as stored:
        assert any(name.endswith("weight_packed") for name in stored.keys())  # noqa: SIM118
