"""Load what `CausalLM` is given, a name, a configuration or a model, as a model and a tokenizer."""

import os
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from mrp_lightning.errors import OptionError, TargetError
from mrp_lightning.models.gguf import located
from mrp_lightning.models.loading import (
    as_dtype,
    find_tokenizer,
    load_model,
    load_tokenizer,
    make_config,
)
from mrp_lightning.models.streaming import FindBlocks, StreamedBlocks, load_streamed
from mrp_lightning.upstream.torch_names import uncompiled


def load_causal(
    model: Any,
    tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None,
    find_blocks: FindBlocks,
    *,
    dtype: str | torch.dtype | None,
    gguf_file: str | None,
    attn_implementation: str | None,
    streaming: bool,
    **hub: Any,
) -> tuple[Any, Any, StreamedBlocks | None, str | dict[str, Any], str | None]:
    """Load a causal language model and its tokenizer.

    Arguments and errors are those of `CausalLM`; `find_blocks` returns the blocks to stream.

    Returns:
        The model; the tokenizer; the blocks that stay in files, if they do; the location of the
        model's files, else its configuration; and the location of another tokenizer than its own.
    """
    location, streamed = None, None
    if isinstance(model, str | os.PathLike):
        location = located(os.fspath(model), gguf_file, hub["revision"])
    elif gguf_file is not None:
        raise OptionError("`gguf_file` needs `model` to be the directory or hub id of it.")
    elif streaming:
        raise OptionError(
            "`streaming` reads blocks from files: it needs `model` to be a directory or hub id."
        )
    kind, options = as_dtype(dtype), dict[str, Any]()
    if attn_implementation:
        options["attn_implementation"] = attn_implementation
    if location is not None and streaming:
        loaded, streamed = load_streamed(location, kind, find_blocks, **options, **hub)
    elif location is not None:
        loaded = load_model(location, kind, **options, **hub)
    elif isinstance(model, dict | PreTrainedConfig):
        config = make_config(model) if isinstance(model, dict) else model
        # Random weights have no precision of a checkpoint to keep.
        options["dtype"] = kind or torch.float32
        loaded = AutoModelForCausalLM.from_config(config, **options)
    else:
        _check_loaded(model, hub["revision"])
        if attn_implementation:
            # After all checks, since it changes the caller's model.
            model.set_attn_implementation(attn_implementation)
        loaded = model if kind is None else model.to(kind)
    if tokenizer is not None:
        read = load_tokenizer(tokenizer, **hub)
    else:
        own = location or loaded.name_or_path
        read = find_tokenizer(own, **hub) if own else None
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        tokenizer = tokenizer.name_or_path
    name = os.fspath(tokenizer) if tokenizer else None
    return loaded, read, streamed, location or loaded.config.to_dict(), name


def _check_loaded(model: Any, revision: str | None) -> None:
    """Raise for an object that is no causal language model of transformers with values."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            "`model` must be a path, a hub id, a transformers configuration or a transformers "
            f"model. Got {type(model).__name__}; {_next_step(model)}"
        )
    if model.config.is_encoder_decoder:
        raise TargetError(
            f"`model`: a {type(model).__name__} reads two texts, by its encoder and its decoder, "
            "and a CausalLM gives it one. Prune the model itself, with batches of `input_ids` and "
            "`decoder_input_ids`: `Trainer.predict(model, loader, callbacks=[…])`."
        )
    empty = [name for name, p in model.named_parameters() if p.is_meta]
    if empty and len(empty) == len(list(model.parameters())):  # `make_plan` lists some
        more = f" and {len(empty) - 3} more" if len(empty) > 3 else ""
        raise TargetError(
            f"`model` is on the meta device, without values: {', '.join(empty[:3])}{more}. Load it "
            "with `from_pretrained`, or give its path, with `streaming=True` if it is larger than "
            "memory."
        )
    if revision is not None:
        raise OptionError("`revision` needs `model` to be a hub id; this model is loaded.")


def _next_step(module: Any) -> str:
    """Return the next step for a module that is no model of transformers, for the message."""
    if isinstance(uncompiled(module), PreTrainedModel):
        return "give the model before `torch.compile`, which is `model._orig_mod`."
    if callable(getattr(module, "merge_and_unload", None)):
        return "give `model.merge_and_unload()`, which has the adapters in its weights."
    return "another module needs its own LightningModule, with a `predict_step` that calls it."
