"""Every field of a configuration is known to the GGUF converter, or the checkpoint is refused."""

import json
from dataclasses import dataclass, fields

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

pytest.importorskip("gguf", reason="needs the extra `gguf`")

from export.gguf.families import FAMILIES
from export.to_gguf import main

from .conftest import refusal

SMALL = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
LOCAL = {"rope_type": "default", "rope_theta": 5e3}
WHOLE = {"rope_type": "default", "rope_theta": 1e6}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}


def problems(kind, **config):
    """Return the problems of a configuration that is sound but for these fields."""
    scale = {"query_pre_attn_scalar": 256} if kind in ("gemma2", "gemma3_text") else {}
    built = AutoConfig.for_model(kind, **SMALL | scale | config)
    return list(FAMILIES[kind].fields.problems(built))


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_field_of_the_configuration_class_is_known(kind):
    known = FAMILIES[kind].fields.known
    assert {field.name for field in fields(AutoConfig.for_model(kind))} <= known
    assert problems(kind) == []


def test_every_name_is_a_field_of_some_class():
    """A misspelt name would hide the field that it was meant for."""
    names = {field.name for kind in FAMILIES for field in fields(AutoConfig.for_model(kind))}
    known = frozenset().union(*(family.fields.known for family in FAMILIES.values()))
    assert known - names == {"auto_map", "per_layer_config"}  # which no class declares


def test_a_field_of_a_newer_transformers_is_refused():
    @dataclass(kw_only=True, repr=False)
    class Newer(LlamaConfig):
        logit_scale: float = 0.5

    (problem,) = FAMILIES["llama"].fields.problems(Newer(**SMALL))
    assert problem == "`logit_scale` 0.5 is not known here"


REFUSED = [
    ("llama", {"hidden_act": "relu"}, "`hidden_act` is 'relu'"),
    ("llama", {"rope_parameters": PLAIN | {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
    (
        "llama",
        {"rope_parameters": LLAMA3 | {"attention_factor": 1.5}},
        "`rope_parameters` have {'attention_factor': 1.5}",
    ),
    ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "`architectures` names Lla"),
    ("llama", {"auto_map": {"AutoModelForCausalLM": "own.Own"}}, "`auto_map` gives code"),
    ("llama", {"per_layer_config": {0: {"intermediate_size": 32}}}, "`per_layer_config`"),
    ("mistral", {"hidden_act": "gelu"}, "`hidden_act` is 'gelu'"),
    ("qwen2", {"head_dim": 32}, "`head_dim` is 32, and llama.cpp computes with hidden_size / he"),
    ("qwen2", {"rope_parameters": LLAMA3}, "`rope_type` 'llama3'"),
    ("qwen2", {"layer_types": ["chunked_attention"] * 2}, "`layer_types` names chunked_attention"),
    ("qwen3", {"attention_bias": True}, "`attention_bias` is True"),
    ("gemma", {"attention_bias": True}, "`attention_bias` is True"),
    ("gemma", {"use_bidirectional_attention": True}, "`use_bidirectional_attention` is True"),
    ("gemma2", {"hidden_activation": "relu"}, "`hidden_activation` is 'relu'"),
    ("gemma2", {"final_logit_softcapping": None}, "`final_logit_softcapping` is null"),
    ("gemma2", {"layer_types": ["full_attention"] * 2}, "`layer_types` are 2 × full_attention"),
    ("gemma2", {"query_pre_attn_scalar": 16}, "`query_pre_attn_scalar` is 16, and llama.cpp"),
    ("gemma2", {"num_hidden_layers": 46}, "`query_pre_attn_scalar` is 256, and llama.cpp computes"),
    ("gemma3_text", {"final_logit_softcapping": 30.0}, "`final_logit_softcapping` is 30.0"),
    ("gemma3_text", {"layer_types": ["full_attention"] * 2}, "`layer_types` are 2 × full_att"),
    (
        "gemma3_text",
        {"rope_parameters": {"full_attention": WHOLE, "sliding_attention": LOCAL}},
        "`rope_parameters` of local attention",
    ),
]


@pytest.mark.parametrize(("kind", "config", "message"), REFUSED, ids=str)
def test_a_value_that_a_file_cannot_hold_is_named(kind, config, message):
    (problem,) = problems(kind, **config)
    assert message in problem


HELD = [
    ("llama", {"attention_bias": True, "mlp_bias": True, "hidden_act": "swish"}),
    ("llama", {"auto_map": {"AutoTokenizer": ["own.Own", None]}}),
    ("llama", {"architectures": ["LLaMAForCausalLM"]}),  # as early checkpoints write it
    ("mistral", {"rope_parameters": LLAMA3}),
    ("gemma", {"hidden_act": "gelu"}),  # which transformers reads as the approximation
    ("gemma2", {"num_hidden_layers": 46, "query_pre_attn_scalar": 16}),  # as the 27B model
]


@pytest.mark.parametrize(("kind", "config"), HELD, ids=str)
def test_a_value_that_a_file_holds_is_no_problem(kind, config):
    assert problems(kind, **config) == []


WINDOWS = [
    ("mistral", {"sliding_window": 16}, True),
    ("mistral", {"sliding_window": 128}, False),
    ("mistral", {"sliding_window": None}, False),
    ("qwen2", {"sliding_window": 16}, False),  # without `use_sliding_window`
    ("qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1}, True),
    ("qwen3", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2}, False),
]


@pytest.mark.parametrize(("kind", "config", "warns"), WINDOWS, ids=str)
def test_a_window_that_texts_may_exceed_is_warned_of(kind, config, warns):
    assert problems(kind, **config) == []
    notes = FAMILIES[kind].fields.warnings(AutoConfig.for_model(kind, **SMALL | config))
    assert len(notes) == warns
    assert all("`sliding_window` is 16" in note for note in notes)


def test_all_problems_are_listed_before_weights_are_read(tmp_path, capsys):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SMALL))
    model.save_pretrained(tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    changes = {"hidden_act": "relu", "auto_map": {"AutoModel": "own.Own"}}
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    (tmp_path / "model" / "model.safetensors").write_bytes(b"\x08" + bytes(7) + b"{}      ")
    args = [tmp_path / "model", "--out", tmp_path / "out.gguf"]
    error = refusal(args, capsys, command=main)
    assert "llama.cpp would compute another function" in error
    assert "`hidden_act` is 'relu'" in error
    assert "`auto_map` gives code of the checkpoint for AutoModel" in error
    assert not (tmp_path / "out.gguf").exists()
