"""The files of one model that the contestants of `serving.py` read, each written once."""

import ctypes
import functools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mrp_sparse.formats.bitmask import BITMASK
from mrp_sparse.formats.bitmask4 import BITMASK4
from mrp_sparse.formats.eight_bit import EIGHT_BIT
from mrp_sparse.formats.packed_format import PackedFormat

sys.path.insert(0, str(Path(__file__).parents[1]))

_HEAD = {"module": "lm_head", "format_version": EIGHT_BIT.version}
PACKED: dict[str, tuple[PackedFormat, dict[str, Any]]] = {
    "bitmask": (BITMASK, {}),
    "bitmask4": (BITMASK4, {}),
    "integers": (BITMASK4, {"activations": "int8"}),
    "head": (BITMASK4, {"activations": "int8", "head": _HEAD}),
}
"""The format of sparse weights, and further keys of its `quantization_config`."""
FILE_TYPES = {"q8_0": 7, "q4_0": 2, "q3_k": 12}
"""llama.cpp's numbers of the types that it quantises to."""
GROUP, VOCABULARY = 64, 4096
INT4 = {"num_bits": 4, "strategy": "group", "group_size": GROUP}
INT8 = {"num_bits": 8, "strategy": "channel"}
TOKENS = {"num_bits": 8, "strategy": "token", "dynamic": True}
"""Settings of compressed-tensors for weights, and for activations that are rounded as they come."""
RUNS = Path("runs/serving")


def write_all(model: str, sparse: Path | None, forms: Collection[str]) -> dict[str, Path]:
    """Write what the contestants of these forms read, unless it is there.

    Returns directories and files by form, the dense model's first.
    """
    from served import four_bits

    dense = dense_model(model)
    runs = RUNS / name_of(model)
    paths = {"dense": dense}
    if "int4" in forms:
        paths["int4"] = runs / "int4"
        write_rounded(dense, paths["int4"], int4, scheme("pack-quantized", weights=INT4))
    if "int8" in forms:
        paths["int8"] = runs / "int8"
        of_int8 = scheme("int-quantized", weights=INT8, input_activations=TOKENS)
        write_rounded(dense, paths["int8"], int8, of_int8)
    if sparse is None:
        sparse = runs / "magnitude"
        write_rounded(dense, sparse, lambda weight: {"weight": four_bits(weight)}, {})
    for form, (packed, keys) in PACKED.items():
        if form in forms:
            paths[form] = runs / f"{sparse.name}-{form}"
            config = {"quant_method": packed.quant_method, "format_version": packed.version, **keys}
            write_rounded(sparse, paths[form], functools.partial(tensors_of, packed), config)
    file = runs / "bf16.gguf"
    mrp_lightning("gguf", dense, "--type", "bf16", "--out", file)
    if "bf16" in forms:
        paths["bf16"] = file
    for form, number in FILE_TYPES.items():
        # Rows of Q3_K are multiples of 256: where they are not, llama.cpp takes other types.
        if form in forms and (form != "q3_k" or read_config(dense)["hidden_size"] % 256 == 0):
            paths[form] = runs / f"{form}.gguf"
            quantise(file, paths[form], number)
    return paths


def dense_model(model: str) -> Path:
    """Return the directory of a dense model: it is made of a size or a GGUF file, once."""
    if Path(model).is_dir():
        return Path(model)
    directory = RUNS / name_of(model) / "dense"
    if any(directory.glob("*.safetensors")):
        return directory
    if (size := re.fullmatch(r"(\d+)x(\d+)", model)) is not None:
        from mrp_lightning.embedded import STDLIB_LLAMA

        network, tokenizer = random_llama(*map(int, size.groups())), str(STDLIB_LLAMA)
    else:
        from mrp_lightning.models.loading import load_model

        network, tokenizer = load_model(model, torch.bfloat16), model
    from mrp_lightning.models.loading import load_tokenizer

    load_tokenizer(tokenizer).save_pretrained(directory)  # llama.cpp reads no file without one
    network.save_pretrained(directory)
    return directory


def random_llama(width: int, layers: int) -> Any:
    """Return a LLaMA with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 128,
        vocab_size=VOCABULARY,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).bfloat16()


def name_of(model: str) -> str:
    """Return the name of a model: of its directory or file, or its size."""
    return Path(model).name.removesuffix(".gguf")


def mrp_lightning(command: str, run: Path, *arguments: str | Path) -> None:
    """Convert a run by a command of the package, unless its output, the last one, is there."""
    if not Path(arguments[-1]).exists():
        words = [sys.executable, "-m", "mrp_lightning", command, run, *arguments]
        subprocess.run([str(word) for word in words], check=True)


def quantise(source: Path, target: Path, file_type: int) -> None:
    """Write a GGUF file in another type by llama.cpp, unless it is there."""
    import llama_cpp

    if target.exists():
        return
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = file_type
    partial = target.with_suffix(".partial")
    files = (str(path).encode() for path in (source, partial))
    if llama_cpp.llama_model_quantize(*files, ctypes.byref(options)):
        raise SystemExit(f"error: llama.cpp could not write {target}.")
    partial.rename(target)


def write_rounded(
    dense: Path,
    target: Path,
    rounded: Callable[[Tensor], Mapping[str, Tensor]],
    quantization: Mapping[str, Any],
) -> None:
    """Write a LLaMA or Qwen2 with other tensors for each linear layer, unless it is there.

    Args:
        dense: The directory of the dense model.
        target: The directory to write.
        rounded: Returns the tensors of a layer by their names within it, of its weight.
        quantization: The `quantization_config`, without `modules`; empty for a dense model.
    """
    if (target / "model.safetensors").exists():
        return
    tensors: dict[str, Tensor] = {}
    config, sizes = read_config(dense), {}
    for file in sorted(dense.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            layer, _, kind = name.rpartition(".")
            is_linear = layer.endswith("_proj") and kind == "weight"
            own = rounded(tensor) if is_linear else {kind: tensor}
            tensors |= {f"{layer}.{key}": value for key, value in own.items()}
            if is_linear:
                sizes[layer] = next(iter(own.values())).numel()
    if "head" in quantization:  # tied embeddings are read from it, too
        head = "model.embed_tokens" if config["tie_word_embeddings"] else "lm_head"
        own = tensors_of(EIGHT_BIT, tensors.pop(f"{head}.weight"))
        tensors |= {f"lm_head.{key}": value for key, value in own.items()}
    if "format_version" in quantization:
        quantization = {**quantization, "modules": sizes}
    if quantization:
        config["quantization_config"] = quantization
    shutil.copytree(
        dense, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors*")
    )
    (target / "config.json").write_text(json.dumps(config))
    save_file(tensors, target / "model.safetensors", {"format": "pt"})


def tensors_of(packed: PackedFormat, weight: Tensor) -> dict[str, Tensor]:
    """Return the tensors of a layer in a format of this package."""
    return dict(zip(packed.names, packed.pack(weight), strict=True))


def read_config(directory: Path) -> dict[str, Any]:
    """Return the content of a model's `config.json`."""
    content: dict[str, Any] = json.loads((directory / "config.json").read_text("utf-8"))
    return content


def int4(weight: Tensor) -> dict[str, Tensor]:
    """Return the tensors of compressed-tensors with 4 bits, in groups of columns."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(2, keepdim=True) / 7).clamp_min(1e-8).bfloat16()
    codes = (groups / scales.float()).round().clamp(-8, 7).long() + 8
    words = (codes.flatten(1).unflatten(1, (-1, 8)) << 4 * torch.arange(8)).sum(2)
    return {
        "weight_packed": (words - (words >> 31 << 32)).to(torch.int32),
        "weight_scale": scales[:, :, 0].contiguous(),
        "weight_shape": torch.tensor(weight.shape),
    }


def int8(weight: Tensor) -> dict[str, Tensor]:
    """Return the tensors of compressed-tensors with 8 bits and a scale for each row."""
    scales = (weight.float().abs().amax(1, keepdim=True) / 127).clamp_min(1e-8).bfloat16()
    codes = (weight.float() / scales.float()).round().clamp(-128, 127)
    return {"weight": codes.to(torch.int8), "weight_scale": scales}


def scheme(form: str, **roles: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `quantization_config` of compressed-tensors, for weights and activations."""
    common = {"type": "int", "symmetric": True, "dynamic": False}
    group = {role: common | settings for role, settings in roles.items()}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "format": form, **group}},
        "ignore": ["lm_head"],
    }
