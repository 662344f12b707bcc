from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GATED = {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2}
SEQ2SEQ = {"vocab_size": 64, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
CONFIGS = {
    "llama": GATED,
    "gemma3_text": {
        **GATED,
        "head_dim": 8,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "opt": {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32, "pad_token_id": 1},
    "bloom": {"vocab_size": 64, "hidden_size": 32, "n_layer": 3, "n_head": 4},
    "gpt2": {"vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64},
    "mamba": {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "state_size": 8,
        "time_step_rank": 4,
        "pad_token_id": 0,
    },
    "qwen3_moe": {
        **GATED,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "bart": {
        **SEQ2SEQ,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "max_position_embeddings": 64,
    },
    "t5": {**SEQ2SEQ, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
}


@pytest.fixture
def build() -> Callable[[str], nn.Module]:
    """A tiny random model of a family, the same one on every call."""

    def build(family: str) -> nn.Module:
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **CONFIGS[family])
        auto = AutoModelForSeq2SeqLM if family in ("bart", "t5") else AutoModelForCausalLM
        model = auto.from_config(config).eval()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():  # norms and biases that do something
            for name, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                if "A_log" in name:
                    parameter.copy_(noise.abs())
                elif parameter.ndim >= 2:
                    parameter.copy_(0.2 * noise)
                else:
                    parameter.add_(0.05 * noise)
        return model

    return build


@pytest.fixture
def batches() -> list[dict[str, Tensor]]:
    """Batches of several lengths: padded on the left, on the right, and not at all."""
    generator = torch.Generator().manual_seed(2)
    made = []
    for length in (12, 9, 16):
        ids = torch.randint(3, 64, (2, length), generator=generator)
        made.append({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    made[0]["attention_mask"][0, :5] = 0
    made[1]["attention_mask"][1, 6:] = 0
    return made
