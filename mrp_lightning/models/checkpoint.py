"""Locate the files of a checkpoint, and build its model from the configuration, without weights."""

import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError, safe_open
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from mrp_lightning.environment import why_no_hub
from mrp_lightning.errors import FormatError, first_line
from mrp_lightning.storage.json_files import read_json
from mrp_lightning.upstream.other_names import from_config

_OURS = {"mrp_bitmask", "mrp_bitmask4", "mrp_sparse24"}
"""The `quant_method` of each packed format, which `mrp_sparse` registers with transformers."""


def found_at(source: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the arguments with which `from_pretrained` reads a directory or a hub repository.

    Without a connection, only the hub's cache is read. A directory is made absolute, since it
    becomes the model's `name_or_path`, which is read again when the model is saved.
    """
    path = Path(source).expanduser()
    if path.exists():
        return {"pretrained_model_name_or_path": str(path.absolute())}
    away = why_no_hub() is not None
    return {"pretrained_model_name_or_path": str(source), "local_files_only": away}


def why_not_found(source: str | os.PathLike[str], error: OSError) -> str:
    """Return why a source cannot be read: transformers' reason, or that the hub is unreachable."""
    is_here = Path(source).expanduser().exists()
    return str(error) if is_here else why_no_hub() or str(error)


def directory_of(source: str, revision: str | None = None) -> Path | None:
    """Return a source's directory, its own or that in the hub's cache; `None` if neither exists."""
    if not source:
        return None
    if (directory := Path(source).expanduser()).is_dir():
        return directory
    try:
        cached = try_to_load_from_cache(source, "config.json", revision=revision)
    except HFValidationError:  # the name is no hub id: a directory that was deleted
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def weight_files(directory: Path) -> list[Path]:
    """Return a directory's files from which transformers would read weights; empty if none.

    Links are followed: in the hub's cache all files are links. The files that an index names must
    lie in the directory, so that a malicious checkpoint cannot make this machine read other files.
    """
    file = _weights_or_index(directory)
    if file is None:
        return []
    return _in_index(file) if file.suffix == ".json" else [file]


def _weights_or_index(directory: Path) -> Path | None:
    """Return the file that transformers would read for the weights: all of them, or their index."""
    names = ("model.safetensors", "pytorch_model.bin")
    files = (directory / f"{name}{end}" for name in names for end in ("", ".index.json"))
    return next((file for file in files if file.is_file()), None)


def _in_index(index: Path) -> list[Path]:
    content = read_json(index, "fetch it again")
    weight_map = content.get("weight_map", {})
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise FormatError(
            f"{index}: expected in `weight_map` the name of a file for each tensor. Fetch it again."
        )
    names = sorted(set(weight_map.values()))
    if not names:
        raise FormatError(f"{index} names no files: its `weight_map` is empty.")
    # The name alone is checked, not the target of a link: in the hub's cache each file is a link to
    # a directory of blobs outside. This check comes before the next one, which would touch the
    # named file.
    if outside := [name for name in names if Path(name).is_absolute() or ".." in Path(name).parts]:
        raise FormatError(
            f"{index} names files outside of its directory, which are not read: "
            f"{', '.join(map(repr, outside))}. Do not use this checkpoint, or put the files into "
            "the directory and name them there."
        )
    if missing := [name for name in names if not (index.parent / name).is_file()]:
        raise FormatError(f"{index} names files that are not there: {', '.join(missing)}.")
    if not isinstance(content.get("metadata"), dict):
        raise FormatError(f"{index}: expected an object as `metadata`. Fetch it again.")
    return [index.parent / name for name in names]


def stored_names(directory: Path) -> Iterator[str]:
    """Yield the names of the tensors in a directory, from an index or safetensors headers.

    The weight files themselves need not exist. Names in pickled files are left out, since they
    would have to be loaded whole.
    """
    file = _weights_or_index(directory)
    if file is None:
        return
    if file.suffix == ".json":
        weight_map = read_json(file, "fetch it again").get("weight_map")
        yield from weight_map if isinstance(weight_map, dict) else ()
    elif file.suffix == ".safetensors":
        with suppress(SafetensorError), safe_open(file, framework="pt") as opened:
            yield from opened.keys()


def names_in_model(
    model: PreTrainedModel, conversions: Sequence[Any]
) -> Callable[[str], tuple[str, bool]]:
    """Return a function that maps the name of a tensor in a file to its name in a model.

    The function also returns whether the model's tensor is computed from the stored one, alone or
    with others. `conversions` are transformers' conversions of stored tensors to a model's weights.
    """
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    prefix, state = model.base_model_prefix, model.state_dict()

    def name_in_model(stored: str) -> tuple[str, bool]:
        name, converter = rename_source_key(stored, renamings, converters, prefix, state)
        # A rule of an old format may also match a name that is the model's own already: that stays.
        if name not in state and stored in state:
            return stored, False
        return name, converter is not None

    return name_in_model


def register_format(config: Any) -> None:
    """Import the package that registers a checkpoint's format, if it is one of this project's.

    transformers discovers no plug-ins: to `from_pretrained`, a format is unknown until the package
    that registers it has been imported. A dense checkpoint does not pay for it.
    """
    if _method(_quantization(config)) in _OURS:
        import mrp_sparse  # noqa: F401


def why_not_readable(config: Any) -> str | None:
    """Return why the weights of a checkpoint cannot be read as matrices, with the next step.

    The result is `None` if it is not quantized, its format is one of this project's, or its
    configuration asks transformers to dequantize it.
    """
    settings = _quantization(config)
    if not settings or settings.get("dequantize"):
        return None
    method = _method(settings)
    if method in _OURS:
        return None
    return (
        f"quantized ({method}), and its weights cannot be read as matrices: load it in 16 bits. "
        "Name the checkpoint that it was quantized from, or dequantize this one with transformers "
        "and save it, or give the dequantized model itself."
    )


def _quantization(config: Any) -> dict[str, Any]:
    settings = getattr(config, "quantization_config", None) or {}
    return settings if isinstance(settings, dict) else settings.to_dict()


def _method(settings: dict[str, Any]) -> str:
    return str(settings.get("quant_method", "by an unknown method"))


def model_class(config: PreTrainedConfig) -> Any:
    """Return the class of a model: the one named in `architectures`, else an auto class."""
    architectures = config.architectures if isinstance(config.architectures, list) else []
    named = getattr(transformers, str(next(iter(architectures), "")), None)
    if inspect.isclass(named) and issubclass(named, PreTrainedModel):
        return named
    # A class that transformers does not have is one of the checkpoint's own code, which `auto_map`
    # lists. An auto class is used there: it alone asks whether this code may run.
    has_own_code = "AutoModelForCausalLM" in getattr(config, "auto_map", {})
    is_causal = has_own_code or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForCausalLM if is_causal else AutoModel


def build_without_weights(
    config: PreTrainedConfig, *, kind: Any = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Build a model on the meta device: no weights are read or allocated, whatever its size.

    `kind` is the class of the model, by default that of `model_class`. A FormatError is raised if
    transformers cannot build it.
    """
    kind = kind or model_class(config)
    try:
        with torch.device("meta"):
            # Auto classes choose the class themselves, by a public constructor.
            if kind in (AutoModel, AutoModelForCausalLM):
                return kind.from_config(config, trust_remote_code=trust_remote_code)
            return from_config(kind, config)
    except Exception as error:  # of any type, from the model's own code
        raise FormatError(
            f"No model can be built from the configuration {type(config).__name__} (architectures "
            f"{config.architectures}): {first_line(error)}"
        ) from error


def text_config(config: PreTrainedConfig) -> PreTrainedConfig | None:
    """Return the configuration of a model's text part, its own if it has no other part.

    The result is `None` if there are several, such as the encoder and the decoder of MusicGen.
    """
    try:
        return config.get_text_config()
    except ValueError:  # transformers' error for a configuration of several text models
        return None


def longest_sequence(config: PreTrainedConfig) -> int | None:
    """Return the longest sequence, in tokens, that a model can read, by its configuration.

    For learned positions, this is the size of their table; for rotary positions, which have no
    limit, the length for which the model was made. For a multimodal model, the text part counts.
    The result is `None` if nothing limits the length: attention is biased by distance (BLOOM,
    Falcon with `alibi`, T5), or the model has a state instead of positions (Mamba). It is `None`,
    too, for a model with several text parts, each of which may have a limit of its own.
    """
    text = text_config(config)
    if getattr(text, "alibi", False):
        return None
    # MPT biases attention by distance, too, but transformers computes `max_seq_len` biases.
    limit: Any = getattr(text, "max_position_embeddings", getattr(text, "max_seq_len", None))
    return limit if isinstance(limit, int) and limit > 0 else None
