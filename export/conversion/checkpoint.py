"""A checkpoint on disk, read shard by shard."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from export.backends.torchao_format import read
from mrp_lightning.errors import FormatError
from mrp_lightning.models.loading import missing_weights
from mrp_lightning.models.skeleton import model_class
from mrp_lightning.pruning import report as pruning_report

_REPLACED = {"config.json", "export_report.json"}
_WEIGHTS = {".safetensors", ".bin", ".ckpt", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf"}


@dataclass(frozen=True)
class Shard:
    """One file of weights.

    Attributes:
        name: Name of the safetensors file that will be written in its place.
        read: Reads its tensors, by name.
        metadata: What the file says of itself, such as its framework.
        num_tensors: Number of tensors in it; `None` where only reading it would tell.
        num_bytes: Size of the file, in bytes.
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
        config: The content of its `config.json`; empty for the weights of a user's own module, of
            which only its `pruning_report.json` tells.
        shards: The files of weights.
        companions: All other files, relative to `path`: tokenizer, chat template, reports.
    """

    path: Path
    config: dict[str, Any]
    shards: list[Shard]
    companions: list[Path]

    @property
    def num_tensors(self) -> int | None:
        """Number of tensors; `None` where only reading them would tell."""
        counts = [shard.num_tensors for shard in self.shards]
        return None if None in counts else sum(count or 0 for count in counts)

    @property
    def num_bytes(self) -> int:
        """Size of the files of weights, in bytes."""
        return sum(shard.num_bytes for shard in self.shards)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Read all tensors with their names, with one file at a time in memory."""
        for shard in self.shards:
            yield from shard.read().items()

    def pretrained_config(self) -> PreTrainedConfig:
        """The configuration as transformers' object.

        Raises:
            FormatError: transformers knows no such configuration.
        """
        try:
            if self.path.is_dir():
                return AutoConfig.from_pretrained(self.path)
            return AutoConfig.for_model(**self.config)
        except ValueError as error:
            raise FormatError(
                f"{self.path}: transformers does not know this configuration (`model_type` "
                f"{self.config.get('model_type')!r}), and code of the checkpoint is never run: "
                f"{str(error).splitlines()[0]}"
            ) from error

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
        if problem := missing_weights(self.path, model, loading):
            raise FormatError(problem)
        return model


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Find the weights of a Hugging Face directory, or of a Lightning checkpoint of a `CausalLM`.

    A directory without a `config.json` is one of a user's own module, as pruning writes it:
    `model.safetensors` and `pruning_report.json`. Of several forms safetensors are taken first.
    Nothing is unpickled but tensors and plain containers.

    Raises:
        FileNotFoundError: Nothing of that kind is there.
        FormatError: The files are damaged, incomplete, or hold something else.
    """
    path = Path(path).expanduser()
    if path.suffix == ".ckpt" and path.is_file():
        return _lightning_checkpoint(path)
    if (path / "config.json").is_file():
        config = _read_json(path / "config.json")
    elif (path / "model.safetensors").is_file() and (path / pruning_report.NAME).is_file():
        config = {}
    else:
        raise FileNotFoundError(
            f"`CKPT`: {path} is neither a Hugging Face directory with a config.json, nor what "
            "pruning writes of a module of your own (model.safetensors and "
            f"{pruning_report.NAME}), nor a Lightning .ckpt file."
        )
    shards = [_shard(file) for file in _weight_files(path)]
    return Checkpoint(path, config, shards, _companions(path))


def _weight_files(path: Path) -> list[Path]:
    """The files that transformers would read, in its order of preference."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (path / name).is_file():
            return [path / name]
        index = path / f"{name}.index.json"
        if index.is_file():
            names = sorted(set(_read_json(index).get("weight_map", {}).values()))
            if missing := [name for name in names if not (path / name).is_file()]:
                raise FormatError(f"{index} names files that are not there: {', '.join(missing)}.")
            if not names:
                raise FormatError(f"{index} names no files: its `weight_map` is empty.")
            return [path / name for name in names]
    raise FileNotFoundError(
        f"`CKPT`: {path} holds no weights: expected model.safetensors or pytorch_model.bin, or an "
        "index of their shards."
    )


def _shard(file: Path) -> Shard:
    num_bytes = file.stat().st_size
    if file.suffix != ".safetensors":
        return Shard(_safetensors_name(file.name), lambda: _load_pickle(file), {}, None, num_bytes)
    try:
        with safe_open(file, framework="pt") as opened:
            metadata, count = opened.metadata() or {}, len(opened.keys())
    except Exception as error:  # safetensors raises its own error, which is no public class
        raise FormatError(f"{file} is no complete safetensors file: {error}") from error
    return Shard(file.name, lambda: load_file(file), metadata, count, num_bytes)


def pickle_name(name: str) -> str:
    """The name of the pickle, or index of pickles, in place of a safetensors file."""
    return f"pytorch_{name}".replace(".safetensors", ".bin")


def _safetensors_name(name: str) -> str:
    return name.removeprefix("pytorch_").replace(".bin", ".safetensors")


def _load_pickle(file: Path) -> dict[str, Any]:
    try:
        return read(file)
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
    """The files beside the model's, with the weights of a sentence encoder's further modules."""
    modules = (path / "modules.json").is_file()
    files = []
    for file in sorted(path.rglob("*")):
        relative = file.relative_to(path)
        hidden = any(part.startswith(".") for part in relative.parts)
        weights = file.suffix in _WEIGHTS or file.name.endswith(".index.json")
        replaced = str(relative) in _REPLACED or (weights and (file.parent == path or not modules))
        if file.is_file() and not hidden and not replaced:
            files.append(relative)
    return files


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FormatError(f"{path} is no JSON file: {error}") from error
    if not isinstance(content, dict):
        raise FormatError(f"{path} holds no JSON object.")
    return content
