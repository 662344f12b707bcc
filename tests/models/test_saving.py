"""A saved model holds what the model holds."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from mrp_lightning import CausalLM
from mrp_lightning.models.loading import load_model, wider_dtypes
from mrp_lightning.models.saving import save_pretrained, save_streamed
from mrp_lightning.models.streaming import load_streamed
from mrp_lightning.targets.blocks import find_blocks


def test_a_model_is_stored_in_the_dtype_of_its_source(tmp_path, tiny_llama):
    published = AutoModelForCausalLM.from_pretrained(tiny_llama)
    save_pretrained(published, tmp_path / "bf16", dtype="bfloat16")
    assert published.dtype == torch.float32

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16")
    assert model.dtype == torch.bfloat16
    save_pretrained(model.float(), tmp_path / "again", card="# A card")
    assert (tmp_path / "again" / "README.md").read_text() == "# A card"
    first = load_file(tmp_path / "bf16" / "model.safetensors")
    second = load_file(tmp_path / "again" / "model.safetensors")
    assert first.keys() == second.keys()
    assert "lm_head.weight" not in first  # tied to the embedding
    for name, tensor in first.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, second[name]), name
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert loaded.dtype == torch.bfloat16


BIAS = "e_score_correction_bias"


def publish(model, directory, wide: str) -> set[str]:
    """Write a model in bfloat16, but one weight, and what transformers keeps so, in float32."""
    model.save_pretrained(directory)
    weights = load_file(directory / "model.safetensors")
    kept = {name for name in weights if BIAS in name} | {wide}
    assert wide in weights
    weights = {n: x if n in kept else x.bfloat16() for n, x in weights.items()}
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return kept


def blocks_of(model):
    return {block.name: block.module for block in find_blocks(model)}


def in_float32(directory) -> set[str]:
    stored = [load_file(file) for file in directory.glob("*.safetensors")]
    weights = {name: tensor for part in stored for name, tensor in part.items()}
    assert {t.dtype for t in weights.values()} <= {torch.float32, torch.bfloat16}
    return {name for name, tensor in weights.items() if tensor.dtype == torch.float32}


@pytest.mark.parametrize(
    ("family", "wide"),
    [
        ("deepseek_v3", "model.norm.weight"),
        ("mixtral", "model.layers.0.block_sparse_moe.gate.weight"),  # transformers renames it
        ("tied", "model.embed_tokens.weight"),
    ],
)
def test_what_the_source_has_in_float32_is_not_rounded(family, wide, build, tiny_llama, tmp_path):
    tied = family == "tied"
    made = AutoModelForCausalLM.from_pretrained(tiny_llama) if tied else build(family)
    kept = publish(made, tmp_path / "source", wide)
    assert len(kept) == 1 + (2 if family == "deepseek_v3" else 0)
    model = load_model(str(tmp_path / "source"), torch.float32)
    save_pretrained(model, tmp_path / "same")
    assert in_float32(tmp_path / "same") == kept
    save_pretrained(model, tmp_path / "narrow", dtype="bfloat16")
    assert in_float32(tmp_path / "narrow") == {name for name in kept if BIAS in name}
    model, streamed = load_streamed(str(tmp_path / "source"), torch.float32, blocks_of)
    (tmp_path / "streamed").mkdir()
    save_streamed(model, streamed, tmp_path / "streamed")
    assert in_float32(tmp_path / "streamed") == kept


def test_the_precision_of_a_model_of_the_hub_is_found(tiny_llama, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    commit, repository = "a" * 40, tmp_path / "models--owner--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    made = AutoModelForCausalLM.from_pretrained(tiny_llama)
    kept = publish(made, repository / "snapshots" / commit, "model.norm.weight")
    made.name_or_path = "owner/name"
    assert wider_dtypes(made, torch.bfloat16, as_published=True).keys() == kept
    monkeypatch.chdir(repository / "snapshots" / commit)
    for name in ("", str(tmp_path / "gone" / "model.gguf")):
        made.name_or_path = name
        assert not wider_dtypes(made, torch.bfloat16, as_published=True)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_configuration_that_rounds_its_files_is_said(streaming, build, tmp_path, caplog):
    """Unless nothing is lost, the rounding is asked for, or transformers keeps the tensor."""
    kept = publish(build("deepseek_v3"), tmp_path, "model.norm.weight")
    weights = load_file(tmp_path / "model.safetensors")
    assert len(kept) == 3
    for added, is_said in ((2**-12, True), (0.0, False)):
        values = weights["model.norm.weight"].bfloat16().float() + added
        save_file(weights | {"model.norm.weight": values}, tmp_path / "model.safetensors")
        for dtype in (None, "bfloat16", "float32"):
            caplog.clear()
            module = CausalLM(tmp_path, dtype=dtype, streaming=streaming)
            loses = module.model.model.norm.weight.float() != values
            assert bool(loses.any()) == (is_said and dtype != "float32")
            said = f"1 tensor in the files of {tmp_path} is float32, and the configuration says bf"
            assert (said in caplog.text) == (is_said and dtype is None), caplog.text
            assert ("rounded" in caplog.text) == (is_said and dtype is None)


@pytest.mark.parametrize(("value", "is_said"), [(2.0**-30, True), (2.0**-10, False)])
def test_a_configuration_of_other_16_bits_rounds_too(value, is_said, tiny_llama, tmp_path, caplog):
    """bfloat16 holds 2⁻³⁰, float16 ends at 2⁻²⁴."""
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.bfloat16)
    for parameter in model.parameters():
        parameter.data.fill_(value)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))
    loaded = CausalLM(tmp_path).model
    assert bool((loaded.model.norm.weight == 0).all()) == is_said
    assert ("are bfloat16, and the configuration says float16" in caplog.text) == is_said


def test_pickled_float32_weights_are_rounded_only_with_a_word(tiny_llama, tmp_path, caplog):
    shutil.copytree(tiny_llama, tmp_path / "source")
    directory = tmp_path / "source"
    weights = load_file(directory / "model.safetensors")
    torch.save({name: x.float() for name, x in weights.items()}, directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))
    assert CausalLM(directory).model.dtype == torch.float16
    assert f"{len(weights)} tensors in the files of {directory} are float32" in caplog.text
    save_pretrained(CausalLM(directory, dtype="float32").model, directory / "again")
    for name, tensor in load_file(directory / "again" / "model.safetensors").items():
        assert torch.equal(tensor, weights[name].float()), name
