"""The forms of a batch: a tensor, a sequence that starts with one, or a mapping."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mrp_lightning.errors import DataError
from mrp_lightning.models.checkpoint import text_config


def split_batch(batch: Any) -> tuple[Tensor, Tensor | None]:
    """Return the token ids (batch, length) and the attention mask of a batch.

    The mask (batch, length) has 1 for tokens and 0 for padding; `None` means that all are tokens.

    Raises:
        TypeError: The batch has none of the accepted forms.
        DataError: There are no tokens; or the mask has another shape, or values other than 0 and 1.
    """
    ids = _first_tensor(batch)
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32) or ids.ndim != 2:
        got = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        hint = (
            "Text is tokenized first, as by a `TextDataModule`."
            if isinstance(ids, str)
            else "Windows in a tensor (windows, length) are given as `DataLoader(windows, "
            "batch_size=4)`: Lightning takes the rows of a tensor for batches, and a list for "
            "several dataloaders."
        )
        raise TypeError(
            "A batch must be an int64 tensor (batch, length), a tuple or list whose first item is "
            "one, or a mapping with `input_ids` and optionally `attention_mask`. "
            f"Got {type(batch).__name__} with token ids {got}. {hint}"
        )
    if not ids.numel():
        raise DataError(
            f"A batch holds no tokens: its token ids have the shape {tuple(ids.shape)}. Leave "
            "empty texts out."
        )
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if mask is not None:
        _check_shape("attention_mask", mask, ids, "1 for tokens and 0 for padding")
        if not bool(((mask == 0) | (mask == 1)).all()):
            raise DataError(
                "`attention_mask` must have 1 for tokens and 0 for padding; got values from "
                f"{mask.min().item():g} to {mask.max().item():g}. A mask that is added to "
                "attention scores (0 and −inf) is given as `(mask == 0).long()`."
            )
    return ids, mask


def to_predict(batch: Any, ids: Tensor) -> Tensor | None:
    """Return the tokens to predict, bool (batch, length): those whose label is not −100.

    The result is `None` if the batch is no mapping with `labels`.

    Raises:
        DataError: The labels have another shape than the ids, or differ from them and from −100.
    """
    # Only a mapping names its labels: the further items of a tuple may be anything.
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if labels is None:
        return None
    _check_shape("labels", labels, ids, "the token ids, or −100 where nothing is to be predicted")
    predicted = labels != -100
    # The loss of token t is computed against id_t itself, not against a label. Another label, such
    # as a shifted one, would be ignored without a word, so it is refused.
    if num_others := int((predicted & (labels != ids)).sum()):
        raise DataError(
            "`labels` must be the `input_ids`, or −100 where nothing is to be predicted; "
            f"{num_others} are other tokens. Each token is predicted from those before it, so "
            "labels are not shifted. Leave them out to predict all tokens."
        )
    return predicted


def _check_shape(name: str, value: Any, ids: Tensor, content: str) -> None:
    """Raise a DataError unless an entry of a batch is a tensor of the shape of its token ids."""
    if not isinstance(value, Tensor) or value.shape != ids.shape:
        got = str(tuple(value.shape)) if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise DataError(
            f"`{name}` must be a tensor of the shape of `input_ids`, {tuple(ids.shape)}, with "
            f"{content}; got {got}. Give it in that form, or leave it out."
        )


def check_vocabulary(model: PreTrainedModel, ids: Tensor, purpose: str) -> None:
    """Raise a DataError for token ids outside a model's vocabulary, unless it is multimodal.

    Multimodal models may mark images by such ids. `purpose` is that of the batch, for the message.
    """
    # The configuration of a multimodal model holds that of its text part, another object.
    if not ids.numel() or text_config(model.config) is not model.config:
        return
    try:
        table = getattr(model.get_input_embeddings(), "weight", None)
    except NotImplementedError:  # the model reads no text
        return
    if not isinstance(table, Tensor) or table.ndim != 2:
        return
    # On a GPU an index outside of the embedding fails in an asynchronous kernel, whose error names
    # no token. Both ends come from one pass over the ids.
    lowest, highest = (int(end) for end in ids.aminmax())
    if lowest < 0 or highest >= len(table):
        outside = lowest if lowest < 0 else highest
        raise DataError(
            f"The {purpose} batches hold the token id {outside}, but the model's vocabulary has "
            f"{len(table)} tokens, 0 to {len(table) - 1}: they come from another tokenizer. Make "
            "them with the model's own (`tokenizer`)."
        )


def token_ids(batch: Any) -> Tensor | None:
    """Return the token ids (batch, length) in a batch, `None` if there are none."""
    ids = _first_tensor(batch)
    is_ids = isinstance(ids, Tensor) and ids.ndim == 2 and not ids.is_floating_point()
    return ids if is_ids else None


def _first_tensor(batch: Any) -> Any:
    """Return the item of a batch at the position of the token ids, of whatever type."""
    ids: Any = batch.get("input_ids") if isinstance(batch, Mapping) else batch
    return ids[0] if isinstance(ids, Sequence) and ids else ids
