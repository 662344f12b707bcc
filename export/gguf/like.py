"""The layout of a checkpoint by another GGUF file of the same model.

The file provides the metadata that a checkpoint lacks. The arrangement of each tensor follows from
a comparison of values: a tensor of the file is a parameter that transformers reads from the file,
unchanged or rearranged in one of a few ways. Metadata that `families` makes of the checkpoint must
be those of the file.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from export.conversion.checkpoint import Checkpoint
from export.gguf.families import FAMILIES, Family, metadata
from export.gguf.fields import SIZES, WITHOUT_EFFECT, Tables, own_code
from export.gguf.layout import (
    Layout,
    Location,
    arranged_parameters,
    arranged_tensors,
    known_parameters,
    one_more,
    rotated,
    separate_head,
    table_shared,
)
from mrp_lightning.errors import FormatError, OptionError
from mrp_lightning.models.gguf import gguf_config, gguf_model, reading
from mrp_lightning.upstream.other_names import bounded_gguf

_OF_A_HEAD = ("attention.key_length", "attention.value_length", "rope.dimension_count")
"""Metadata whose defaults depend on the number of heads."""
_OWN = ("general.architecture", "general.file_type", "general.quantization_version")
_FREE = frozenset(
    {
        *("context_length", "vocab_size", "attention.layer_norm_epsilon", *_OF_A_HEAD),
        *("rope.scaling.original_context_length", "rope.scaling.finetuned"),
    }
)
"""Metadata that change no logits, or that tensors' shapes give."""
_ROPE = "rope."
_TABLES = "rope_"


def layout_like(checkpoint: Checkpoint, like: Path) -> Layout:
    """Return the layout of a checkpoint by a GGUF file of the same model.

    Args:
        checkpoint: A dense Hugging Face checkpoint; it may be narrower than the file's model, or
            have fewer blocks.
        like: The GGUF file that the model came from, or another of the same model.

    Raises:
        FormatError: The file is damaged, or of an architecture whose tensors cannot be identified;
            or the checkpoint's files hold tensors that the model lacks.
        OptionError: The file is of another model, or cannot hold the checkpoint's configuration.
    """
    with reading(like, "--like"):
        reader = bounded_gguf(like)
    config = checkpoint.pretrained_config().get_text_config()
    source = gguf_config(like).get_text_config()
    _refuse_other(source, config, like)
    family = FAMILIES.get(config.model_type)
    if family is not None:
        # Positions may be of any kind here: the file's own are copied. All other fields are code of
        # llama.cpp, which no metadata of the file can change.
        family.fields.require(config, checkpoint.path, unless={"rope_parameters"})
    model = checkpoint.load()
    state = checkpoint.state(model)
    locations = _all_locations(checkpoint, like, reader, model, state)
    arranged = arranged_tensors(state, locations)
    order = {tensor.name: index for index, tensor in enumerate(reader.tensors)}
    # The order of the other file is kept, so that both files of an unchanged model are alike; a
    # head that only the checkpoint has comes last.
    tensors = dict(sorted(arranged.items(), key=lambda item: order.get(item[0], len(order))))
    tables = {
        tensor.name: (np.array(tensor.data), tensor.tensor_type)
        for tensor in reader.tensors
        if tensor.name.startswith(_TABLES)
    }
    sizes = _sizes(arranged, config, source)
    if family is None:
        added, notes = {}, _uncompared(config, source, like)
    else:
        own, own_tables, notes = _own_metadata(family, config, model)
        # Sizes are free: a narrower checkpoint has others, and `_copy_fields` writes them.
        free = (*_FREE, *sizes)
        _require_same(reader, own, free, None if notes else (tables, own_tables), like)
        added = {key: value for key, value in own.items() if key not in reader.fields}
        notes = [*family.fields.warnings(config), *notes]
    _require_tokens(reader, model, like)
    return Layout(
        str(reader.fields["general.architecture"].contents()),
        locations,
        tensors,
        lambda writer: _copy_fields(reader, writer, sizes, added),
        tables,
        arranged_parameters(known_parameters(checkpoint, model), locations),
        notes,
    )


def _all_locations(
    checkpoint: Checkpoint,
    like: Path,
    reader: GGUFReader,
    model: PreTrainedModel,
    state: Mapping[str, Tensor],
) -> dict[str, Location]:
    """Return where each parameter of a checkpoint is in a file like another."""
    config, source = model.config.get_text_config(), gguf_config(like).get_text_config()
    with reading(like, "--like"):
        # transformers reads the file in float32, as `dequantize` does: the values then agree up to
        # a few roundings, and any larger difference is another arrangement.
        values = gguf_model(like, torch.float32, None).state_dict()
        locations = dict(_locations(reader, values, source, config))
    if (head := separate_head(model, state)) is None:
        locations = table_shared(model, locations) | locations
    elif head not in locations:
        if family := FAMILIES.get(config.model_type):
            family.require_head(head, checkpoint.path)
        locations[head] = Location("output.weight")
    # Blocks are alike, so that those of the checkpoint lie as the first ones of the file.
    gone = {f"blk.{k}" for k in range(config.num_hidden_layers, source.num_hidden_layers)}
    locations = {
        name: location
        for name, location in locations.items()
        if ".".join(location.stored.split(".")[:2]) not in gone
    }
    if unmatched := locations.keys() ^ state.keys():
        raise OptionError(
            f"`--like`: {like} and {checkpoint.path} do not hold the same weights. In one of them "
            f"only: {', '.join(sorted(unmatched)[:5])}."
        )
    return locations


def _locations(
    reader: GGUFReader,
    state: Mapping[str, Tensor],
    source: PreTrainedConfig,
    config: PreTrainedConfig,
) -> Iterator[tuple[str, Location]]:
    """Match the tensors of a file to parameters by name, and verify each by its values.

    The values are arranged by the heads of the file's model, those of the checkpoint by its own.
    """
    architecture = reader.fields["general.architecture"].contents()
    architectures = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(architectures[architecture], source.num_hidden_layers)
    by_stored = {names.get_name(name, try_suffixes=(".weight", ".bias")): name for name in state}
    for tensor in reader.tensors:
        name = by_stored.get(tensor.name)
        if name is None:
            if tensor.name.startswith(_TABLES):
                continue
            raise FormatError(f"`--like`: transformers has no name for the tensor {tensor.name}.")
        # A copy, since the reader's memory is read-only.
        values = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type)))
        # The identity is tried first: a tensor whose rows are equal, such as a bias of zeros, fits
        # several arrangements.
        for arrangement in _ARRANGEMENTS:
            rearranged = arrangement(tensor.name, source).arrange(state[name])
            if rearranged.shape == values.shape and torch.allclose(
                rearranged, values, rtol=1e-5, atol=1e-7
            ):
                # The arrangement is verified with the heads of the file's model, and applied with
                # the checkpoint's own, which structured pruning may have made fewer.
                yield name, arrangement(tensor.name, config)
                break
        else:
            raise FormatError(
                f"`--like`: {tensor.name} of the architecture {architecture!r} lies in the file in "
                "a way that is not known here. Convert the checkpoint with llama.cpp's "
                "convert_hf_to_gguf.py."
            )


def _rotated(stored: str, config: PreTrainedConfig) -> Location:
    heads = config.num_attention_heads
    if "attn_k" in stored:
        heads = getattr(config, "num_key_value_heads", None) or heads
    arrange = partial(rotated, heads=heads)
    return Location(stored, arrange, arrange)


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.T if tensor.ndim == 2 else tensor


_ARRANGEMENTS: tuple[Callable[[str, PreTrainedConfig], Location], ...] = (
    lambda stored, _: Location(stored),
    _rotated,
    lambda stored, _: Location(stored, _transposed),  # Conv1D
    lambda stored, _: Location(stored, one_more),  # Gemma's norms
)


def _refuse_other(source: PreTrainedConfig, config: PreTrainedConfig, like: Path) -> None:
    for key in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size"):
        other_value, value = getattr(source, key, None), getattr(config, key, None)
        is_shorter = key == "num_hidden_layers" and (value or 0) < (other_value or 0)
        if other_value != value and not is_shorter:
            raise OptionError(
                f"`--like`: {like} is of another model: its `{key}` is {other_value!r}, the "
                f"checkpoint's {value!r}. Give the file that the checkpoint was pruned from."
            )


def _sizes(
    arranged: Mapping[str, Tensor], config: PreTrainedConfig, source: PreTrainedConfig
) -> dict[str, int]:
    """Return the metadata that depend on the model's size, without the architecture's prefix."""
    sizes = {}
    if config.num_hidden_layers != source.num_hidden_layers:
        sizes["block_count"] = config.num_hidden_layers
    if (up := arranged.get("blk.0.ffn_up.weight")) is not None:
        sizes["feed_forward_length"] = len(up)
    heads = config.num_attention_heads
    sizes["attention.head_count"] = heads
    sizes["attention.head_count_kv"] = getattr(config, "num_key_value_heads", None) or heads
    # Defaults of these sizes are embedding_length / head_count, and wrong once heads were removed
    # and the embedding kept its width.
    if heads != source.num_attention_heads:
        sizes |= dict.fromkeys(_OF_A_HEAD, config.head_dim)
    return sizes


def _own_metadata(
    family: Family, config: PreTrainedConfig, model: Any
) -> tuple[dict[str, gguf.GGUFValue], Tables, list[str]]:
    """Return what `families` makes of a checkpoint: metadata and tables, without unknown positions.

    Positions of a kind that is not known here have a note.
    """
    write, tables = metadata(family, config, model)
    writer = GGUFWriter(None, family.architecture)
    write(writer)
    own = {key: value for part in writer.kv_data for key, value in part.items() if key != _OWN[0]}
    unknown = family.fields.judged["rope_parameters"](config)
    if unknown is None:
        return own, tables, []
    own = {key: value for key, value in own.items() if f".{_ROPE}" not in key}
    return own, {}, [f"{unknown}: positions are those of `--like`, not compared."]


def _require_same(
    reader: GGUFReader,
    own: Mapping[str, gguf.GGUFValue],
    free: Iterable[str],
    tables: tuple[Tables, Tables] | None,
    like: Path,
) -> None:
    """Raise an OptionError if a file's metadata or tables are not the checkpoint's own.

    Metadata in `free`, without the architecture's prefix, are not compared; without `tables`, the
    positions are not either.
    """
    prefix = f"{reader.fields['general.architecture'].contents()}."
    stored = {
        key.removeprefix(prefix): entry.contents()
        for key, entry in reader.fields.items()
        if key.startswith(prefix) and not (tables is None and f".{_ROPE}" in key)
    }
    values = {key.removeprefix(prefix): value.value for key, value in own.items()}
    different = [
        f"{prefix}{key}: {stored[key]!r}, the checkpoint's {values.get(key)!r}"
        for key in stored.keys() - {*free}
        if not _equal(stored[key], values.get(key))
    ]
    of_file, of_config = tables or ({}, {})
    different += [
        f"{name}: in one of them only, or with other values"
        for name in of_file.keys() | of_config.keys()
        if not _equal_tables(of_file.get(name), of_config.get(name))
    ]
    if different:
        listed = "\n".join(f"  {each}" for each in sorted(different))
        raise OptionError(
            f"`--like`: {like} says otherwise than config.json, so llama.cpp would compute "
            "another function. Give a file of the same model, or none if the tokenizer is "
            f"known:\n{listed}"
        )


def _equal(stored: Any, own: Any) -> bool:
    """Return whether metadata are equal, as numbers of a file have 32 bits."""
    if isinstance(stored, float) and isinstance(own, int | float):
        # A file rounds numbers to 32 bits and the configuration has 64: 1e-6 from both is equal
        # only after the same rounding.
        return bool(np.float32(stored) == np.float32(own))
    return bool(stored == own)


def _equal_tables(stored: Any, own: Any) -> bool:
    if stored is None or own is None:
        return False
    return stored[0].shape == own[0].shape and np.allclose(stored[0], own[0], rtol=1e-4)


def _uncompared(config: PreTrainedConfig, source: PreTrainedConfig, like: Path) -> list[str]:
    """Return a note for each field that differs from the file's, for an architecture without rules.

    Activations must not differ, which no metadata state.
    """
    known = {config.attribute_map.get(name, name) for name in SIZES | WITHOUT_EFFECT}
    different = {
        field.name: getattr(config, field.name)
        for field in fields(config)
        if field.name not in known | {"architectures", "ffn_dim", "n_inner"}
        and not _equal(getattr(source, field.name, None), getattr(config, field.name))
    }
    if refused := [
        *(f"`{name}` {value!r}" for name, value in different.items() if "act" in name),
        *own_code(config),
    ]:
        raise OptionError(
            f"`--like`: llama.cpp computes {config.model_type} as {like} says, and config.json "
            f"says otherwise: {'; '.join(refused)}. Serve it with transformers or vLLM."
        )
    return [
        f"`{name}` {value!r} of config.json was not compared: llama.cpp takes what {like} says."
        for name, value in different.items()
    ]


def _require_tokens(reader: GGUFReader, model: PreTrainedModel, like: Path) -> None:
    """Raise an OptionError if a file has more or fewer tokens than a model has embeddings."""
    tokens = reader.fields.get("tokenizer.ggml.tokens")
    table: Any = model.get_input_embeddings().weight
    rows = len(table)
    if tokens is not None and len(tokens.data) != rows:
        raise OptionError(
            f"`--like`: {like} has {len(tokens.data):,} tokens, and the checkpoint {rows:,} "
            "embeddings. Give a file of the same model."
        )


def _copy_fields(
    reader: GGUFReader,
    writer: GGUFWriter,
    sizes: Mapping[str, int],
    added: Mapping[str, gguf.GGUFValue],
) -> None:
    """Copy the metadata, with the sizes of the checkpoint in place of those of the file."""
    architecture = reader.fields["general.architecture"].contents()
    replacements = {f"{architecture}.{name}": value for name, value in sizes.items()}
    is_shorter = "block_count" in sizes
    for key, entry in reader.fields.items():
        if key.startswith("GGUF.") or key in _OWN:
            continue
        value, kind = entry.contents(), entry.types[0]
        if is_shorter and kind == GGUFValueType.ARRAY and key.startswith(f"{architecture}."):
            raise FormatError(
                f"`--like`: {key} is a list, {value}, of which the checkpoint, that has fewer "
                "blocks, may need another part. Give no file if the tokenizer is known."
            )
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
    missing = {
        name: gguf.GGUFValue(value=replacements[name], type=GGUFValueType.UINT32)
        for name in (f"{architecture}.{key}" for key in _OF_A_HEAD)
        if name in replacements and name not in reader.fields
    }
    for name, value in (missing | dict(added)).items():
        writer.add_key_value(name, value.value, value.type, sub_type=value.sub_type)
