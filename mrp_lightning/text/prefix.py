"""The prefix of windows: the tokens that a tokenizer puts before a text, as a rule BOS."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from mrp_lightning.errors import DataError
from mrp_lightning.text.windows import tokenize

IGNORED = -100
"""The label of a token that is not to be predicted, as everywhere in torch and transformers."""


def prefix_of(tokenizer: Any) -> Tensor:
    """The tokens that a tokenizer puts before a text (tokens,), int64; many put none.

    It is found by tokenizing: attributes such as `add_bos_token` do not always tell the truth.

    Raises:
        DataError: With special tokens the tokenizer cuts a text otherwise than without.
    """
    bare = tokenize(tokenizer, "a", special_tokens=False).tolist()
    whole = tokenize(tokenizer, "a").tolist()
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return torch.tensor(whole[:start], dtype=torch.int64)
    raise DataError(
        f"`data.bos: window` needs to know what the tokenizer puts before a text, but it makes "
        f"{whole} of 'a', and {bare} without special tokens. Use `data.bos: text`."
    )


class Windows(Dataset[Any]):
    """Windows to train and evaluate on, which say how much of each is a prefix.

    An item is the token ids (length,), int64. Where the `ids` (count, length) begin with a prefix
    of some tokens, it is a mapping of `input_ids` and `labels`, both of that form, where a label of
    −100 says that the token is not to be predicted: neither those of the prefix nor the first of
    the text. So the same tokens are predicted as without a prefix, though not always from the same
    ones.
    """

    def __init__(self, ids: Tensor, prefix: int = 0) -> None:
        self.ids, self.prefix = ids, prefix

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Any:
        ids = self.ids[index]
        if not self.prefix:
            return ids
        labels = ids.clone()
        labels[: self.prefix + 1] = IGNORED
        return {"input_ids": ids, "labels": labels}
