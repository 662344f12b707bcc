"""A tiny configuration of every model family that is tested.

Attention windows are shorter than the batches of `families.py`, so that a walk that gets them wrong
gives other numbers.
"""

from dataclasses import dataclass
from typing import Any

VOCABULARY = 64


@dataclass(frozen=True)
class Family:
    """A recipe for building a tiny model.

    Attributes:
        model_type: Of transformers.
        config: What differs from the defaults of its configuration.
        auto: The class that builds it.
    """

    model_type: str
    config: dict[str, Any]
    auto: str = "AutoModelForCausalLM"


_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SMALL = {
    **_TOKENS,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_WIDE = {**_SMALL, "intermediate_size": 48}
_GROUPED = {**_WIDE, "num_key_value_heads": 2}
_HEAD = {**_GROUPED, "head_dim": 8}
_SHORT = {**_HEAD, "sliding_window": 4}
_SLIDING, _FULL = "sliding_attention", "full_attention"
_OPT = {**_SMALL, "ffn_dim": 48, "pad_token_id": 1}
_GPT = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
_BLOOM = {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 3, "n_head": 4}
_MPT = {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 3, "n_heads": 4}
_STATES = {**_TOKENS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_TRANSLATOR = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
    "d_model": 32,
}
_BART = {
    **_TRANSLATOR,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
}
_VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
    "num_labels": 4,
}
MASKED, SEQ2SEQ = "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM"
IMAGES = "AutoModelForImageClassification"

FAMILIES: dict[str, Family] = {
    "llama": Family("llama", _GROUPED),
    "opt": Family("opt", {**_OPT, "word_embed_proj_dim": 32}),
    "opt_350m": Family("opt", {**_OPT, "word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    "bloom": Family("bloom", _BLOOM),
    "mamba": Family("mamba", {**_STATES, "time_step_rank": 4}),
    "mamba2": Family(
        "mamba2",
        {**_STATES, "num_heads": 8, "head_dim": 8, "expand": 2, "n_groups": 1, "chunk_size": 8},
    ),
    "falcon_mamba": Family("falcon_mamba", {**_STATES, "time_step_rank": 4}),
    "gpt2": Family("gpt2", _GPT),
    "gptj": Family("gptj", {**_GPT, "rotary_dim": 4}),
    "gpt_neox": Family("gpt_neox", _WIDE),
    "falcon": Family("falcon", _SMALL),
    "phi": Family("phi", _GROUPED),
    "phi3": Family("phi3", _GROUPED),
    "mistral": Family("mistral", _SHORT),
    "qwen2": Family("qwen2", _GROUPED),
    "qwen2_sliding": Family(
        "qwen2",
        {**_GROUPED, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3": Family("qwen3", _HEAD),
    "gemma": Family("gemma", _HEAD),
    "gemma2": Family("gemma2", _SHORT),
    "gemma3_text": Family("gemma3_text", {**_SHORT, "layer_types": [_SLIDING, _FULL, _SLIDING]}),
    "olmo2": Family("olmo2", _GROUPED),
    "starcoder2": Family("starcoder2", _SHORT),
    "cohere2": Family("cohere2", _SHORT),
    "granite": Family("granite", _GROUPED),
    "stablelm": Family("stablelm", _GROUPED),
    "smollm3": Family("smollm3", _GROUPED),
    "glm4": Family("glm4", _HEAD),
    "codegen": Family("codegen", {**_GPT, "rotary_dim": 4}),
    "gpt_bigcode": Family("gpt_bigcode", _GPT),
    "gpt_neo": Family(
        "gpt_neo",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
            "max_position_embeddings": 64,
        },
    ),
    "mpt": Family("mpt", _MPT),
    "mixtral": Family("mixtral", {**_GROUPED, **_LOCAL_EXPERTS}),
    "qwen2_moe": Family(
        "qwen2_moe", {**_GROUPED, **_EXPERTS, "shared_expert_intermediate_size": 16}
    ),
    "qwen3_moe": Family("qwen3_moe", {**_HEAD, **_EXPERTS}),
    "olmoe": Family("olmoe", {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": Family("gpt_oss", {**_SHORT, **_LOCAL_EXPERTS}),
    "deepseek_v3": Family(
        "deepseek_v3",
        {
            **_WIDE,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 16,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
        },
    ),
    "llama4_text": Family(
        "llama4_text",
        {
            **_HEAD,
            **_LOCAL_EXPERTS,
            "intermediate_size_mlp": 48,
            "num_hidden_layers": 4,
            "attention_chunk_size": 4,
            "moe_layers": [1, 3],
        },
    ),
    "qwen3_next": Family(
        "qwen3_next",
        {
            **_HEAD,
            **_EXPERTS,
            "num_hidden_layers": 4,
            "shared_expert_intermediate_size": 16,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
    ),
    "jamba": Family(
        "jamba",
        {
            **_GROUPED,
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "use_mamba_kernels": False,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
        },
    ),
    "falcon_h1": Family(
        "falcon_h1",
        {
            **_HEAD,
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 8,
        },
    ),
    "lfm2": Family("lfm2", {**_GROUPED, "full_attn_idxs": [1]}),
    "recurrent_gemma": Family(
        "recurrent_gemma",
        {
            **_WIDE,
            "lru_width": 32,
            "attention_window_size": 4,
            "block_types": ["recurrent", "recurrent", "attention"],
        },
    ),
    "rwkv": Family(
        "rwkv",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "attention_hidden_size": 32,
            "intermediate_size": 48,
        },
    ),
    "gemma4_text": Family(
        "gemma4_text",
        {
            **_SHORT,
            "num_hidden_layers": 4,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 2,
            "global_head_dim": 8,
            "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL],
        },
    ),
    "gemma3n_text": Family(
        "gemma3n_text",
        {
            **_SHORT,
            "num_hidden_layers": 4,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 2,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.0] * 4,
            "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL],
        },
    ),
    "bert": Family("bert", _WIDE, MASKED),
    "roberta": Family("roberta", {**_WIDE, "pad_token_id": 1}, MASKED),
    "distilbert": Family(
        "distilbert",
        {
            "vocab_size": VOCABULARY,
            "dim": 32,
            "n_layers": 3,
            "n_heads": 4,
            "hidden_dim": 48,
            "max_position_embeddings": 64,
        },
        MASKED,
    ),
    "modernbert": Family(
        "modernbert", {**_WIDE, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 4}, MASKED
    ),
    "electra": Family("electra", {**_WIDE, "embedding_size": 32}, MASKED),
    "deberta_v2": Family(
        "deberta-v2",
        {
            **_WIDE,
            "relative_attention": True,
            "position_buckets": 8,
            "pos_att_type": ["c2p", "p2c"],
        },
        MASKED,
    ),
    "vit": Family("vit", {**_VISION, "intermediate_size": 48}, IMAGES),
    "dinov2": Family("dinov2", {**_VISION, "mlp_ratio": 2}, IMAGES),
    "swin": Family(
        "swin",
        {
            "image_size": 16,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 2],
            "window_size": 4,
            "num_labels": 4,
        },
        IMAGES,
    ),
    "convnext": Family(
        "convnext",
        {
            "hidden_sizes": [16, 32],
            "depths": [2, 2],
            "num_stages": 2,
            "patch_size": 2,
            "num_labels": 4,
        },
        IMAGES,
    ),
    "bart": Family("bart", _BART, SEQ2SEQ),
    "pegasus": Family("pegasus", _BART, SEQ2SEQ),
    "t5": Family(
        "t5", {**_TRANSLATOR, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}, SEQ2SEQ
    ),
}
