"""Write a LLaMA as llama.cpp's converter does, by its own package `gguf`."""

import json
from pathlib import Path

import gguf
from torch import Tensor
from transformers import AutoModelForCausalLM

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "blk",
}


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Rows as llama.cpp rotates them: the halves of each head in turn."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def write(
    path: Path, directory: Path, *, architecture: str = "llama", with_tokenizer: bool = True
) -> None:
    """What llama.cpp's converter makes of a LLaMA."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if with_tokenizer:
        content = json.loads((directory / "tokenizer.json").read_text())["model"]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(list(content["vocab"]))
        writer.add_token_types([3] + [1] * (len(content["vocab"]) - 1))
        writer.add_token_merges([" ".join(pair) for pair in content["merges"]])
        for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id):
            add(0)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, parameter in model.named_parameters():
        weight = parameter.detach()
        for projection, number in heads.items():
            if projection in name:
                weight = interleaved(weight, number)
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        writer.add_tensor(name, weight.contiguous().float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
