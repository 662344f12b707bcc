"""Write a pruned checkpoint packed, as torchao's tensors, or dense, file by file as it is."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from export.backends import torchao_format
from export.conversion.checkpoint import Checkpoint
from export.conversion.head_choice import HeadChoice
from export.conversion.selection import LayerChoice
from mrp_lightning.files import save_text
from mrp_lightning.json_files import as_json
from mrp_sparse.formats.packed_format import NOTE
from mrp_sparse.formats.sparse24 import positive_zeros


def write_packed(
    source: Checkpoint,
    directory: Path,
    layers: Sequence[LayerChoice],
    head: HeadChoice | None = None,
) -> Iterator[str]:
    """Write a checkpoint with some weights packed into an empty directory.

    There is at least one layer, and all are packed in the same format; the `head` may have 8 bits.
    The names of the layers are given one by one as they are packed.
    """
    form = layers[0].form

    def convert(layer: LayerChoice, tensor: Tensor) -> dict[str, Tensor]:
        names = [layer.tensor, *form.companion_names(layer.tensor)]
        packed = dict(zip(names, form.pack(layer.matrix(tensor)), strict=True))
        # transformers lists unexpected tensors: one of them names the package that it lacks.
        is_first = layer is layers[0] and bool(source.config)
        note = {NOTE: torch.empty(0)} if is_first else {}
        return packed | note

    names = [layer.name for layer in layers]
    modules = {layer.name: layer.count for layer in layers} if form.count else names
    settings = _settings(form.quant_method, form.version, modules)
    settings |= {} if head is None else {"head": head.settings}
    yield from _write(source, directory, layers, convert, settings, head=head)


def write_torchao(
    source: Checkpoint, directory: Path, layers: Sequence[LayerChoice], device: torch.device
) -> Iterator[str]:
    """Write pickles with torchao's 2:4 tensors, made on a CUDA device; see `write_packed`."""

    def convert(layer: LayerChoice, tensor: Tensor) -> dict[str, Tensor]:
        weight = positive_zeros(tensor.to(device))[0]
        return {layer.tensor: torchao_format.store(weight)}

    names = [layer.name for layer in layers]
    settings = _settings(torchao_format.QUANT_METHOD, torchao_format.FORMAT_VERSION, names)
    yield from _write(source, directory, layers, convert, settings, in_pickles=True)


def write_dense(
    source: Checkpoint, directory: Path, layers: Sequence[LayerChoice]
) -> Iterator[str]:
    """Write safetensors with the zeros, all of them positive; see `write_packed`."""

    def convert(layer: LayerChoice, tensor: Tensor) -> dict[str, Tensor]:
        return {layer.tensor: positive_zeros(tensor)[0]}

    yield from _write(source, directory, layers, convert, None)


def _settings(quant_method: str, version: int, modules: Any) -> dict[str, Any]:
    """The `quantization_config` of a packed checkpoint."""
    return {"quant_method": quant_method, "format_version": version, "modules": modules}


def _write(
    source: Checkpoint,
    directory: Path,
    layers: Sequence[LayerChoice],
    convert: Callable[[LayerChoice, Tensor], dict[str, Tensor]],
    settings: dict[str, Any] | None,
    *,
    head: HeadChoice | None = None,
    in_pickles: bool = False,
) -> Iterator[str]:
    chosen = {layer.tensor: layer for layer in layers}
    weight_map: dict[str, str] = {}
    total = 0
    for weights in source.files:
        converted: dict[str, Tensor] = {}
        others: dict[str, Tensor] = {}
        for name, tensor in weights.read().items():
            if name in chosen:
                converted |= convert(chosen[name], tensor)
                yield chosen[name].name
            elif head is not None and name in head.tensors:
                converted |= head.convert(name, tensor)
            else:
                others[name] = tensor
        tensors = {**converted, **others}
        # An unfinished file is never seen: the directory is moved into place when it is whole.
        file = weights.name
        if in_pickles:
            file = _pickle_name(file)
            torch.save({**converted, **_unshared(others)}, directory / file)
        else:
            save_file(_unshared(tensors), directory / file, {"format": "pt", **weights.metadata})
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(source.files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        name = "model.safetensors.index.json"
        save_text(directory / (_pickle_name(name) if in_pickles else name), as_json(index))
    config = dict(source.config)
    if settings is not None:
        config["quantization_config"] = settings
    if config:
        save_text(directory / "config.json", as_json(config))
    for companion in source.companions:
        (directory / companion).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.path / companion, directory / companion)


def _pickle_name(name: str) -> str:
    """The name of the pickle, or index of pickles, in place of a safetensors file."""
    return f"pytorch_{name}".replace(".safetensors", ".bin")


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
