"""`python -m mrp_lightning layers` against what a run prunes."""

import json
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from full_forwards import prune_and_compare
from tiny_configs import FAMILIES
from transformers import AutoConfig, AutoModelForCausalLM

from mrp_lightning.commands.main import main
from mrp_lightning.models.checkpoint import build_without_weights
from mrp_lightning.models.loading import load_config

KINDS = {"llama": "Linear", "opt": "Linear", "gpt2": "Conv1D", "bert": "Linear", "bart": "Linear"}


@pytest.fixture
def config_of(tmp_path: Path):
    """A directory with nothing but the configuration of a family."""

    def save(family: str, **more: Any) -> str:
        made = FAMILIES[family]
        config = AutoConfig.for_model(made.model_type, **made.config, **more)
        config.architectures = [type(families.build(family)).__name__]
        config.save_pretrained(tmp_path / family)
        return str(tmp_path / family)

    return save


def listed(capsys: pytest.CaptureFixture, *options: str) -> dict[str, Any]:
    capsys.readouterr()
    main(["layers", "--json", *options])
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("family", KINDS)
def test_lists_the_layers_that_a_run_prunes(family, config_of, capsys):
    listing = listed(capsys, f"--model={config_of(family)}", "--pattern=2:4")
    run = prune_and_compare(family)
    pruned = [row for row in run.rows if row.skipped is None]
    assert {(row["name"], *row["shape"]) for row in listing["layers"]} == {
        (row.name, *row.shape) for row in pruned
    }
    assert {row["kind"] for row in listing["layers"]} == {KINDS[family]}
    assert {block["name"] for block in listing["blocks"]} == set(run.errors)
    assert listing["model_class"] == type(run.model).__name__

    totals = listing["totals"]
    zeros = sum(int((run.model.get_submodule(row.name).weight == 0).sum()) for row in pruned)
    assert totals["removed"] == zeros
    assert totals["model_parameters"] == sum(p.numel() for p in run.model.parameters())
    assert totals["fraction_of_model"] == totals["parameters"] / totals["model_parameters"]
    assert totals["layers"] == len(pruned)

    # Every matrix is listed once.
    matrices = [
        (name, p.numel())
        for name, p in families.build(family).named_parameters(remove_duplicate=False)
        if p.ndim >= 2
    ]
    rows = [(f"{row['name']}.weight", row["parameters"]) for row in listing["layers"]]
    rows += [(row["name"], row["parameters"]) for row in listing["skipped"]]
    assert sorted(rows) == sorted(matrices)
    tied = sum(row["parameters"] for row in listing["skipped"] if "tied to" in row["reason"])
    left = sum(row["parameters"] for row in listing["skipped"])
    assert totals["skipped"] == left - tied


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_built_without_weights(family, config_of):
    model = build_without_weights(load_config(str(config_of(family))))
    shapes = {name: p.shape for name, p in families.build(family).named_parameters()}
    assert {name: p.shape for name, p in model.named_parameters()} == shapes
    assert {p.device for p in model.parameters()} == {torch.device("meta")}


def test_a_model_of_70_billion_parameters_needs_no_memory(tmp_path, capsys):
    AutoConfig.for_model(
        "llama",
        hidden_size=8192,
        num_hidden_layers=80,
        intermediate_size=28672,
        num_attention_heads=64,
        num_key_value_heads=8,
    ).save_pretrained(tmp_path)
    totals = listed(capsys, f"--model={tmp_path}", "--sparsity=0.7")["totals"]
    assert totals["layers"] == 80 * 7
    assert totals["parameters"] == 80 * (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672)
    assert totals["removed"] == round(0.7 * totals["parameters"])


def test_what_is_left_out_says_why(config_of, capsys):
    options = ["--targets", "q_proj", "lm_head", "--ignore", "layers.0"]
    listing = listed(capsys, f"--model={config_of('llama')}", *options)
    names = [row["name"] for row in listing["layers"]]
    assert names == [f"model.layers.{k}.self_attn.q_proj" for k in (1, 2)] + ["lm_head"]
    assert [row["block"] for row in listing["layers"]] == ["model.layers.1", "model.layers.2", None]
    reasons = {row["name"]: row["reason"] for row in listing["skipped"]}
    assert "Embedding" in reasons["model.embed_tokens.weight"]
    assert "targets" in reasons["model.layers.0.self_attn.q_proj.weight"]

    listing = listed(capsys, f"--model={config_of('opt')}")
    reasons = {row["name"]: row["reason"] for row in listing["skipped"]}
    assert reasons["lm_head.weight"] == "tied to model.decoder.embed_tokens.weight"
    listing = listed(capsys, f"--model={config_of('opt')}", "--pattern=3:12", "--skip-indivisible")
    assert {row["name"].rpartition(".")[2] for row in listing["layers"]} == {"fc2"}
    assert any("3:12" in row["reason"] for row in listing["skipped"])


def test_experts_are_listed_one_by_one(config_of, capsys):
    listing = listed(capsys, f"--model={config_of('gpt_oss')}", "--pattern=2:4")
    experts = [row for row in listing["layers"] if ".experts." in row["name"]]
    assert len(experts) == 3 * 4 * 2
    assert {tuple(row["shape"]) for row in experts} == {(96, 32), (32, 48)}
    reasons = {row["name"]: row["reason"] for row in listing["skipped"]}
    assert "bias" in reasons["model.layers.0.mlp.experts.down_proj_bias"]
    assert "model.layers.0.mlp.experts.down_proj" not in reasons


def test_the_table_puts_blocks_that_are_alike_together(tiny_llama, capsys):
    main(["layers", f"--model={tiny_llama}", "--pattern=2:4"])
    lines = capsys.readouterr().out.splitlines()
    (row,) = [line for line in lines if "mlp.down_proj" in line]
    assert "model.layers.*.mlp.down_proj" in row
    assert "32 × 64" in row
    assert "4,096" in row  # two blocks
    assert "2:4" in lines[1]
    assert "would be removed" in lines[-1]


def test_a_quantized_checkpoint_is_pointed_out(config_of, capsys):
    source = config_of("llama", quantization_config={"quant_method": "gptq", "bits": 4})
    assert listed(capsys, f"--model={source}")["quantization"] == "gptq"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--pattern=5:4"], "pattern"),
        (["--targets", "q_porj"], "q_proj"),
        (["--pattern=2:5"], "do not divide"),
        (["--pattern=2:4", "--sparsity=0.5"], "not allowed with"),
    ],
)
def test_a_mistake_is_told_without_a_traceback(tiny_llama, capsys, options, message):
    with pytest.raises(SystemExit) as stop:
        main(["layers", f"--model={tiny_llama}", *options])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_an_unknown_model_type_is_one_line(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "llamma"}')
    with pytest.raises(SystemExit):
        main(["layers", f"--model={tmp_path}"])
    assert "llamma" in capsys.readouterr().err


@pytest.mark.parametrize("shard_size", ["5GB", "60KB"])
def test_files_with_more_blocks_than_the_configuration_are_named(
    shard_size, tiny_llama, tmp_path, capsys
):
    AutoModelForCausalLM.from_pretrained(tiny_llama).save_pretrained(
        tmp_path, max_shard_size=shard_size
    )
    assert len(listed(capsys, f"--model={tmp_path}")["blocks"]) == 2
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit):
        main(["layers", f"--model={tmp_path}"])
    assert "1 of `model.layers`, and the files hold 1 more" in capsys.readouterr().err
