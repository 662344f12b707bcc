"""A model back to disk, as a Hugging Face directory."""

import os
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from mrp_lightning.models.loading import as_dtype
from mrp_lightning.models.precision import cast, stored_dtype, wider_dtypes


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
            model came from (`model.config.dtype`, and float32 where its files have that), so that
            a model that was calibrated in another precision is stored as it was published. What
            transformers keeps in float32, such as the biases of some routers, stays so.
        card: Text of the model card, `README.md`.
        state: The weights to write, by their names in the model; `None` means all.

    Raises:
        OptionError: `dtype` names no floating dtype.
    """
    stored, asked = model.config.dtype, as_dtype(dtype)
    dtype = asked or stored_dtype(model)
    if model.dtype != dtype:
        wider = wider_dtypes(model, dtype, as_published=asked is None)
        state = cast(model.state_dict() if state is None else state, dtype, wider)
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
