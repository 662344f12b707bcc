"""Models and configurations from directories and the hub, or a message that helps."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import cached_file

from mrp_lightning.environment import is_out_of_memory
from mrp_lightning.errors import FormatError, OptionError, TargetError
from mrp_lightning.models.damage import damaged_files
from mrp_lightning.models.dequantized import dequantized
from mrp_lightning.models.formats import register_format, why_not_readable
from mrp_lightning.models.gguf import find_gguf, reading
from mrp_lightning.models.location import cause, is_path, place_of
from mrp_lightning.models.plausible import check_files, check_size, check_values
from mrp_lightning.models.skeleton import build_without_weights


def make_config(values: dict[str, Any]) -> PreTrainedConfig:
    """A configuration from its values.

    Args:
        values: The content of a `config.json`.

    Raises:
        OptionError: `values` has no `model_type`.
        FormatError: transformers can make no configuration of them.
    """
    if "model_type" not in values:
        raise OptionError(
            "`model` given as a dictionary is a transformers configuration and needs `model_type`, "
            f"such as llama. Got the keys {sorted(values)}."
        )
    check_values(values, "the dictionary")
    try:
        return AutoConfig.for_model(**values)
    except Exception as error:  # each configuration checks its values in its own way
        raise FormatError(f"`model`: {_not_loaded('the dictionary', error)}") from error


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
        return _gguf_config(file)
    path = Path(source).expanduser()
    if path.exists() and not (path / "config.json").is_file():
        raise FileNotFoundError(
            f"`model`: {source} holds no config.json. Expected a Hugging Face model directory, or "
            "a .gguf file; a Lightning .ckpt is given as `ckpt_path`."
        )
    if not path.exists() and is_path(source):
        raise FileNotFoundError(
            f"`model`: there is no directory {source}. Give a model directory that exists, or a "
            "hub id (OWNER/NAME, where OWNER is no directory here)."
        )
    with _explain_missing_files(source):
        try:
            place = place_of(source)
            check_values(PreTrainedConfig.get_config_dict(**place, **hub)[0], source)
            # Without a word on it, transformers would ask on the terminal.
            config = AutoConfig.from_pretrained(**place, **{"trust_remote_code": False} | hub)
        except (OSError, FormatError):
            raise
        except Exception as error:  # each configuration checks its values in its own way
            raise FormatError(f"`model`: {_not_loaded(source, error)}") from error
    register_format(config)
    return config


def _not_loaded(source: str, error: Exception) -> str:
    reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    return f"{source} cannot be loaded. {reason}"


@contextmanager
def _explain_missing_files(source: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FileNotFoundError(
            f"`model`: {source} is neither a complete local model directory nor a model that the "
            f"hub gives. Check the name, or download it first. ({cause(source, error)})"
        ) from error


@contextmanager
def explained_damage(source: str, revision: str | None) -> Iterator[None]:
    """Name the files that cannot be read, or say of what else is wrong with a model where it is.

    Args:
        source: Directory or hub id of the model.
        revision: Its revision on the hub.

    Raises:
        FormatError: What is read inside is damaged.
    """
    try:
        yield
    except Exception as error:  # transformers trusts files, and stumbles in many ways
        said = isinstance(error, OSError | ImportError | FormatError | OptionError | TargetError)
        if said or is_out_of_memory(error):
            raise
        path: Any = Path(source).expanduser()
        if not path.is_dir():  # the hub's files lie beside each other in its cache
            path = Path(str(cached_file(source, "config.json", revision=revision))).parent
        damaged = damaged_files(path)
        if not damaged:
            raise FormatError(f"`model`: {_not_loaded(source, error)}") from error
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
        FormatError: Files of the checkpoint are damaged, hold more than tensors, or do not fit its
            configuration; or its index names files outside of its directory.
        OptionError: The directory holds several GGUF files and nothing else.
        DependencyError: The extra that reads GGUF files is not installed.
    """
    if file := find_gguf(source):
        attention = options.get("attn_implementation")
        state = file.absolute(), file.stat().st_mtime_ns, file.stat().st_size
        return dequantized((state, dtype, attention), lambda: _dequantize(file, dtype, attention))
    hub = {key: value for key, value in options.items() if key != "attn_implementation"}
    config = load_config(source, **hub)
    if reason := why_not_readable(config):
        raise TargetError(f"`model`: the checkpoint {source} is {reason}")
    published = config.dtype
    if not hub.get("trust_remote_code"):  # code that is trusted may be of any size and make
        _check_files(source, config)
    with _explain_missing_files(source), explained_damage(source, hub.get("revision")):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            **place_of(source),
            dtype=dtype or "auto",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # which is told below, by name
            **options,
        )
    model, loading = loaded
    if problem := missing_weights(source, model, loading):
        raise TargetError(f"`model`: {problem}")
    # A checkpoint loaded in another precision is still saved in its own (see saving.py).
    model.config.dtype = published or model.dtype
    return model


def _check_files(source: str, config: PreTrainedConfig) -> None:
    """Refuse a directory whose files cannot be those of the model, before they are read."""
    try:
        as_dtype(config.dtype)
    except OptionError as error:
        raise FormatError(f"`model`: config.json of {source}: {error}") from error
    directory = Path(source).expanduser()
    model = build_without_weights(config, kind=AutoModelForCausalLM)
    if directory.is_dir():  # the files of the hub are not here yet
        check_files(directory, model)


def _gguf_config(file: Path) -> PreTrainedConfig:
    with reading(file) as place:
        values = PreTrainedConfig.get_config_dict(**place)[0]
    check_values(values, file)
    with reading(file) as place:
        return AutoConfig.from_pretrained(**place)


def _dequantize(file: Path, dtype: torch.dtype | None, attention: str | None) -> PreTrainedModel:
    """The model of a GGUF file: nothing of it tells that it was quantized."""
    options = {"attn_implementation": attention} if attention else {}
    published = torch.bfloat16
    # Its weights are quantized, to some bits each.
    check_size(build_without_weights(_gguf_config(file)), 8 * file.stat().st_size, file)
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
    """Say which of the model's weights a checkpoint lacks, or has in another shape, or `None`.

    Args:
        source: Directory or hub id of the checkpoint.
        model: The model that was loaded from it.
        loading: What `from_pretrained(output_loading_info=True)` gives beside the model.
    """
    if misfits := sorted(loading["mismatched_keys"]):
        shapes = (f"{name} {tuple(found)}, not {tuple(made)}" for name, found, made in misfits)
        return (
            f"the checkpoint {source} has weights of other shapes than its configuration gives "
            f"{type(model).__name__}: {'; '.join(shapes)}. They are not of one model: fetch them "
            "again."
        )
    missing = sorted(loading["missing_keys"])
    if not missing:
        return None
    return (
        f"the checkpoint {source} lacks weights of {type(model).__name__}, which would be random: "
        f"{', '.join(missing)}."
    )


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
