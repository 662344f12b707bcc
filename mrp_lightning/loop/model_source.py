"""What a `CausalLM` is made of: a name, a file, a configuration, or a model that is loaded."""

import os
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from mrp_lightning.errors import OptionError
from mrp_lightning.models.gguf import located
from mrp_lightning.models.loading import as_dtype, load_model, make_config
from mrp_lightning.models.streamed_blocks import StreamedBlocks
from mrp_lightning.models.streaming import load_streamed
from mrp_lightning.targets.blocks import find_blocks


class Made(NamedTuple):
    """A model, and where it comes from.

    Attributes:
        model: The Hugging Face model.
        streamed: Its blocks that stay in files, `None` if all of it is in memory.
        source: The directory, hub id or GGUF file that it was read from, if it was.
    """

    model: Any
    streamed: StreamedBlocks | None
    source: str | None


def make_model(
    model: dict[str, Any] | str | os.PathLike[str] | PreTrainedConfig | torch.nn.Module,
    *,
    dtype: str | torch.dtype | None,
    revision: str | None,
    trust_remote_code: bool,
    gguf_file: str | None,
    attn_implementation: str | None,
    streaming: bool,
) -> Made:
    """Load or make a model; `CausalLM` says what of, and what is raised."""
    source = os.fspath(model) if isinstance(model, str | os.PathLike) else None
    if source is not None:
        source = located(source, gguf_file, revision)
    elif gguf_file is not None:
        raise OptionError("`gguf_file` needs `model` to be the directory or hub id of it.")
    options: dict[str, Any] = {}
    if attn_implementation:
        options["attn_implementation"] = attn_implementation
    if source is not None:
        options |= {"revision": revision, "trust_remote_code": trust_remote_code}
        if streaming:
            streamed = load_streamed(source, as_dtype(dtype), _blocks_by_name, **options)
            return Made(*streamed, source)
        return Made(load_model(source, as_dtype(dtype), **options), None, source)
    if streaming:
        raise OptionError(
            "`streaming` reads blocks from files: it needs `model` to be a directory or hub id."
        )
    if isinstance(model, dict | PreTrainedConfig):
        config = model if isinstance(model, PreTrainedConfig) else make_config(model)
        dtype = as_dtype(dtype) or torch.float32
        return Made(AutoModelForCausalLM.from_config(config, dtype=dtype, **options), None, None)
    if isinstance(model, PreTrainedModel):
        loaded: Any = model
        if revision is not None:
            raise OptionError("`revision` needs `model` to be a hub id; this model is loaded.")
        if attn_implementation:
            loaded.set_attn_implementation(attn_implementation)
        if dtype is not None:
            loaded.to(as_dtype(dtype))
        return Made(loaded, None, None)
    raise TypeError(
        "`model` must be a path, a hub id, a transformers configuration or a transformers "
        f"model. Got {type(model).__name__}; another module needs its own LightningModule, "
        "with a `predict_step` that calls it."
    )


def _blocks_by_name(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    return {block.name: block.module for block in find_blocks(model)}
