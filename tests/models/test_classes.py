"""The class that a config names is the one that is pruned; others are refused with the way on."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from quiet import QUIET
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from callbacks import MRPCallback
from mrp_lightning import CausalLM, Trainer
from mrp_lightning.errors import TargetError
from mrp_lightning.models import loading
from mrp_lightning.models.classes import is_causal, reads_text_alone
from mrp_lightning.models.loading import load_config, load_text_model

SIZE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZE |= {"num_attention_heads": 4}
TEXT = {**SIZE, "model_type": "llama", "vocab_size": 64, "num_key_value_heads": 2}
IMAGE = {**SIZE, "image_size": 16, "patch_size": 8}
IDS = torch.randint(3, 60, (4, 8), generator=torch.Generator().manual_seed(0))
PIXELS = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def config(model_type, **values):
    return AutoConfig.for_model(model_type, **values)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_tied_classifier_is_no_causal_language_model(streaming, tmp_path):
    """Its file fits one, since the head is tied: only `score.weight` is left over."""
    values = {**TEXT, "tie_word_embeddings": True, "pad_token_id": 0, "num_labels": 3}
    dense = AutoModelForSequenceClassification.from_config(config(**values))
    dense.save_pretrained(tmp_path)
    with pytest.raises(TargetError, match=r"LlamaForSequenceClassification.*`mrp-lightning prune`"):
        CausalLM(tmp_path, streaming=streaming)
    loaded = load_text_model(str(tmp_path), None)
    assert torch.equal(loaded.score.weight, dense.score.weight)


@pytest.mark.parametrize(
    ("model_type", "architecture", "causal"),
    [
        ("llama", None, True),
        ("llama", "LLaMAForCausalLM", True),  # of early conversions, which transformers lacks
        ("gpt2", "GPT2LMHeadModel", True),
        ("gpt2", "GPT2ForTokenClassification", False),
        ("bert", "BertForMaskedLM", False),
        ("bert", "BertLMHeadModel", True),
        ("t5", None, False),
        ("clip", "CLIPModel", False),
    ],
)
def test_which_classes_are_causal(model_type, architecture, causal):
    named = config(model_type)
    named.architectures = None if architecture is None else [architecture]
    assert is_causal(named) is causal


def save_base(directory, base, named, **values):
    """Save a base model under a config.json that names another class; return its weights."""
    torch.manual_seed(0)
    if base in ("mpnet", "xlm-roberta"):  # their position ids begin behind that of padding
        values |= {"pad_token_id": 1}
    model = AutoModel.from_config(config(base, **{**SIZE, "vocab_size": 64, **values}))
    model.save_pretrained(directory)
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": [named]}))
    return model.state_dict()


BASES = {
    "BertForMaskedLM": ("bert", "BertModel"),
    "BertForTokenClassification": ("bert", "BertModel"),
    "XLMRobertaForSequenceClassification": ("xlm-roberta", "XLMRobertaModel"),
    "MPNetForMaskedLM": ("mpnet", "MPNetModel"),
    "Qwen3ForCausalLM": ("qwen3", "Qwen3Model"),
    "MistralForTokenClassification": ("mistral", "MistralModel"),
    "MixtralForCausalLM": ("mixtral", "MixtralModel"),
}


@pytest.mark.parametrize("named", BASES)
def test_the_files_decide_where_they_hold_no_weight_of_a_head(named, tmp_path, caplog):
    base, kind = BASES[named]
    dense = save_base(tmp_path, base, named, tie_word_embeddings=False)
    if base in ("mpnet", "mistral"):  # of pickles, too
        file = tmp_path / "model.safetensors"
        torch.save(load_file(file), tmp_path / "pytorch_model.bin")
        file.unlink()
    with pytest.raises(TargetError, match=f"is a {kind}, which predicts no next token"):
        CausalLM(tmp_path)
    model = load_text_model(str(tmp_path), None)
    assert type(model).__name__ == kind
    assert dense.keys() == model.state_dict().keys()  # the pooler of BERT, too
    assert all(torch.equal(x, model.state_dict()[name]) for name, x in dense.items())
    (line,) = [record.message for record in caplog.records if named in record.message]
    assert f"hold no weight of that head: it is loaded, pruned and saved as a {kind}." in line


@pytest.mark.parametrize("is_embedding", [False, True])
def test_a_tied_head_is_that_of_a_language_model_but_in_a_sentence_encoder(is_embedding, tmp_path):
    save_base(tmp_path, "qwen3", "Qwen3ForCausalLM", tie_word_embeddings=True)
    if is_embedding:
        (tmp_path / "modules.json").write_text("[]")
    expected = "Qwen3Model" if is_embedding else "Qwen3ForCausalLM"
    assert load_config(str(tmp_path)).architectures == [expected]


def test_a_head_that_lacks_some_weights_is_refused(tmp_path):
    weights = save_base(tmp_path, "bert", "BertForMaskedLM")
    weights["cls.predictions.bias"] = torch.zeros(64)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(TargetError, match=r"lacks weights of BertForMaskedLM.*transform\.dense"):
        load_text_model(str(tmp_path), None)


@pytest.mark.parametrize("named", ["BertModel", "BertForMaskedLM"])
def test_a_pooler_that_the_files_lack_is_none_of_the_model(named, tmp_path, caplog):
    weights = save_base(tmp_path, "bert", named)
    whole = AutoModel.from_pretrained(tmp_path)
    for name in [name for name in weights if name.startswith("pooler.")]:
        del weights[name]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    model = load_text_model(str(tmp_path), None)
    assert "hold a BertModel without its pooler" in caplog.text
    assert model.state_dict().keys() == weights.keys()
    with torch.no_grad():
        expected = whole.eval()(IDS).last_hidden_state
        assert torch.equal(model.eval()(IDS).last_hidden_state, expected)


def test_the_hub_is_asked_for_the_names_and_the_modules_of_a_model(tmp_path, monkeypatch):
    """Before its weights are downloaded, which happens as they are loaded."""
    snapshot = tmp_path / "models--some--one" / "snapshots" / "abc"
    weights = save_base(snapshot, "bert", "BertForMaskedLM")
    (snapshot / "model.safetensors").unlink()
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    (snapshot / "modules.json").write_text('[{"path": ""}, {"path": "1_Pooling"}]')
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(loading, "why_no_hub", lambda: None)
    monkeypatch.setattr(loading, "cached_file", lambda _, file, **__: str(snapshot / file))
    names = SimpleNamespace(weight_map=dict.fromkeys(weights, "model.safetensors"))
    monkeypatch.setattr(loading, "get_safetensors_metadata", lambda *_, **__: names)
    asked = []
    monkeypatch.setattr(loading, "snapshot_download", lambda *_, **given: asked.append(given))
    assert load_config("some/one").architectures == ["BertModel"]
    (given,) = asked
    wanted = ["1_Pooling/config.json", "config_sentence_transformers.json"]
    assert all(any(Path(f).match(p) for p in given["allow_patterns"]) for f in wanted)
    assert not any(Path("model.safetensors").match(p) for p in given["allow_patterns"])


OTHERS = {
    "llava": (
        config(
            "llava",
            text_config={**TEXT, "vocab_size": 70},
            vision_config={**IMAGE, "model_type": "clip_vision_model", "projection_dim": 32},
            image_token_index=65,
        ),
        "LlavaForConditionalGeneration",
        {"input_ids": torch.cat([torch.full((4, 4), 65), IDS], 1), "pixel_values": PIXELS},
    ),
    "t5": (
        config("t5", vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4),
        "T5ForConditionalGeneration",
        {"input_ids": IDS, "decoder_input_ids": IDS},
    ),
    "clip": (
        config(
            "clip",
            text_config={**SIZE, "vocab_size": 64, "eos_token_id": 2},
            vision_config=IMAGE,
            projection_dim=16,
        ),
        "CLIPModel",
        {"input_ids": IDS, "pixel_values": PIXELS},
    ),
    "vit": (config("vit", **IMAGE), "ViTModel", {"pixel_values": PIXELS}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_of_other_inputs_is_refused_with_the_call_that_prunes_it(name, tmp_path):
    values, kind, inputs = OTHERS[name]
    torch.manual_seed(0)
    dense = getattr(transformers, kind)(values)
    dense.save_pretrained(tmp_path)
    assert not reads_text_alone(dense)
    for load in (CausalLM, lambda path: load_text_model(str(path), None)):
        with pytest.raises(TargetError, match=f"is a {kind}, which reads") as refused:
            load(tmp_path)
    loaded = eval(str(refused.value).split("`model = ")[1].split("`")[0], vars(transformers))
    rows = [dict(zip(inputs, row, strict=True)) for row in zip(*inputs.values(), strict=True)]
    prune = MRPCallback(pattern="2:4", save_dir=tmp_path / "pruned", skip_indivisible=True)
    Trainer(**QUIET).predict(loaded, DataLoader(rows, batch_size=2), callbacks=[prune])
    saved = getattr(transformers, kind).from_pretrained(tmp_path / "pruned")
    done = {row.name for row in prune.report.layers if row.skipped is None}
    assert len(done) >= 2 * 6
    for layer in done:
        weight = saved.get_submodule(layer).weight
        assert ((weight.reshape(-1, 4) == 0).sum(1) == 2).all(), layer
