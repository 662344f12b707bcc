"""Models, configurations and tokenizers from directories and the hub, or a message that helps."""

import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import cached_file

from mrp_lightning.environment import why_no_hub
from mrp_lightning.errors import DataError, FormatError, OptionError, TargetError
from mrp_lightning.models.damage import damaged_files
from mrp_lightning.models.formats import register_format, why_not_readable
from mrp_lightning.models.gguf import find_gguf, has_tokenizer, reading


def make_config(values: dict[str, Any]) -> PreTrainedConfig:
    """A configuration from its values.

    Args:
        values: The content of a `config.json`.

    Raises:
        OptionError: `values` has no `model_type`.
    """
    if "model_type" not in values:
        raise OptionError(
            "`model` given as a dictionary is a transformers configuration and needs `model_type`, "
            f"such as llama. Got the keys {sorted(values)}."
        )
    return AutoConfig.for_model(**values)


def load_config(source: str, **hub: Any) -> PreTrainedConfig:
    """The configuration of a model. If it is quantized, its format is registered.

    Args:
        source: Directory, hub id or GGUF file of the model.
        **hub: `revision` and `trust_remote_code`.

    Raises:
        FileNotFoundError: `source` is none of these.
        FormatError: transformers does not know the model, or may not run the code that comes with
            it; or the GGUF file is damaged.
        OptionError: The directory holds several GGUF files and nothing else.
        DependencyError: The extra that reads GGUF files is not installed.
    """
    if file := find_gguf(source):
        with reading(file) as place:
            return AutoConfig.from_pretrained(**place)
    path = Path(source).expanduser()
    if path.exists() and not (path / "config.json").is_file():
        raise FileNotFoundError(
            f"`model`: {source} holds no config.json. Expected a Hugging Face model directory, or "
            "a .gguf file; a Lightning .ckpt is given as `ckpt_path`."
        )
    if not path.exists() and _is_path(source):
        raise FileNotFoundError(
            f"`model`: there is no directory {source}. Give a model directory that exists, or a "
            "hub id (OWNER/NAME, where OWNER is no directory here)."
        )
    with _explain_missing_files(source):
        try:
            config = AutoConfig.from_pretrained(**_place(source), **hub)
        except ValueError as error:
            raise FormatError(f"`model`: {source} cannot be loaded. {error}") from error
    register_format(config)
    return config


def _place(source: str | os.PathLike[str]) -> dict[str, Any]:
    """Where `from_pretrained` is to look: a directory, the hub, or its cache if it is away."""
    path = Path(source).expanduser()
    if path.exists():
        return {"pretrained_model_name_or_path": str(path)}
    return {
        "pretrained_model_name_or_path": str(source),
        "local_files_only": why_no_hub() is not None,
    }


def _cause(source: str | os.PathLike[str], error: OSError) -> str:
    """Why a source gives nothing: transformers' reason, or that the hub is away."""
    is_here = Path(source).expanduser().exists()
    return str(error) if is_here else why_no_hub() or str(error)


def _is_path(source: str) -> bool:
    """Whether a name that does not exist here can only have been meant as a path.

    The hub is then not asked, which takes long where it cannot be reached. `runs/x` has the form of
    a hub id; where there is a directory `runs`, it is taken for a path in it.
    """
    path = Path(source).expanduser()
    starts_like_one = path.is_absolute() or source.startswith((".", "~"))
    return starts_like_one or source.count("/") > 1 or ("/" in source and path.parent.is_dir())


@contextmanager
def _explain_missing_files(source: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FileNotFoundError(
            f"`model`: {source} is neither a complete local model directory nor a model that the "
            f"hub gives. Check the name, or download it first. ({_cause(source, error)})"
        ) from error


@contextmanager
def _explain_damaged_files(source: str, revision: str | None) -> Iterator[None]:
    """Name the files that cannot be read; what is raised says at best what is wrong in one."""
    try:
        yield
    except (SafetensorError, pickle.UnpicklingError, EOFError, RuntimeError) as error:
        path: Any = Path(source).expanduser()
        if not path.is_dir():  # the hub's files lie beside each other in its cache
            path = Path(str(cached_file(source, "config.json", revision=revision))).parent
        damaged = damaged_files(path)
        if not damaged:
            raise
        listed = "\n".join(f"  {file}: {reason}" for file, reason in damaged.items())
        raise FormatError(
            f"`model`: {len(damaged)} of the files with the weights of {source} cannot be read. "
            f"Fetch or write them again:\n{listed}"
        ) from error


def load_model(source: str, dtype: torch.dtype | None, **options: Any) -> PreTrainedModel:
    """A causal language model, every weight of it from the checkpoint.

    Args:
        source: Directory, hub id or GGUF file of the model.
        dtype: Precision to load the weights in; `None` keeps the checkpoint's, which of a GGUF file
            is bfloat16, whatever it is quantized to.
        **options: `revision`, `trust_remote_code` and `attn_implementation`.

    Raises:
        FileNotFoundError: `source` is none of these.
        TargetError: The checkpoint is quantized, or lacks weights that the model needs.
        FormatError: Files of the checkpoint are damaged, or hold more than tensors.
        OptionError: The directory holds several GGUF files and nothing else.
        DependencyError: The extra that reads GGUF files is not installed.
    """
    if file := find_gguf(source):
        return _load_gguf(file, dtype, **options)
    hub = {key: value for key, value in options.items() if key != "attn_implementation"}
    config = load_config(source, **hub)
    if reason := why_not_readable(config):
        raise TargetError(f"`model`: the checkpoint {source} is {reason}")
    published = config.dtype
    with _explain_missing_files(source), _explain_damaged_files(source, hub.get("revision")):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            **_place(source), dtype=dtype or "auto", output_loading_info=True, **options
        )
    model, loading = loaded
    if problem := missing_weights(source, model, loading):
        raise TargetError(f"`model`: {problem}")
    # A checkpoint loaded in another precision is still saved in its own (see saving.py).
    model.config.dtype = published or model.dtype
    return model


def _load_gguf(file: Path, dtype: torch.dtype | None, **options: Any) -> PreTrainedModel:
    """The model of a GGUF file, dequantized: nothing of it tells that it was quantized."""
    options = {key: value for key, value in options.items() if key == "attn_implementation"}
    published = torch.bfloat16
    with reading(file) as place:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            **place,
            dtype=dtype or published,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
            **options,
        )
    model, loading = loaded
    if problem := missing_weights(file, model, loading):
        raise TargetError(f"`model`: {problem}")
    model.name_or_path = model.config.name_or_path = str(file)
    model.config.dtype = published
    return model


def missing_weights(
    source: str | os.PathLike[str], model: PreTrainedModel, loading: Mapping[str, Any]
) -> str | None:
    """Say which of the model's weights a checkpoint lacks; `None` if it lacks none.

    Args:
        source: Directory or hub id of the checkpoint.
        model: The model that was loaded from it.
        loading: What `from_pretrained(output_loading_info=True)` gives beside the model.
    """
    missing = sorted(loading["missing_keys"])
    if not missing:
        return None
    return (
        f"the checkpoint {source} lacks weights of {type(model).__name__}, which would be random: "
        f"{', '.join(missing)}."
    )


def load_tokenizer(source: str | os.PathLike[str] | PreTrainedTokenizerBase, **hub: Any) -> Any:
    """The tokenizer of a directory, hub id or GGUF file.

    Args:
        source: Directory, hub id or GGUF file; a tokenizer is given back as it is.
        **hub: `revision` and `trust_remote_code`.

    Raises:
        FileNotFoundError: There is no tokenizer.
        DataError: There is one that cannot be loaded.
        FormatError: The GGUF file is damaged, or transformers cannot read it.
        TypeError: `source` is none of the above.
    """
    if isinstance(source, PreTrainedTokenizerBase):
        return source
    if not isinstance(source, str | os.PathLike):
        raise TypeError(
            "`tokenizer` must be a tokenizer of transformers, or the directory or hub id of one. "
            f"Got {type(source).__name__}."
        )
    if file := find_gguf(str(source)):
        try:
            with reading(file) as place:
                return AutoTokenizer.from_pretrained(**place)
        except FormatError as error:
            if has_tokenizer(file):
                raise
            raise FileNotFoundError(
                f"`tokenizer`: {file} gives no tokenizer, it holds only weights. Name the "
                "directory or hub id of one."
            ) from error
    path = Path(source).expanduser()
    if not path.exists() and _is_path(str(source)):
        raise FileNotFoundError(
            f"`tokenizer`: {source} gives no tokenizer, there is no such directory. Name the "
            "directory or hub id of one."
        )
    try:
        return AutoTokenizer.from_pretrained(**_place(source), **hub)
    except OSError as error:
        raise FileNotFoundError(
            f"`tokenizer`: {source} gives no tokenizer. Name the directory or hub id of one. "
            f"({_cause(source, error)})"
        ) from error
    except ValueError as error:
        raise DataError(
            f"`tokenizer`: the tokenizer of {source} cannot be loaded; its files are incomplete or "
            f"damaged, or need an option. ({error})"
        ) from error


def tokenizer_beside(source: str, **hub: Any) -> Any:
    """The tokenizer that a model comes with, or `None` where it comes without one.

    Args:
        source: Directory, hub id or GGUF file of the model.
        **hub: `revision` and `trust_remote_code`.

    Raises:
        DataError: There is one that cannot be loaded.
    """
    path = Path(source).expanduser()
    if path.is_dir() and find_gguf(source) is None:
        return load_tokenizer(path, **hub) if any(path.glob("tokenizer*")) else None
    try:
        return load_tokenizer(source, **hub)
    except FileNotFoundError:
        return None


def as_dtype(name: torch.dtype | str | None) -> torch.dtype | None:
    """The floating dtype of a name such as `bfloat16`; a dtype and `None` are given back.

    Raises:
        OptionError: torch has no floating dtype of that name.
    """
    if name is None or isinstance(name, torch.dtype):
        return name
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise OptionError(
            f"`dtype` must be a floating type such as float32 or bfloat16. Got {name!r}."
        )
    return found
