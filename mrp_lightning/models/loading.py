"""Models and configurations from directories and the hub, or a message that helps."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from mrp_lightning.errors import FormatError, OptionError, TargetError
from mrp_lightning.models.checkpoint import (
    found_at,
    is_path,
    refuse_adapter,
    register_format,
    why_not_found,
    why_not_readable,
)
from mrp_lightning.models.gguf import find_gguf, gguf_config, gguf_model
from mrp_lightning.models.integrity import (
    check_files,
    check_values,
    explained_damage,
    misfits,
    not_loaded,
)
from mrp_lightning.models.skeleton import build_without_weights


def make_config(values: dict[str, Any]) -> PreTrainedConfig:
    """A configuration from the content of a `config.json`.

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
        raise FormatError(not_loaded("the dictionary", error)) from error


def load_config(source: str, **hub: Any) -> PreTrainedConfig:
    """The configuration of a model. If it is quantized, its format is registered.

    Args:
        source: Directory, hub id or GGUF file of the model.
        **hub: `revision` and `trust_remote_code`.

    Raises:
        FileNotFoundError: `source` is none of these.
        FormatError: transformers does not know the model, or may not run the code that comes with
            it; or the GGUF file is damaged. `find_gguf` and `reading` raise more.
    """
    if file := find_gguf(source):
        return gguf_config(file)
    path = Path(source).expanduser()
    refuse_adapter(source, "model")
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
    with _explained_absence(source):
        try:
            place = found_at(source)
            check_values(PreTrainedConfig.get_config_dict(**place, **hub)[0], source)
            # Without a word on it, transformers would ask on the terminal.
            config = AutoConfig.from_pretrained(**place, **{"trust_remote_code": False} | hub)
        except (OSError, FormatError):
            raise
        except Exception as error:  # each configuration checks its values in its own way
            raise FormatError(not_loaded(source, error)) from error
    register_format(config)
    return config


@contextmanager
def _explained_absence(source: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FileNotFoundError(
            f"`model`: {source} is neither a complete local model directory nor a model that the "
            f"hub gives. Check the name, or download it first. ({why_not_found(source, error)})"
        ) from error


def load_model(source: str, dtype: torch.dtype | None, **options: Any) -> PreTrainedModel:
    """A causal language model, every weight of it from the checkpoint.

    Args:
        source: Directory, hub id or GGUF file of the model.
        dtype: Precision to load the weights in; `None` keeps the checkpoint's, which of a GGUF file
            is bfloat16, whatever it is quantized to.
        **options: `revision`, `trust_remote_code` and `attn_implementation`.

    Raises:
        TargetError: The checkpoint is quantized, lacks weights that the model needs, or holds more
            blocks than its configuration makes.
        FormatError: Files of the checkpoint are damaged, hold more than tensors, or do not fit its
            configuration; or its index names files outside of its directory. `load_config` raises
            more.
    """
    if file := find_gguf(source):
        return gguf_model(file, dtype, options.get("attn_implementation"))
    hub = {key: value for key, value in options.items() if key != "attn_implementation"}
    config = load_config(source, **hub)
    if reason := why_not_readable(config):
        raise TargetError(f"`model`: the checkpoint {source} is {reason}")
    published = config.dtype
    if not hub.get("trust_remote_code"):  # code that is trusted may be of any size and make
        _check_files(source, config)
    with _explained_absence(source), explained_damage(source, hub.get("revision")):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            **found_at(source),
            dtype=dtype or "auto",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # which is told below, by name
            **options,
        )
    model, loading = loaded
    if problem := misfits(source, model, loading):
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
