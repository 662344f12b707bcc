"""Read a pruned checkpoint shard by shard, and write it packed, or dense, in the same shards."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from export.format import FORMAT_VERSION, pack, positive_zeros
from export.huggingface import QUANT_METHOD, model_class
from mrp_lightning.errors import FormatError

_WEIGHTS = {".safetensors", ".bin", ".ckpt", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf"}
_REPLACED = {"config.json", "export_report.json"}


@dataclass(frozen=True)
class Shard:
    """One file of weights.

    Attributes:
        name: File name of its safetensors twin.
        read: Gives its tensors by name.
        metadata: What the file says of itself.
        num_tensors: How many tensors it holds; `None` where only reading it would tell.
        num_bytes: Size of the file.
    """

    name: str
    read: Callable[[], dict[str, Tensor]]
    metadata: Mapping[str, str]
    num_tensors: int | None
    num_bytes: int


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk.

    Attributes:
        path: What the user named.
        config: Content of `config.json`.
        shards: The files of weights.
        companions: All other files, relative to `path`: tokenizer, chat template, reports.
    """

    path: Path
    config: dict[str, Any]
    shards: list[Shard]
    companions: list[Path]

    @property
    def num_tensors(self) -> int | None:
        """How many tensors there are; `None` where only reading them would tell."""
        counts = [shard.num_tensors for shard in self.shards]
        return None if None in counts else sum(count or 0 for count in counts)

    @property
    def num_bytes(self) -> int:
        """Size of the files of weights."""
        return sum(shard.num_bytes for shard in self.shards)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors, with one file at a time in memory."""
        for shard in self.shards:
            yield from shard.read().items()

    def pretrained_config(self) -> PreTrainedConfig:
        """The configuration as transformers' object."""
        if self.path.is_dir():
            return AutoConfig.from_pretrained(self.path)
        return AutoConfig.for_model(**self.config)

    def load(self) -> PreTrainedModel:
        """The model, dense, in the precision that it is stored in.

        Raises:
            FormatError: Weights of the model are missing from the checkpoint.
        """
        config = self.pretrained_config()
        options: dict[str, Any] = {"dtype": "auto", "output_loading_info": True}
        if self.path.is_dir():
            model, loading = model_class(config).from_pretrained(self.path, **options)
        else:
            state = dict(self.tensors())
            model, loading = model_class(config).from_pretrained(
                None, config=config, state_dict=state, **options
            )
        if loading["missing_keys"]:
            missing = ", ".join(sorted(loading["missing_keys"]))
            raise FormatError(f"{self.path} lacks weights of {type(model).__name__}: {missing}.")
        return model


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Find the weights of a Hugging Face directory, or of a Lightning checkpoint of a `CausalLM`.

    Of several forms safetensors are taken first. Nothing is unpickled but tensors and plain
    containers.

    Raises:
        FileNotFoundError: Nothing of that kind is there.
        FormatError: The files are damaged, incomplete, or hold something else.
    """
    path = Path(path).expanduser()
    if path.suffix == ".ckpt" and path.is_file():
        return _lightning_checkpoint(path)
    if not (path / "config.json").is_file():
        raise FileNotFoundError(
            f"`CKPT`: {path} is neither a Hugging Face directory with a config.json nor a "
            "Lightning .ckpt file."
        )
    config = _read_json(path / "config.json")
    shards = [_shard(file) for file in _weight_files(path)]
    return Checkpoint(path, config, shards, _companions(path))


def write_packed(
    source: Checkpoint, directory: Path, packed: Mapping[str, "PackedName"]
) -> Iterator[str]:
    """Write the checkpoint with some weights packed, one shard after the other.

    Args:
        source: The pruned checkpoint.
        directory: An existing empty directory.
        packed: The layers to pack, by the name of their weight in the files.

    Yields:
        The name of each weight that was packed.
    """

    def convert(name: str, tensor: Tensor) -> dict[str, Tensor]:
        values, meta = pack(packed[name].matrix(tensor))
        return {name: values, f"{name}_meta": meta}

    settings = {
        "quant_method": QUANT_METHOD,
        "format_version": FORMAT_VERSION,
        "modules": [layer.module for layer in packed.values()],
    }
    config = source.config | {"quantization_config": settings}
    yield from _write(source, directory, set(packed), convert, config)


def write_dense(
    source: Checkpoint, directory: Path, packed: Mapping[str, "PackedName"]
) -> Iterator[str]:
    """Write safetensors with the zeros, all of them positive; see `write_packed`."""

    def convert(name: str, tensor: Tensor) -> dict[str, Tensor]:
        return {name: positive_zeros(tensor)[0]}

    yield from _write(source, directory, set(packed), convert, source.config)


@dataclass(frozen=True)
class PackedName:
    """Where a layer is in the model, and how its weight lies in the files.

    Attributes:
        module: Name of the module.
        transposed: Whether the file holds (columns, rows), as for `Conv1D`.
    """

    module: str
    transposed: bool

    def matrix(self, tensor: Tensor) -> Tensor:
        """The weight (rows, columns) of the tensor in the file."""
        return tensor.T.contiguous() if self.transposed else tensor


def _write(
    source: Checkpoint,
    directory: Path,
    chosen: set[str],
    convert: Callable[[str, Tensor], dict[str, Tensor]],
    config: dict[str, Any],
) -> Iterator[str]:
    weight_map: dict[str, str] = {}
    total = 0
    for shard in source.shards:
        tensors: dict[str, Tensor] = {}
        for name, tensor in shard.read().items():
            if name in chosen:
                tensors |= convert(name, tensor)
                yield name
            else:
                tensors[name] = tensor
        # An unfinished file is never seen: the directory is moved into place when it is whole.
        save_file(_unshared(tensors), directory / shard.name, {"format": "pt", **shard.metadata})
        weight_map |= dict.fromkeys(tensors, shard.name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(source.shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        _write_json(directory / "model.safetensors.index.json", index)
    _write_json(directory / "config.json", config)
    for companion in source.companions:
        (directory / companion).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.path / companion, directory / companion)


def _weight_files(path: Path) -> list[Path]:
    for name in ("model.safetensors", "pytorch_model.bin"):
        index = path / f"{name}.index.json"
        if index.is_file():
            names = sorted(set(_read_json(index).get("weight_map", {}).values()))
            if missing := [name for name in names if not (path / name).is_file()]:
                raise FormatError(f"{index} names files that are not there: {', '.join(missing)}.")
            return [path / name for name in names]
        if (path / name).is_file():
            return [path / name]
    raise FileNotFoundError(
        f"`CKPT`: {path} holds no weights: expected model.safetensors or pytorch_model.bin, or an "
        "index of their shards."
    )


def _shard(file: Path) -> Shard:
    num_bytes = file.stat().st_size
    if file.suffix != ".safetensors":
        name = file.name.replace("pytorch_model", "model").removesuffix(".bin")
        return Shard(f"{name}.safetensors", lambda: _load_pickle(file), {}, None, num_bytes)
    try:
        with safe_open(file, framework="pt") as opened:
            metadata, count = opened.metadata() or {}, len(opened.keys())
    except Exception as error:  # safetensors raises its own error, which is no public class
        raise FormatError(f"{file} is no complete safetensors file: {error}") from error
    return Shard(file.name, lambda: load_file(file), metadata, count, num_bytes)


def _load_pickle(file: Path) -> dict[str, Any]:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged archives and refused classes come as many kinds
        raise FormatError(
            f"{file} cannot be read with torch.load(weights_only=True), and nothing else is tried, "
            f"because it could run code: {str(error).splitlines()[0]}"
        ) from error


def _lightning_checkpoint(file: Path) -> Checkpoint:
    """The Hugging Face model in a checkpoint of `CausalLM`, which stores its configuration."""
    saved = _load_pickle(file)
    state, settings = saved.get("state_dict"), saved.get("hyper_parameters", {})
    config = settings.get("model")
    if not isinstance(state, dict) or not isinstance(config, dict) or "model_type" not in config:
        raise FormatError(
            f"{file} is no checkpoint of mrp_lightning.CausalLM: expected `state_dict` and, in "
            "`hyper_parameters.model`, a configuration. Save the model with save_pretrained."
        )
    tensors = {
        name.removeprefix("model."): tensor
        for name, tensor in state.items()
        if name.startswith("model.")
    }
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    shard = Shard("model.safetensors", lambda: dict(tensors), {}, len(tensors), num_bytes)
    return Checkpoint(file, config, [shard], [])


def _companions(path: Path) -> list[Path]:
    files = []
    for file in sorted(path.rglob("*")):
        relative = file.relative_to(path)
        hidden = any(part.startswith(".") for part in relative.parts)
        weights = file.suffix in _WEIGHTS or file.name.endswith(".index.json")
        if file.is_file() and not hidden and not weights and str(relative) not in _REPLACED:
            files.append(relative)
    return files


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


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FormatError(f"{path} is no JSON file: {error}") from error
    if not isinstance(content, dict):
        raise FormatError(f"{path} holds no JSON object.")
    return content


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
