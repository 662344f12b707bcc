"""Write a pruned checkpoint packed, as torchao's tensors, or dense, in the shards that it has."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from export.backends import torchao_format
from export.conversion.checkpoint import Checkpoint, pickle_name
from export.conversion.layer_choice import LayerChoice
from export.packed.sparse24_format import positive_zeros
from mrp_lightning.files import save_text
from mrp_lightning.json_files import as_json


def write_packed(
    source: Checkpoint, directory: Path, layers: Sequence[LayerChoice]
) -> Iterator[str]:
    """Write the checkpoint with some weights packed, one shard after the other.

    Args:
        source: The pruned checkpoint.
        directory: An existing empty directory.
        layers: The layers to pack, at least one, all in the same format.

    Yields:
        The name of each layer that was packed.
    """
    form = layers[0].form

    def convert(layer: LayerChoice, tensor: Tensor) -> dict[str, Tensor]:
        values, places = form.pack(layer.matrix(tensor))
        return {layer.tensor: values, form.places_beside(layer.tensor): places}

    names = [layer.name for layer in layers]
    modules = {layer.name: layer.kept for layer in layers} if form.counted else names
    settings = {
        "quant_method": form.quant_method,
        "format_version": form.version,
        "modules": modules,
    }
    yield from _write(source, directory, layers, convert, settings)


def write_torchao(
    source: Checkpoint, directory: Path, layers: Sequence[LayerChoice], device: torch.device
) -> Iterator[str]:
    """Write pickles with torchao's 2:4 tensors, made on a CUDA device; see `write_packed`."""

    def convert(layer: LayerChoice, tensor: Tensor) -> dict[str, Tensor]:
        weight = positive_zeros(tensor.to(device))[0]
        return {layer.tensor: torchao_format.store(weight)}

    settings = {
        "quant_method": torchao_format.QUANT_METHOD,
        "format_version": torchao_format.FORMAT_VERSION,
        "modules": [layer.name for layer in layers],
    }
    yield from _write(source, directory, layers, convert, settings, in_pickles=True)


def write_dense(
    source: Checkpoint, directory: Path, layers: Sequence[LayerChoice]
) -> Iterator[str]:
    """Write safetensors with the zeros, all of them positive; see `write_packed`."""

    def convert(layer: LayerChoice, tensor: Tensor) -> dict[str, Tensor]:
        return {layer.tensor: positive_zeros(tensor)[0]}

    yield from _write(source, directory, layers, convert, None)


def _write(
    source: Checkpoint,
    directory: Path,
    layers: Sequence[LayerChoice],
    convert: Callable[[LayerChoice, Tensor], dict[str, Tensor]],
    settings: dict[str, Any] | None,
    *,
    in_pickles: bool = False,
) -> Iterator[str]:
    chosen = {layer.tensor: layer for layer in layers}
    weight_map: dict[str, str] = {}
    total = 0
    for shard in source.shards:
        converted: dict[str, Tensor] = {}
        others: dict[str, Tensor] = {}
        for name, tensor in shard.read().items():
            if name in chosen:
                converted |= convert(chosen[name], tensor)
                yield chosen[name].name
            else:
                others[name] = tensor
        tensors = {**converted, **others}
        # An unfinished file is never seen: the directory is moved into place when it is whole.
        file = pickle_name(shard.name) if in_pickles else shard.name
        if in_pickles:
            torch.save({**converted, **_unshared(others)}, directory / file)
        else:
            save_file(_unshared(tensors), directory / file, {"format": "pt", **shard.metadata})
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(source.shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        name = "model.safetensors.index.json"
        _write_json(directory / (pickle_name(name) if in_pickles else name), index)
    config = dict(source.config)
    if settings is not None:
        config["quantization_config"] = settings
    if config:
        _write_json(directory / "config.json", config)
    for companion in source.companions:
        (directory / companion).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.path / companion, directory / companion)


def _unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Safetensors refuses tensors that share memory: each but the first is copied."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        whole = tensor.is_contiguous() and tensor.nbytes == storage.nbytes()
        shared = storage.data_ptr() in seen
        seen.add(storage.data_ptr())
        result[name] = tensor if whole and not shared else tensor.contiguous().clone()
    return result


def _write_json(path: Path, content: dict[str, Any]) -> None:
    save_text(path, as_json(content))
