"""Families whose layers vLLM reads in ways of their own; random models in float32."""

import pytest
from served import engine, noise, random_model, removed, scores, two_of_four

pytest.importorskip("vllm", reason="needs vLLM: `make vllm`")

_SIZES = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
_LLAMA = _SIZES | {"num_key_value_heads": 2, "intermediate_size": 192}
_LLAMA |= {"max_position_embeddings": 256}
FAMILIES = {
    "gpt2": {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "phi3": _LLAMA,
    "qwen2": _LLAMA | {"tie_word_embeddings": True},
    "gpt_neox": _SIZES | {"intermediate_size": 192, "max_position_embeddings": 256},
    "bloom": {"hidden_size": 128, "n_layer": 2, "n_head": 4},
    "falcon": _SIZES | {"new_decoder_architecture": False, "multi_query": True, "alibi": False},
}
PRUNINGS = {"bitmask": removed, "packed": two_of_four}


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("gpt2", "bitmask"),  # Conv1D, which vLLM transposes
        ("gpt2", "packed"),
        ("phi3", "bitmask"),  # q, k and v are one tensor in the files
        ("phi3", "packed"),
        ("qwen2", "bitmask"),  # biases, tied embeddings
        ("gpt_neox", "bitmask"),  # by transformers' class in vLLM, which has none
    ],
)
def test_a_packed_model_is_the_pruned_one(kind, form, root, packed):
    source = random_model(root / f"{kind}-{form}", kind, PRUNINGS[form], FAMILIES[kind])
    directory = packed(source, form)
    dense = scores(engine(source, dtype="float32"), noise())
    sparse = scores(engine(directory, dtype="float32"), noise())
    assert (sparse.log_probs - dense.log_probs).abs().max() < 1e-3
    assert dense.log_probs.std() > 0.1  # the weights decide something


@pytest.mark.parametrize("kind", ["bloom", "falcon"])
def test_rows_that_vllm_rearranges_are_refused(kind, root, packed):
    source = random_model(root / kind, kind, removed, FAMILIES[kind])
    with pytest.raises(ValueError, match=r"not as in the file|cannot read packed layers"):
        engine(packed(source, "bitmask"), dtype="float32")
