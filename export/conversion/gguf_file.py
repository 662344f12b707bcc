"""A pruned checkpoint as a GGUF file, by another GGUF file of the same model.

That file gives what a checkpoint does not say in llama.cpp's way: the metadata, the tokenizer, and
how each tensor lies. The last is found out by comparison: a tensor of the file is what transformers
reads from it, as it is or rearranged in one of a few ways.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize
from torch import Tensor
from transformers import PreTrainedConfig

from export.conversion.checkpoint import Checkpoint
from export.conversion.gguf_types import AUTO, TYPES, encode
from mrp_lightning.errors import FormatError, OptionError
from mrp_lightning.files import flush
from mrp_lightning.models.gguf import gguf_config, gguf_model, reading
from mrp_lightning.upstream.other_names import bounded_gguf

_VOCABULARY = ("token_embd.weight", "output.weight")
_OF_A_HEAD = ("attention.key_length", "attention.value_length", "rope.dimension_count")
"""Metadata whose defaults are computed from the number of heads."""
_OWN = ("general.architecture", "general.file_type", "general.quantization_version")

Arrangement = Callable[[Tensor, int], Tensor]
"""How a parameter (as transformers has it) lies in a GGUF file; the number is that of its heads."""


@dataclass(frozen=True)
class Written:
    """What was written to a file.

    Attributes:
        num_bytes: The bytes of all tensors.
        types: The number of tensors of each type.
        rounded: The relative error of each tensor that its type does not hold to the bit, by name.
    """

    num_bytes: int
    types: Mapping[str, int]
    rounded: Mapping[str, float]


def write_gguf(
    checkpoint: Checkpoint, like: Path, out: Path, kind: str, vocabulary: str | None = None
) -> Written:
    """Write the weights of a checkpoint with metadata and tokenizer of a GGUF file.

    Matrices are stored in the given type, to the bit where it holds them, and norms and biases in
    float32. What is zero in the checkpoint is zero in the file.

    Args:
        checkpoint: A dense Hugging Face checkpoint; it may be narrower than the file's model.
        like: The GGUF file that the model came from, or another of the same model.
        out: The file to write.
        kind: A name in `TYPES`, or auto: for each matrix the smallest type that holds it to the
            bit.
        vocabulary: The same for embeddings and head; None for auto, where `kind` is, and else for
            q8_0 where `kind` has fewer bits.

    Raises:
        FormatError: The checkpoint is packed or quantized; or the file is damaged, or of an
            architecture whose tensors cannot be identified.
        OptionError: The file is of another model, or a type cannot hold a matrix.
        ParityError: A weight that is zero would not be zero.
        OSError: The file could not be written whole.
    """
    reader = bounded_gguf(like)  # before the checkpoint, which takes longer to read
    if not checkpoint.config or checkpoint.config.get("quantization_config"):
        raise FormatError(
            f"{checkpoint.path} is no dense Hugging Face checkpoint. Give the directory that "
            "pruning wrote, not one that is packed."
        )
    config = checkpoint.pretrained_config().get_text_config()
    source = gguf_config(like).get_text_config()
    _refuse_other(source, config, like)
    state = checkpoint.load().state_dict()
    with reading(like):
        locations = list(
            _locations(reader, gguf_model(like, torch.float32, None).state_dict(), source)
        )
    used = {location.name for location in locations}
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if others := sorted((used ^ state.keys()) - tied):
        raise OptionError(
            f"`--like`: {like} and {checkpoint.path} do not hold the same weights. In one of them "
            f"only: {', '.join(others[:5])}."
        )
    writer = GGUFWriter(out, str(reader.fields["general.architecture"].contents()))
    arranged = {
        location.stored: location.arranged(state[location.name], config) for location in locations
    }
    _copy_fields(reader, writer, _sizes(arranged, config, source))
    if vocabulary is None:
        grid = None if kind == AUTO else TYPES[kind].grid
        vocabulary = "q8_0" if grid is not None and grid.bits < 8 else kind
    encoded = {}
    for tensor in reader.tensors:
        name = tensor.name
        if name not in arranged:  # a table of frequencies, which is no weight
            writer.add_tensor(name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
            continue
        of_tensor = vocabulary if name in _VOCABULARY else kind
        stored = encode(name, arranged[name], "f32" if arranged[name].ndim == 1 else of_tensor)
        writer.add_tensor(name, stored.content, raw_dtype=stored.kind.stored_as)
        encoded[name] = stored
    sizes: Counter[str] = Counter()
    for stored in encoded.values():
        sizes[stored.kind.name] += stored.content.nbytes
    writer.add_file_type(TYPES[max(sizes, key=sizes.__getitem__)].file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _write(writer, out)
    return Written(
        sum(tensor.n_bytes for tensor in GGUFReader(out).tensors),
        Counter(stored.kind.name for stored in encoded.values()),
        {name: stored.error for name, stored in encoded.items() if stored.error},
    )


def _write(writer: GGUFWriter, out: Path) -> None:
    """Write the file, and read it back: a full disk may cut it short without an error.

    Raises:
        OSError: The file is not what was written.
    """
    checksums = {
        name: zlib.crc32(info.tensor.tobytes())
        for shard in writer.tensors
        for name, info in shard.items()
        if info.tensor is not None
    }
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    flush(out)
    try:
        read = {
            tensor.name: zlib.crc32(tensor.data.tobytes()) for tensor in GGUFReader(out).tensors
        }
    except (ValueError, IndexError) as error:
        raise OSError(f"{out} could not be written whole ({error}). Is the disk full?") from error
    if read != checksums:
        raise OSError(f"{out} does not hold what was written. Is the disk full?")


@dataclass(frozen=True)
class _Location:
    """The tensor of a GGUF file that holds a parameter, and its arrangement there."""

    stored: str
    name: str
    arrangement: Arrangement

    def arranged(self, parameter: Tensor, config: PreTrainedConfig) -> Tensor:
        return self.arrangement(parameter, _heads(self.stored, config))


def _locations(
    reader: GGUFReader, state: Mapping[str, Tensor], config: PreTrainedConfig
) -> Iterator[_Location]:
    """Match the tensors of a file to parameters by name, and verify each by its values."""
    architecture = reader.fields["general.architecture"].contents()
    known = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(known[architecture], config.num_hidden_layers)
    by_stored = {names.get_name(name, try_suffixes=(".weight", ".bias")): name for name in state}
    for tensor in reader.tensors:
        name = by_stored.get(tensor.name)
        if name is None:
            if tensor.name.startswith("rope_"):
                continue
            raise FormatError(f"`--like`: transformers has no name for the tensor {tensor.name}.")
        # A copy: the reader's memory may not be written.
        values = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type)))
        for arrangement in _ARRANGEMENTS:
            location = _Location(tensor.name, name, arrangement)
            ours = location.arranged(state[name], config)
            if ours.shape == values.shape and torch.allclose(ours, values, rtol=1e-5, atol=1e-7):
                yield location
                break
        else:
            raise FormatError(
                f"`--like`: {tensor.name} of the architecture {architecture!r} lies in the file in "
                "a way that is not known here. Convert the checkpoint with llama.cpp's "
                "convert_hf_to_gguf.py."
            )


def _rotated(parameter: Tensor, heads: int) -> Tensor:
    """Interleave the halves of each head: llama.cpp rotates neighbouring rows."""
    if len(parameter) % (2 * heads):
        return parameter
    return parameter.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


_ARRANGEMENTS: tuple[Arrangement, ...] = (
    lambda parameter, _: parameter,
    _rotated,
    lambda parameter, _: parameter.T if parameter.ndim == 2 else parameter,  # Conv1D
    lambda parameter, _: parameter + 1,  # Gemma's norms
)


def _heads(stored: str, config: PreTrainedConfig) -> int:
    heads: int = config.num_attention_heads
    return getattr(config, "num_key_value_heads", None) or heads if "attn_k" in stored else heads


def _refuse_other(source: PreTrainedConfig, config: PreTrainedConfig, like: Path) -> None:
    for key in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size"):
        theirs, ours = getattr(source, key, None), getattr(config, key, None)
        if theirs != ours:
            raise OptionError(
                f"`--like`: {like} is of another model: its `{key}` is {theirs!r}, the "
                f"checkpoint's {ours!r}. Give the file that the checkpoint was pruned from."
            )


def _sizes(
    arranged: Mapping[str, Tensor], config: PreTrainedConfig, source: PreTrainedConfig
) -> dict[str, int]:
    """Return the metadata that depend on the width, without the architecture's prefix."""
    sizes = {}
    if (up := arranged.get("blk.0.ffn_up.weight")) is not None:
        sizes["feed_forward_length"] = len(up)
    heads = config.num_attention_heads
    sizes["attention.head_count"] = heads
    sizes["attention.head_count_kv"] = getattr(config, "num_key_value_heads", None) or heads
    if heads != source.num_attention_heads:
        sizes |= dict.fromkeys(_OF_A_HEAD, config.head_dim)
    return sizes


def _copy_fields(reader: GGUFReader, writer: GGUFWriter, sizes: Mapping[str, int]) -> None:
    """Copy the metadata, with the sizes of the checkpoint in place of those of the file."""
    architecture = reader.fields["general.architecture"].contents()
    wanted = {f"{architecture}.{name}": value for name, value in sizes.items()}
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key in _OWN:
            continue
        value, kind = field.contents(), field.types[0]
        is_set = key in wanted and key.removeprefix(f"{architecture}.") not in _OF_A_HEAD
        if is_set and value != wanted[key]:
            if kind == GGUFValueType.ARRAY:
                raise FormatError(
                    f"`--like`: {key} has a value for each block, {value}, and the checkpoint has "
                    f"{wanted[key]} in all of them."
                )
            value = wanted[key]
        item = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(key, value, kind, sub_type=item)
    for key in _OF_A_HEAD:
        name = f"{architecture}.{key}"
        if name in wanted and name not in reader.fields:
            writer.add_uint32(name, wanted[name])
