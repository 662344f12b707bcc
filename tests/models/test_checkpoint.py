"""One limit for a model's sequences, compared with what its forward does."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mrp_lightning.models.checkpoint import longest_sequence

TINY = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
SHORT = {**TINY, "intermediate_size": 48, "max_position_embeddings": 24}
GPT = {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 24}
OPT = {**SHORT, "ffn_dim": 48, "word_embed_proj_dim": 32}
MPT = {"vocab_size": 64, "d_model": 32, "n_layers": 1, "n_heads": 4, "max_seq_len": 24}


def runs(model_type: str, values: dict, length: int) -> bool:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values)).eval()
    try:
        with torch.inference_mode():
            model(torch.full((1, length), 3), use_cache=False)
    except (IndexError, RuntimeError):
        return False
    return True


@pytest.mark.parametrize(
    ("model_type", "values"),
    [("opt", OPT), ("gpt2", GPT), ("gptj", {**GPT, "rotary_dim": 4}), ("mpt", MPT)],
)
def test_the_limit_is_the_last_length_that_runs(model_type, values):
    assert longest_sequence(AutoConfig.for_model(model_type, **values)) == 24
    assert runs(model_type, values, 24)
    assert not runs(model_type, values, 25)


@pytest.mark.parametrize(
    ("model_type", "values"),
    [
        ("bloom", {"vocab_size": 64, "hidden_size": 32, "n_layer": 1, "n_head": 4}),
        ("falcon", {**TINY, "alibi": True, "max_position_embeddings": 24}),
        ("mamba", {**TINY, "state_size": 8, "time_step_rank": 4}),
        ("mamba2", {**TINY, "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1}),
    ],
)
def test_without_positions_there_is_no_limit(model_type, values):
    assert longest_sequence(AutoConfig.for_model(model_type, **values)) is None
    assert runs(model_type, values, 300)


def test_the_length_that_a_model_was_made_for_counts_also_in_a_part_of_it():
    assert longest_sequence(AutoConfig.for_model("llama", **SHORT)) == 24
    assert longest_sequence(AutoConfig.for_model("falcon", max_position_embeddings=24)) == 24
    text = {**SHORT, "model_type": "llama"}
    assert longest_sequence(AutoConfig.for_model("llava", text_config=text)) == 24


def test_a_negative_number_is_no_limit():
    assert longest_sequence(AutoConfig.for_model("xlnet")) is None
    assert longest_sequence(AutoConfig.for_model("t5")) is None
