"""What cuts a text into windows of one length, each of which begins with the same prefix."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor

from mrp_lightning.errors import DataError
from mrp_lightning.text.prefix import Windows, prefix_of
from mrp_lightning.text.windows import (
    SEPARATOR,
    Draws,
    check_amount,
    consecutive_windows,
    encode,
    segments_across_documents,
    tokenize,
)


@dataclass(frozen=True)
class Cutter:
    """Cuts texts into windows of `length` tokens, of which the first are the prefix.

    Attributes:
        tokenizer: It puts nothing around a text where there is a prefix.
        length: Tokens a window, those of the prefix among them.
        prefix: What each window begins with, (tokens,), int64; as a rule BOS, or nothing.
    """

    tokenizer: Any
    length: int
    prefix: Tensor

    @classmethod
    def of(cls, tokenizer: Any, length: int, bos: str) -> Self:
        """One that puts what the tokenizer puts before a text before each `window`, or `text`.

        Raises:
            DataError: There is no tokenizer, or no token of a window would be left to predict.
        """
        if tokenizer is None:
            raise DataError(
                "TextDataModule has no tokenizer: the model comes without one. "
                "Name a directory or hub id with `data.tokenizer`."
            )
        if bos == "text":
            return cls(tokenizer, length, torch.tensor([]).long())
        prefix = prefix_of(tokenizer)
        if not len(prefix):
            return cls(tokenizer, length, prefix)
        if len(prefix) + 2 > length:  # the first token of the text is not predicted
            raise DataError(
                f"`data.sequence_length` is {length}, and {len(prefix)} of these are what the "
                "tokenizer puts before a text, of which two tokens or more are needed. Give longer "
                "windows, or `bos: text`."
            )

        def bare(text: str, *, add_special_tokens: bool, verbose: bool) -> Any:  # noqa: ARG001
            return tokenizer(text, add_special_tokens=False, verbose=verbose)

        return cls(bare, length, prefix)

    def draws(self, count: int, seed: int) -> Draws:
        """What is to be drawn for so many windows: the text after their prefix."""
        return Draws(count=count, length=self.length - len(self.prefix), seed=seed)

    def after_prefix(self, windows: Tensor) -> Tensor:
        """Each of the windows of text (count, tokens) with the prefix before it."""
        return torch.cat([self.prefix.expand(len(windows), -1), windows], dim=1)

    def random(self, documents: Sequence[str], count: int, seed: int) -> Tensor:
        """Windows (count, length) that start in random documents.

        Raises:
            DataError: They are too short for a window, or for so many.
        """
        draws = self.draws(count, seed)
        check_amount(documents, self.tokenizer, draws, "train")
        return self.after_prefix(
            segments_across_documents(
                documents, self.tokenizer, draws, "train", separator=SEPARATOR
            )
        )

    def consecutive(self, name: str, text: str | Sequence[str], most: int | None = None) -> Windows:
        """The first windows of a text, one after the other; all if `most` is `None`.

        Documents are tokenized one by one. Where windows have no prefix, what the tokenizer puts
        before and after a text is there once, and of documents around each.

        Raises:
            DataError: The text is shorter than one window.
        """
        if isinstance(text, str):
            tokens = tokenize(self.tokenizer, text)
        else:
            encoded = encode(
                self.tokenizer, [document + SEPARATOR for document in text], special_tokens=True
            )
            tokens = torch.tensor(list(chain.from_iterable(encoded)), dtype=torch.int32)
        windows = consecutive_windows(tokens, self.length - len(self.prefix), name)[:most]
        return Windows(self.after_prefix(windows), len(self.prefix))
