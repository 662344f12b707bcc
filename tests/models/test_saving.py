"""A saved model holds what the model holds."""

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mrp_lightning.files import save_directory
from mrp_lightning.models.saving import save_pretrained


def test_a_model_is_stored_in_the_dtype_of_its_source(tmp_path, tiny_llama):
    published = AutoModelForCausalLM.from_pretrained(tiny_llama)
    with save_directory(tmp_path / "bf16") as staging:
        save_pretrained(published, staging, dtype="bfloat16")
    assert published.dtype == torch.float32

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16")
    assert model.dtype == torch.bfloat16
    model.float()
    with save_directory(tmp_path / "again") as staging:
        save_pretrained(model, staging, card="# A card")
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
