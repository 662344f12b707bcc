"""Decoding by llama.cpp: models of a LLaMA's shape with random weights, and the time of a token."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

LONG, SHORT = 48, 16
"""Tokens of two runs: the difference leaves loading out."""


def seconds_a_token(file: Path, binaries: Path) -> float:
    """Seconds of CPU a token of llama.cpp. A first run reads the file, which may be on the disk."""
    spent = []
    for tokens in (1, SHORT, LONG):
        arguments = ["-m", file, "-p", 0, "-n", tokens, "-r", 1, "-t", 1, "-o", "json"]
        command = [str(part) for part in (binaries / "llama-bench", *arguments)]
        ended = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        _, status, used = os.wait4(ended.pid, 0)
        if status:
            raise SystemExit(f"{' '.join(command)} failed: {ended.stderr.read().decode()[-300:]}")
        spent.append(used.ru_utime + used.ru_stime)
    return (spent[2] - spent[1]) / (LONG - SHORT)


def files_of(
    settings: Mapping[str, Any], place: Path, binaries: Path, types: Sequence[str]
) -> dict[str, Path]:
    """Return a model of a shape as llama.cpp reads it, in bfloat16 and in each of its types."""
    whole = place / "BF16.gguf"
    write_gguf(settings, whole)
    files = {"BF16": whole}
    for kind in types:
        if kind != "BF16":
            files[kind] = place / f"{kind}.gguf"
            command = [binaries / "llama-quantize", whole, files[kind], kind, "1"]
            subprocess.run(list(map(str, command)), check=True, capture_output=True)
    return files


def write_gguf(settings: Mapping[str, Any], file: Path) -> None:
    """Random weights of a LLaMA's shape, in bfloat16."""
    import gguf

    hidden, heads = settings["hidden_size"], settings["num_attention_heads"]
    keys = hidden // heads * settings["num_key_value_heads"]
    wide, words = settings["intermediate_size"], settings["vocab_size"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(2048)
    writer.add_embedding_length(hidden)
    writer.add_block_count(settings["num_hidden_layers"])
    writer.add_feed_forward_length(wide)
    writer.add_head_count(heads)
    writer.add_head_count_kv(settings["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(words)
    writer.add_tokenizer_model("no_vocab")

    def add(tensor: str, *shape: int) -> None:
        values = (torch.randn(shape) * 0.02).bfloat16().view(torch.uint16).numpy().view("uint8")
        writer.add_tensor(f"{tensor}.weight", values, raw_dtype=gguf.GGMLQuantizationType.BF16)

    def norm(tensor: str) -> None:
        writer.add_tensor(f"{tensor}.weight", torch.ones(hidden).numpy())

    add("token_embd", words, hidden)
    norm("output_norm")
    if not settings.get("tie_word_embeddings"):
        add("output", words, hidden)
    shapes = {"attn_q": (hidden, hidden), "attn_k": (keys, hidden), "attn_v": (keys, hidden)}
    shapes |= {"attn_output": (hidden, hidden), "ffn_gate": (wide, hidden)}
    shapes |= {"ffn_up": (wide, hidden), "ffn_down": (hidden, wide)}
    for block in range(settings["num_hidden_layers"]):
        for tensor, shape in shapes.items():
            add(f"blk.{block}.{tensor}", *shape)
        norm(f"blk.{block}.attn_norm")
        norm(f"blk.{block}.ffn_norm")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
