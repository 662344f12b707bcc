"""Which layers are packed, whatever the family calls them and however its files name them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_configs import FAMILIES, Family
from transformers import SiglipVisionConfig, SiglipVisionModel
from transformers.conversion_mapping import get_model_conversion_mapping

import export
from export.conversion.checkpoint import open_checkpoint
from export.conversion.selection import choose_layers, is_read_directly
from export.to_sparse import main
from mrp_lightning.models.checkpoint import build_without_weights, names_in_model
from mrp_lightning.records.report import PruningReport
from mrp_lightning.solver.patterns import SemiStructured
from mrp_lightning.targets.plan import make_plan

from .conftest import keep_two_of_four, onto_grid, write_report

EXPERT = "it is an expert of a stack; the format packs linear layers"
READ = "the module around it multiplies with its weight itself"


@pytest.fixture
def prune(tmp_path: Path) -> Callable[[Any], Path]:
    """Prunes all layers that a run would prune, and saves model and report."""

    def write(model: Any) -> Path:
        plan = make_plan(model, SemiStructured(2, 4), skip_indivisible=True)
        layers = [*(layer for block in plan.layers.values() for layer in block), *plan.outside]
        for layer in layers:
            layer.write_(keep_two_of_four(layer.weight))
        model.save_pretrained(tmp_path / "model")
        shapes = {layer.name: tuple(layer.weight.shape) for layer in layers}
        write_report(tmp_path / "model", shapes, pattern="2:4")
        return tmp_path / "model"

    return write


def exported(source: Path, *options: str) -> dict[str, str | None]:
    """Export; for each layer of the report, why it is dense."""
    out = source.with_name("model-sparse24")
    main([str(source), "--out", str(out), "--overwrite", *options])
    report = json.loads((source.with_name("model-sparse24") / "export_report.json").read_text())
    return {row["name"]: row["dense_because"] for row in report["layers"]}


def pruned_layers(source: Path) -> set[str]:
    rows = json.loads((source / "pruning_report.json").read_text())["layers"]
    return {row["name"] for row in rows}


def assert_same_logits(source: Path, kind: str, batches: list[dict[str, Any]]) -> None:
    before = getattr(transformers, kind).from_pretrained(source).eval()
    after = export.load(source.with_name("model-sparse24")).eval()
    for batch in batches:
        with torch.inference_mode():
            # Equal bits may be summed in another order where they lie elsewhere in memory.
            torch.testing.assert_close(after(**batch)[0], before(**batch)[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("sparsity", "form"), [(0.5, "bitmask"), (None, "sparse24")])
def test_zeros_decide_where_the_report_names_no_layer(sparsity, form, prune, capsys):
    """As after a cut of the vocabulary, whose report replaces that of the pruning."""
    source = prune(families.build("llama"))
    if sparsity is not None:
        tensors = load_file(source / "model.safetensors")
        random = torch.Generator().manual_seed(0)
        for name, weight in tensors.items():
            if "proj" in name:
                weight.zero_()
                weight[torch.rand(weight.shape, generator=random) >= sparsity] = 1.0
        save_file(tensors, source / "model.safetensors", {"format": "pt"})
    PruningReport({"vocabulary": 64, "base_model": "a"}, []).save(source)
    main([str(source)])
    assert source.with_name(f"model-{form}").is_dir()


@pytest.mark.parametrize("family", ["vit", "swin", "bert", "t5", "gemma3n_text"])
def test_layers_are_found_whatever_the_files_call_them(family, prune):
    model = families.build(family)
    source = prune(model)
    reasons = exported(source)
    packed = {name for name, reason in reasons.items() if reason is None}
    indivisible = {name for name, reason in reasons.items() if "multiple of 8" in str(reason)}
    assert packed | indivisible >= pruned_layers(source)
    assert_same_logits(source, type(model).__name__, families.batches(family, padding=False))


@pytest.mark.parametrize("prefix", ["", "model."])
def test_files_may_lack_the_prefix_of_the_base_model_or_have_one_too_many(prefix, llama):
    file = llama / "model.safetensors"
    tensors = load_file(file)
    kind = "LlamaForCausalLM" if not prefix else "LlamaModel"
    if not prefix:
        tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | {"architectures": [kind]}))
    choices = choose_layers(open_checkpoint(llama))
    assert len(choices) == 14
    assert all(choice.reason is None for choice in choices)
    assert all(choice.tensor in tensors for choice in choices)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_experts_stay_dense_and_are_listed(family, prune):
    model = families.build(family)
    source = prune(model)
    reasons = exported(source)
    experts = {name for name in pruned_layers(source) if ".experts." in name}
    assert len(experts) == 3 * 4 * 2
    assert {reasons[name] for name in experts} == {EXPERT}
    assert {reasons[name] for name in pruned_layers(source) - experts} == {None}
    assert_same_logits(source, type(model).__name__, families.batches(family, padding=False))


def test_convolutions_stay_dense_and_are_listed(prune):
    source = prune(families.build("convnext"))
    reasons = exported(source)
    dense = {reasons[name] for name in pruned_layers(source)} - {None}
    assert dense == {"it is a Conv2d; the format packs linear layers"}


@pytest.mark.parametrize(
    ("family", "rank"), [("mamba", "time_step_rank"), ("jamba", "mamba_dt_rank")]
)
def test_a_weight_that_is_used_without_its_layer_stays_dense(family, rank, prune, monkeypatch):
    kind = FAMILIES[family]
    wide = Family(kind.model_type, {**kind.config, rank: 8}, kind.auto)
    monkeypatch.setitem(FAMILIES, family, wide)
    model = families.build(family)
    source = prune(model)
    reasons = exported(source)
    assert {reason for name, reason in reasons.items() if name.endswith("dt_proj")} == {READ}
    assert_same_logits(source, type(model).__name__, families.batches(family, padding=False))


def test_a_linear_layer_that_returns_another_thing_stays_dense(prune):
    """The routers of Llama 4 return two tensors."""
    model = families.build("llama4_text")
    for name, module in model.named_modules():
        if name.endswith(".router"):
            module.weight.data = keep_two_of_four(module.weight.data)
    source = prune(model)
    assert not any(name.endswith(".router") for name in exported(source))
    assert_same_logits(source, type(model).__name__, families.batches("llama4_text", padding=False))


def test_inputs_are_never_cast_to_codes(prune):
    """T5 casts those of `wo` to the dtype of its weight."""
    source = prune(families.build("t5"))
    tensors = load_file(source / "model.safetensors")
    for name in pruned_layers(source):
        tensors[f"{name}.weight"] = onto_grid(tensors[f"{name}.weight"])
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    reasons = exported(source, "--format", "bitmask4")
    dense = {name for name, reason in reasons.items() if "dtype: to codes" in str(reason)}
    assert dense == {name for name in pruned_layers(source) if name.endswith(".wo")}
    kind = "T5ForConditionalGeneration"
    assert_same_logits(source, kind, families.batches("t5", padding=False))


def test_the_projection_of_torchs_own_attention_stays_dense():
    config = SiglipVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    model = SiglipVisionModel(config)
    read = [
        n for n, m in model.named_modules() if hasattr(m, "weight") and is_read_directly(model, n)
    ]
    assert [name.rsplit(".", 2)[1:] for name in read] == [["attention", "out_proj"]]


def test_weights_that_transformers_puts_together_are_told_apart():
    config = transformers.AutoConfig.for_model("mixtral", **FAMILIES["mixtral"].config)
    model = build_without_weights(config)
    name_in_model = names_in_model(model, get_model_conversion_mapping(model))
    query = "model.layers.0.self_attn.q_proj.weight"
    assert name_in_model(query) == (query, False)
    layer = "model.layers.0"
    expert = name_in_model(f"{layer}.block_sparse_moe.experts.1.w2.weight")
    assert expert == (f"{layer}.mlp.experts.down_proj", True)
