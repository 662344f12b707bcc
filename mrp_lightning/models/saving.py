"""A model back to disk, as a Hugging Face directory."""

import os
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from mrp_lightning.models.loading import as_dtype


def save_pretrained(
    model: PreTrainedModel,
    directory: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    dtype: torch.dtype | str | None = None,
    card: str | None = None,
    state: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write a Hugging Face directory that `from_pretrained` loads.

    Args:
        model: The model; it is not changed.
        directory: An existing directory, as `save_directory` gives it.
        tokenizer: Tokenizer to write beside the model, with its chat template.
        dtype: Precision to store floating weights in. `None` is that of the checkpoint which the
            model came from (`model.config.dtype`), so that a model that was calibrated in another
            precision is stored as it was published.
        card: Text of the model card, `README.md`.
        state: The weights to write, by their names in the model; `None` means all.

    Raises:
        OptionError: `dtype` names no floating dtype.
    """
    stored = model.config.dtype
    dtype = as_dtype(dtype) or stored_dtype(model)
    if model.dtype != dtype:
        state = cast(model.state_dict() if state is None else state, dtype)
    try:
        model.save_pretrained(directory, state_dict=state, max_shard_size="5GB")
        model.config.dtype = dtype  # save_pretrained had put the dtype in memory there
        model.config.save_pretrained(directory)
    finally:
        model.config.dtype = stored
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
    if card is not None:
        (Path(directory) / "README.md").write_text(card, encoding="utf-8")


def stored_dtype(model: PreTrainedModel) -> torch.dtype:
    """The precision in which a model was published, and in which it is stored."""
    return as_dtype(model.config.dtype) or model.dtype


def cast(state: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Floating tensors in `dtype`; tensors that shared memory still share it, so ties survive."""
    cast: dict[Any, torch.Tensor] = {}
    result = {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if key not in cast or not tensor.numel():
            cast[key] = tensor.to(dtype) if tensor.is_floating_point() else tensor
        result[name] = cast[key]
    return result
