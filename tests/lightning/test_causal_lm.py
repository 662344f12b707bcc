"""Perplexity is the model's own, models come from everywhere, checkpoints can be rebuilt."""

import math

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

from mrp_lightning import CausalLM, Trainer

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


def padded_batches(batch_size: int) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for length in (12, 5, 9, 12, 2, 7):
        ids = torch.randint(1, 2048, (12,), generator=generator)
        rows.append({"input_ids": ids, "attention_mask": (torch.arange(12) < length).long()})
    return DataLoader(rows, batch_size)


def reference_perplexity(model, loader) -> float:
    """Token by token, from the model's own logits in float64, each row without its padding."""
    total, count = 0.0, 0
    for batch in loader:
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
            ids = ids[: int(mask.sum())]
            with torch.no_grad():
                logits = model(ids[None]).logits[0].double()
            for position in range(len(ids) - 1):
                total -= logits[position].log_softmax(-1)[ids[position + 1]].item()
                count += 1
    return math.exp(total / count)


@pytest.mark.parametrize("batch_size", [1, 2, 6])
@pytest.mark.parametrize("loop", ["test", "validate"])
def test_perplexity_is_that_of_the_models_own_logits(tiny_llama, batch_size, loop):
    lm = CausalLM(tiny_llama)
    loader = padded_batches(batch_size)
    (logged,) = getattr(Trainer(**QUIET), loop)(lm, loader, verbose=False)
    expected = reference_perplexity(lm.model.eval(), loader)
    assert logged["perplexity"] == pytest.approx(expected, rel=1e-5)
    assert logged["loss"] == pytest.approx(math.log(expected), rel=1e-5)


def test_every_kind_of_batch_gives_the_same_logits(tiny_llama):
    lm = CausalLM(str(tiny_llama)).eval()
    ids = torch.randint(1, 2048, (2, 6))
    expected = lm.model(ids).logits
    for batch in (ids, (ids, "label"), [ids], {"input_ids": ids}):
        assert torch.equal(lm.predict_step(batch, 0), expected)
    for batch, got in (({"ids": ids}, "NoneType"), (ids.float(), r"torch.float32 \(2, 6\)")):
        with pytest.raises(TypeError, match=f"A batch must be .* Got .* {got}"):
            lm.predict_step(batch, 0)


def test_models_come_from_paths_configurations_and_objects(tiny_llama):
    from_path = CausalLM(tiny_llama)
    assert from_path.tokenizer.vocab_size == 2048
    config = AutoConfig.from_pretrained(tiny_llama)
    hf = AutoModelForCausalLM.from_pretrained(tiny_llama)
    assert CausalLM(hf).model is hf
    assert CausalLM(config).model.num_parameters() == hf.num_parameters()
    new = CausalLM({"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 9})
    assert new.tokenizer is None
    assert new.model.config.model_type == "gpt2"
    assert CausalLM(tiny_llama, dtype="bfloat16").model.dtype == torch.bfloat16
    assert CausalLM(tiny_llama, dtype="bfloat16").model.config.dtype == torch.float32


def test_models_that_cannot_be_had(tiny_llama, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"`model`: there is no directory \./absent"):
        CausalLM("./absent")
    with pytest.raises(FileNotFoundError, match=r"holds no config.json"):
        CausalLM(tmp_path)
    with pytest.raises(FileNotFoundError, match="neither a complete local model directory nor"):
        CausalLM("someone/something")
    (tmp_path / "config.json").write_text((tiny_llama / "config.json").read_text())
    with pytest.raises(FileNotFoundError, match="neither a complete local model directory nor"):
        CausalLM(tmp_path)
    with pytest.raises(TypeError, match="Got Linear; another module needs its own LightningModule"):
        CausalLM(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"needs `model_type`.*\['hidden_size'\]"):
        CausalLM({"hidden_size": 8})
    with pytest.raises(ValueError, match="`dtype` must be a floating type .* Got 'int8'"):
        CausalLM(tiny_llama, dtype="int8")
    with pytest.raises(FileNotFoundError, match="`tokenizer`: ./absent gives no tokenizer"):
        CausalLM(tiny_llama, tokenizer="./absent")


def test_a_checkpoint_that_lacks_weights_is_refused(tiny_llama, tmp_path):
    from safetensors.torch import load_file, save_file

    state = load_file(tiny_llama / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((tiny_llama / "config.json").read_text())
    with pytest.raises(ValueError, match=r"lacks weights .*model.layers.1.mlp.up_proj.weight"):
        CausalLM(tmp_path)


def test_fit_learns_and_its_checkpoint_can_be_rebuilt(tiny_llama, tmp_path):
    text = torch.arange(1, 33).repeat(4, 1)
    lm = CausalLM(tiny_llama, learning_rate=1e-2, warmup_steps=2)
    trainer = Trainer(**QUIET, max_epochs=30)
    before = Trainer(**QUIET).test(lm, DataLoader(text, 4), verbose=False)[0]["loss"]
    trainer.fit(lm, DataLoader(text, 4))
    after = Trainer(**QUIET).test(lm, DataLoader(text, 4), verbose=False)[0]["loss"]
    assert after < before / 2

    trainer.save_checkpoint(tmp_path / "lm.ckpt")
    hyper_parameters = torch.load(tmp_path / "lm.ckpt", weights_only=True)["hyper_parameters"]
    assert "trust_remote_code" not in hyper_parameters
    rebuilt = CausalLM.load_from_checkpoint(tmp_path / "lm.ckpt")
    assert rebuilt.tokenizer is not None
    assert rebuilt.learning_rate == 1e-2
    for name, tensor in lm.model.state_dict().items():
        assert torch.equal(tensor, rebuilt.model.state_dict()[name]), name
