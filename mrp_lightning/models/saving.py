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

    Raises:
        OptionError: `dtype` names no floating dtype.
    """
    stored = model.config.dtype
    dtype = as_dtype(dtype) or as_dtype(stored) or model.dtype
    state = None if model.dtype == dtype else _cast(model.state_dict(), dtype)
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


def _cast(state: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Floating tensors in `dtype`; tensors that shared memory still share it, so ties survive."""
    cast: dict[Any, torch.Tensor] = {}
    result = {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if key not in cast or not tensor.numel():
            cast[key] = tensor.to(dtype) if tensor.is_floating_point() else tensor
        result[name] = cast[key]
    return result
