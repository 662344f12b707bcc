"""The forms of a batch: a tensor, a sequence that starts with one, or a mapping."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def split_batch(batch: Any) -> tuple[Tensor, Tensor | None]:
    """Return the token ids (batch, length) and the attention mask of a batch.

    The mask, of the same shape, has 1 for tokens and 0 for padding; it is `None` where every
    position is a token.

    Raises:
        TypeError: The batch has none of the forms.
    """
    ids = _first_tensor(batch)
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32) or ids.ndim != 2:
        got = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(
            "A batch must be an int64 tensor (batch, length), a tuple or list whose first item is "
            "one, or a mapping with `input_ids` and optionally `attention_mask`. "
            f"Got {type(batch).__name__} with token ids {got}."
        )
    return ids, batch.get("attention_mask") if isinstance(batch, Mapping) else None


def to_predict(batch: Any) -> Tensor | None:
    """Return which tokens are to be predicted, bool (batch, length): all whose label is not −100.

    The result is `None` if the batch is no mapping with `labels`.
    """
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    return None if labels is None else labels != -100


def token_ids(batch: Any) -> Tensor | None:
    """Return the token ids (batch, length) in a batch, `None` if there are none."""
    ids = _first_tensor(batch)
    is_ids = isinstance(ids, Tensor) and ids.ndim == 2 and not ids.is_floating_point()
    return ids if is_ids else None


def _first_tensor(batch: Any) -> Any:
    """Return the item of a batch at the position of the token ids, whatever it is."""
    ids: Any = batch.get("input_ids") if isinstance(batch, Mapping) else batch
    return ids[0] if isinstance(ids, Sequence) and ids else ids
