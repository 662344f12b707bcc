"""llama.cpp computes what transformers computes, with a file of each family that is written here.

Needs the package xllamacpp, llama.cpp as a Python module. Its log-probabilities come from float16
tables of exponentials and activations, so that they differ in the third decimal.
"""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

pytest.importorskip("xllamacpp", reason="needs the package xllamacpp: llama.cpp itself")
pytest.importorskip("gguf", reason="needs the extra `gguf`")

import xllamacpp

from export.conversion.gguf_families import FAMILIES
from export.to_gguf import main
from mrp_lightning.embedded import STDLIB_LLAMA

SIZES = {"vocab_size": 2048, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
GEMMA = {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 16}
CAPS = {"final_logit_softcapping": 5.0, "attn_logit_softcapping": 3.0}
LOCAL = {"rope_type": "default", "rope_theta": 1e4}
MODELS = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"rope_parameters": LLAMA3}),
    ("llama", {"rope_parameters": LINEAR, "head_dim": 32}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("mistral", {"head_dim": 32, "sliding_window": None}),
    ("mistral", {"rope_parameters": LLAMA3, "sliding_window": 128}),
    ("qwen2", {}),
    ("qwen2", {"rope_parameters": LINEAR}),
    ("qwen3", {"head_dim": 32}),
    ("gemma", {"head_dim": 32, "tie_word_embeddings": True}),
    ("gemma2", GEMMA | CAPS),
    ("gemma2", {"sliding_window": 16, "head_dim": 32, "query_pre_attn_scalar": 32} | CAPS),
    ("gemma2", {"num_hidden_layers": 46, "head_dim": 32, "query_pre_attn_scalar": 16}),
    ("gemma3_text", GEMMA | {"num_hidden_layers": 7}),
    ("gemma3_text", GEMMA | {"num_hidden_layers": 7, "tie_word_embeddings": False}),
    (
        "gemma3_text",
        GEMMA
        | {"num_hidden_layers": 7}
        | {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": LOCAL}},
    ),
]
CHANGED = [
    ("llama", {"hidden_act": "relu"}),
    ("mistral", {"sliding_window": 16}),
    ("qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1}),
    ("gemma2", GEMMA | {"layer_types": ["full_attention"] * 2}),
    ("gemma3_text", GEMMA | CAPS | {"attn_logit_softcapping": None}),
]
IDS = list(range(3, 43))


def build(kind, config, directory):
    """Write a random model whose tokens differ by several nats, and return it."""
    torch.manual_seed(0)
    built = AutoConfig.for_model(kind, **SIZES | config)
    model = AutoModelForCausalLM.from_config(built).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            else:
                parameter.mul_(4)
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(STDLIB_LLAMA).save_pretrained(directory)
    return model


def log_probabilities(file):
    """Return llama.cpp's log-probabilities of the token after IDS, (vocabulary)."""
    options = xllamacpp.CommonParams()
    options.model.path, options.n_ctx, options.warmup = str(file), 128, False
    options.cpuparams.n_threads, options.verbosity = 1, 0
    request = {"prompt": IDS, "n_predict": 1, "temperature": 0.0, "cache_prompt": False}
    # Without the bias, a part of a character may follow, of which the server returns no numbers.
    request |= {"n_probs": 2048, "post_sampling_probs": False, "logit_bias": [[60, 1000.0]]}
    answer = xllamacpp.Server(options).handle_completions(request)
    values = torch.full((2048,), float("nan"))
    for token in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
        values[token["id"]] = token["logprob"]
    return values


def distance(model, file):
    """Return the largest difference of a log-probability between llama.cpp and transformers."""
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0, -1].log_softmax(-1)
    assert expected.std() > 0.3
    return float((log_probabilities(file) - expected).abs().max())


def test_every_family_is_run():
    assert {kind for kind, _ in MODELS} == FAMILIES.keys()


@pytest.mark.parametrize(("kind", "config"), MODELS, ids=str)
def test_llamacpp_computes_the_same(kind, config, tmp_path):
    model = build(kind, config, tmp_path / "model")
    main([str(tmp_path / "model"), "--type", "f32", "--out", str(tmp_path / "out.gguf")])
    assert distance(model, tmp_path / "out.gguf") < 0.02


@pytest.mark.parametrize(("kind", "config"), CHANGED, ids=str)
def test_what_is_refused_or_warned_of_would_compute_another_function(
    kind, config, tmp_path, monkeypatch
):
    model = build(kind, config, tmp_path / "model")
    monkeypatch.setattr(type(FAMILIES[kind].fields), "problems", lambda *_: iter(()))
    main([str(tmp_path / "model"), "--type", "f32", "--out", str(tmp_path / "out.gguf")])
    assert distance(model, tmp_path / "out.gguf") > 0.05


@pytest.mark.parametrize("with_file", [False, True])
def test_a_head_under_a_flag_that_ties_it(with_file, tmp_path):
    model = build("llama", {"tie_word_embeddings": True}, tmp_path / "model")
    like, out = tmp_path / "like.gguf", tmp_path / "out.gguf"
    main([str(tmp_path / "model"), "--out", str(like)])
    table = model.get_input_embeddings().weight
    model.lm_head.weight = torch.nn.Parameter(-0.5 * table.detach())
    model.config.tie_word_embeddings = False
    model.save_pretrained(tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace('embeddings": false', 'embeddings": true'))
    options = ["--like", str(like)] if with_file else []
    main([str(tmp_path / "model"), "--type", "f32", "--out", str(out), *options])
    assert distance(model, out) < 0.02
