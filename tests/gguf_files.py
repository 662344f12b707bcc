"""Write a LLaMA as llama.cpp's converter does, by its own package `gguf`, and one of few words."""

import json
from pathlib import Path

import gguf
import torch
from gguf.quants import dequantize
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from mrp_lightning.embedded import STDLIB_LLAMA

WORDS = 320
"""The size of the small vocabulary: readers of GGUF files take milliseconds a word."""


def save_small_tokenizer(directory: Path) -> None:
    """Save the embedded model's tokenizer with its first words alone."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        content = json.loads((STDLIB_LLAMA / name).read_text())
        if "model" in content:
            model = content["model"]
            alone = len(model["vocab"]) - len(model["merges"])  # are merged of no others
            model["vocab"] = {word: i for word, i in model["vocab"].items() if i < WORDS}
            model["merges"] = model["merges"][: WORDS - alone]
        (directory / name).write_text(json.dumps(content))


def save_small(directory: Path, dtype: torch.dtype = torch.float32, **config: int) -> None:
    """Save a random LLaMA of two blocks with the small vocabulary."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    tokens = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    options = {"tie_word_embeddings": True} | sizes | tokens | config
    LlamaForCausalLM(LlamaConfig(**options)).to(dtype).save_pretrained(directory)
    save_small_tokenizer(directory)


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


def tensors_of(file: Path) -> dict[str, gguf.ReaderTensor]:
    """The tensors of a file, as it holds them."""
    return {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}


def values_of(tensor: gguf.ReaderTensor) -> Tensor:
    """The numbers that a tensor of a file stands for, float32."""
    return torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())


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
