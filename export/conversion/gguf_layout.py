"""The layout of a checkpoint in a GGUF file: architecture, metadata, tokenizer, tensors.

Another GGUF file of the same model provides the metadata that a checkpoint lacks. The arrangement
of each tensor follows from a comparison of values: a tensor of the file is a parameter that
transformers reads from the file, unchanged or rearranged in one of a few ways. Without such a file,
`gguf_families` describes the layout of known architectures.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize
from torch import Tensor, nn
from transformers import PreTrainedConfig

from export.conversion.checkpoint import Checkpoint
from mrp_ground.grid import GridParameters
from mrp_lightning.errors import FormatError, OptionError
from mrp_lightning.models.gguf import gguf_config, gguf_model, reading
from mrp_lightning.upstream.other_names import bounded_gguf

_OF_A_HEAD = ("attention.key_length", "attention.value_length", "rope.dimension_count")
"""Metadata whose defaults depend on the number of heads."""
_OWN = ("general.architecture", "general.file_type", "general.quantization_version")

_Arrangement = Callable[[Tensor, int], Tensor]
"""Called with a parameter of transformers and its number of heads: the tensor in a GGUF file."""


@dataclass(frozen=True)
class Layout:
    """The content of a GGUF file for a checkpoint.

    Attributes:
        architecture: llama.cpp's name of the architecture.
        tensors: The weights as arranged in the file, by their names in the file.
        write_fields: Adds the metadata and the tokenizer to a writer.
        tables: Tensors that are no weights, such as frequencies, and their types.
        parameters: The grid parameters of weights, arranged like these, by their names in the file.
    """

    architecture: str
    tensors: Mapping[str, Tensor]
    write_fields: Callable[[GGUFWriter], None]
    tables: Mapping[str, tuple[np.ndarray[Any, Any], GGMLQuantizationType]] = field(
        default_factory=dict
    )
    parameters: Mapping[str, GridParameters] = field(default_factory=dict)


def known_parameters(checkpoint: Checkpoint, model: nn.Module) -> dict[str, GridParameters]:
    """Return the grid parameters of a checkpoint by the names of modules; tied ones share them."""
    known = checkpoint.grid_parameters()
    weights = dict(model.named_parameters(remove_duplicate=False))
    by_weight = {
        id(weight): known[name]
        for name in known
        if (weight := weights.get(f"{name}.weight")) is not None
    }
    return {
        name.removesuffix(".weight"): by_weight[id(weight)]
        for name, weight in weights.items()
        if id(weight) in by_weight
    }


def layout_like(checkpoint: Checkpoint, like: Path) -> Layout:
    """Return the layout of a checkpoint by a GGUF file of the same model.

    Args:
        checkpoint: A dense Hugging Face checkpoint; it may be narrower than the file's model.
        like: The GGUF file that the model came from, or another of the same model.

    Raises:
        FormatError: The file is damaged, or of an architecture whose tensors cannot be identified.
        OptionError: The file is of another model.
    """
    with reading(like, "--like"):
        reader = bounded_gguf(like)
    config = checkpoint.pretrained_config().get_text_config()
    source = gguf_config(like).get_text_config()
    _refuse_other(source, config, like)
    model = checkpoint.load()
    state = model.state_dict()
    with reading(like, "--like"):
        locations = list(
            _locations(reader, gguf_model(like, torch.float32, None).state_dict(), source)
        )
    used = {location.name for location in locations}
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if unmatched := sorted((used ^ state.keys()) - tied):
        raise OptionError(
            f"`--like`: {like} and {checkpoint.path} do not hold the same weights. In one of them "
            f"only: {', '.join(unmatched[:5])}."
        )
    known = known_parameters(checkpoint, model)
    arranged = {each.stored: each.arranged(state[each.name], config) for each in locations}
    sizes = _sizes(arranged, config, source)
    return Layout(
        str(reader.fields["general.architecture"].contents()),
        # In the order of the file.
        {t.name: arranged[t.name] for t in reader.tensors if t.name in arranged},
        lambda writer: _copy_fields(reader, writer, sizes),
        {
            t.name: (np.array(t.data), t.tensor_type)
            for t in reader.tensors
            if t.name not in arranged
        },
        {
            each.stored: of_layer.map(each.arranged_rows(config))
            for each in locations
            if (of_layer := known.get(each.name.removesuffix(".weight"))) is not None
        },
    )


@dataclass(frozen=True)
class _Location:
    """The tensor of a GGUF file that holds a parameter, and its arrangement there."""

    stored: str
    name: str
    arrangement: _Arrangement

    def arranged(self, parameter: Tensor, config: PreTrainedConfig) -> Tensor:
        return self.arrangement(parameter, _heads(self.stored, config))

    def arranged_rows(self, config: PreTrainedConfig) -> Callable[[Tensor], Tensor]:
        """Return a function that arranges tensors (rows, ...) of a layer as the rows of its weight.

        A weight that is stored transposed has its rows in the same order.
        """
        if self.arrangement is not rotated:
            return lambda tensor: tensor
        return lambda tensor: rotated(tensor, _heads(self.stored, config))


def _locations(
    reader: GGUFReader, state: Mapping[str, Tensor], config: PreTrainedConfig
) -> Iterator[_Location]:
    """Match the tensors of a file to parameters by name, and verify each by its values."""
    architecture = reader.fields["general.architecture"].contents()
    architectures = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(architectures[architecture], config.num_hidden_layers)
    by_stored = {names.get_name(name, try_suffixes=(".weight", ".bias")): name for name in state}
    for tensor in reader.tensors:
        name = by_stored.get(tensor.name)
        if name is None:
            if tensor.name.startswith("rope_"):
                continue
            raise FormatError(f"`--like`: transformers has no name for the tensor {tensor.name}.")
        # A copy, since the reader's memory is read-only.
        values = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type)))
        for arrangement in _ARRANGEMENTS:
            location = _Location(tensor.name, name, arrangement)
            rearranged = location.arranged(state[name], config)
            if rearranged.shape == values.shape and torch.allclose(
                rearranged, values, rtol=1e-5, atol=1e-7
            ):
                yield location
                break
        else:
            raise FormatError(
                f"`--like`: {tensor.name} of the architecture {architecture!r} lies in the file in "
                "a way that is not known here. Convert the checkpoint with llama.cpp's "
                "convert_hf_to_gguf.py."
            )


def rotated(parameter: Tensor, heads: int) -> Tensor:
    """Interleave the halves of each head, since llama.cpp rotates adjacent rows."""
    if len(parameter) % (2 * heads):
        return parameter
    return parameter.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


_ARRANGEMENTS: tuple[_Arrangement, ...] = (
    lambda parameter, _: parameter,
    rotated,
    lambda parameter, _: parameter.T if parameter.ndim == 2 else parameter,  # Conv1D
    lambda parameter, _: parameter + 1,  # Gemma's norms
)


def _heads(stored: str, config: PreTrainedConfig) -> int:
    heads: int = config.num_attention_heads
    return getattr(config, "num_key_value_heads", None) or heads if "attn_k" in stored else heads


def _refuse_other(source: PreTrainedConfig, config: PreTrainedConfig, like: Path) -> None:
    for key in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size"):
        other_value, value = getattr(source, key, None), getattr(config, key, None)
        if other_value != value:
            raise OptionError(
                f"`--like`: {like} is of another model: its `{key}` is {other_value!r}, the "
                f"checkpoint's {value!r}. Give the file that the checkpoint was pruned from."
            )


def _sizes(
    arranged: Mapping[str, Tensor], config: PreTrainedConfig, source: PreTrainedConfig
) -> dict[str, int]:
    """Return the metadata that depend on the model's width, without the architecture's prefix."""
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
    replacements = {f"{architecture}.{name}": value for name, value in sizes.items()}
    for key, entry in reader.fields.items():
        if key.startswith("GGUF.") or key in _OWN:
            continue
        value, kind = entry.contents(), entry.types[0]
        is_set = key in replacements and key.removeprefix(f"{architecture}.") not in _OF_A_HEAD
        if is_set and value != replacements[key]:
            if kind == GGUFValueType.ARRAY:
                raise FormatError(
                    f"`--like`: {key} has a value for each block, {value}, and the checkpoint has "
                    f"{replacements[key]} in all of them."
                )
            value = replacements[key]
        item = entry.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(key, value, kind, sub_type=item)
    for key in _OF_A_HEAD:
        name = f"{architecture}.{key}"
        if name in replacements and name not in reader.fields:
            writer.add_uint32(name, replacements[name])
