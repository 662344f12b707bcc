"""Experts and layers of other kinds in the engines' formats, as transformers loads them."""

import json
import re

import pytest
import torch
from quiet import QUIET
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from callbacks import MRPCallback
from export.conversion import compressed
from export.conversion.checkpoint import open_checkpoint
from export.conversion.compressed import choose_compressed
from export.conversion.integers import Integers
from export.to_sparse import main
from mrp_lightning import CausalLM, Trainer

SMALL = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
MODELS = {
    "qwen3_moe": {"head_dim": 16} | EXPERTS,
    "mixtral": LOCAL,
    "qwen2_moe": {"shared_expert_intermediate_size": 64} | EXPERTS,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"head_dim": 16} | LOCAL,
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4},
}
IN_FILES = {
    "mixtral": ("block_sparse_moe", "w1", "w2"),
    "qwen3_moe": ("mlp", "gate_proj", "down_proj"),
}


@pytest.fixture
def pruned(tmp_path):
    """A function that puts the weights of a random model of a family on a grid of four bits."""

    def prune(kind, **options):
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, **SMALL | MODELS[kind])
        model = AutoModelForCausalLM.from_config(config).bfloat16()
        model.save_pretrained(tmp_path / "dense")
        windows = torch.randint(3, 60, (8, 16), generator=torch.Generator().manual_seed(0))
        callback = MRPCallback(save_dir=tmp_path / "run", **{"grid": "int4-g32"} | options)
        trainer = Trainer(**QUIET)
        loader = torch.utils.data.DataLoader(windows, batch_size=4)
        trainer.predict(CausalLM(tmp_path / "dense"), loader, callbacks=[callback])
        return tmp_path / "run"

    return prune


def export(run, *arguments):
    main([str(run), "--format", "compressed-tensors", *arguments])
    out = run.with_name(f"{run.name}-compressed-tensors")
    return out, json.loads((out / "config.json").read_text())["quantization_config"]


def logits(directory):
    model = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        return model(torch.arange(3, 20)[None]).logits


@pytest.mark.parametrize("kind", IN_FILES)
def test_experts_are_packed_one_by_one_and_transformers_stacks_them(kind, pruned, capsys):
    pytest.importorskip("compressed_tensors", reason="needs the package compressed-tensors")
    run = pruned(kind)
    out, settings = export(run)
    shown = capsys.readouterr().out
    assert "32 layers in 4 bits" in shown  # two blocks of four projections and four experts of 3
    assert "transformers loaded it here" in shown
    assert "with the package compressed-tensors and the same logits. vLLM" in shown
    assert "vLLM and SGLang, which read this format, were not tried." in shown
    assert torch.equal(logits(out), logits(run))
    block, gate, down = IN_FILES[kind]
    stored = load_file(out / "model.safetensors")
    for name in (gate, down):
        start = f"model.layers.1.{block}.experts.3.{name}.weight"
        assert {f"{start}_packed", f"{start}_scale", f"{start}_shape"} <= stored.keys()
        assert start not in stored
    routers = {f"model.layers.{i}.{b}.gate" for i in range(2) for b in {block, "mlp"}}
    assert set(settings["ignore"]) == {"lm_head"} | routers


@pytest.mark.parametrize("kind", ["qwen2_moe", "olmoe"])
def test_other_families_load_too(kind, pruned, capsys):
    pytest.importorskip("compressed_tensors", reason="needs the package compressed-tensors")
    export(pruned(kind))
    assert "transformers loaded it here" in capsys.readouterr().out


def test_experts_that_the_files_hold_as_one_tensor_are_counted(pruned, capsys):
    run = pruned("gpt_oss")
    _, settings = export(run)
    shown = capsys.readouterr().out
    # Four experts of two blocks, each with 128 · 2 · 64 and 64 · 128 weights.
    assert f"16 pruned layers with {2 * 4 * (256 * 64 + 64 * 128):,} weights stay in 16" in shown
    assert "(8 layers): the files hold no matrix of its own for it" in shown
    patterns = [each.removeprefix("re:") for each in settings["ignore"] if each.startswith("re:")]
    for name in ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts.0.gate_proj"):
        assert sum(re.match(pattern, name) is not None for pattern in patterns) == 1


def test_skipped_experts_leave_their_block_dense(pruned, capsys):
    """vLLM reads such a file; transformers does not, which is not said of it."""
    pytest.importorskip("compressed_tensors", reason="needs the package compressed-tensors")
    run = pruned("qwen3_moe")
    out, settings = export(run, "--skip", "layers.0.mlp.experts.2")
    shown = capsys.readouterr().out
    assert "20 layers in 4 bits" in shown
    assert "it is an expert, and others of its block stay dense" in shown
    assert r"re:^model\.layers\.0\.mlp\.experts(\..*)?$" in settings["ignore"]
    assert "transformers cannot load it: of this format, it reads experts that are pack" in shown
    with pytest.raises(RuntimeError):
        logits(out)


def test_layers_of_another_kind_are_named(pruned, capsys):
    run = pruned("gpt2")
    with pytest.raises(SystemExit) as ended:
        export(run)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "has no layer that engines read as compressed-tensors" in error
    assert "transformer.h.*.mlp.c_fc (2 layers): it is a Conv1D, and engines read nn.Lin" in error
    assert "Prune with" not in error


def test_without_the_package_nobody_is_said_to_load_it(pruned, capsys, monkeypatch):
    monkeypatch.setattr(compressed, "_MODULE", "no_such_package")
    export(pruned("mixtral"))
    shown = capsys.readouterr().out
    assert "transformers was not tried here: the package compressed-tensors is not inst" in shown
    assert "loaded it here" not in shown


BREAKS = {
    "does not find the weights": lambda settings: settings | {"ignore": ["lm_head"] * 2},
    "cannot load what was written": lambda settings: settings | {"config_groups": {"a": {"b": 1}}},
}


@pytest.mark.parametrize("message", BREAKS)
def test_what_transformers_does_not_load_is_no_success(message, pruned, capsys, monkeypatch):
    pytest.importorskip("compressed_tensors", reason="needs the package compressed-tensors")
    run, settings = pruned("qwen3_moe"), Integers.settings
    skip = ["--skip", "q_proj"]
    monkeypatch.setattr(Integers, "settings", lambda integers: BREAKS[message](settings(integers)))
    with pytest.raises(SystemExit) as ended:
        export(run, *skip)
    assert ended.value.code == 1
    assert message in capsys.readouterr().err
    assert not run.with_name("run-compressed-tensors").exists()


def test_other_logits_are_no_success(pruned, capsys, monkeypatch):
    pytest.importorskip("compressed_tensors", reason="needs the package compressed-tensors")
    run = pruned("mixtral")
    source = open_checkpoint(run)
    chosen = choose_compressed(source)
    export(run)
    assert chosen.left == {}
    model = AutoModelForCausalLM.from_pretrained(run)
    model.model.embed_tokens.weight.data = model.model.embed_tokens.weight.data.flip(0)
    model.save_pretrained(run)
    with pytest.raises(compressed.ParityError, match="transformers computes otherwise"):
        compressed.load_with_transformers(
            open_checkpoint(run), run.with_name("run-compressed-tensors"), chosen
        )
