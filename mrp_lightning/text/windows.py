"""From text to token windows of one length, each of which begins with the same prefix."""

import random
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from mrp_lightning.environment import progress_log as log
from mrp_lightning.errors import DataError

_IGNORED = -100
"""The label of a token that is not predicted, as in torch and transformers."""
SEPARATOR = "\n\n"
"""Stands between the documents of a text, as SparseGPT joins those of WikiText2."""


class Windows(Dataset[Any]):
    """Windows to train and evaluate on.

    An item is the token ids (length,), int64, of a row of `ids` (count, length). Where each row
    begins with a prefix of some tokens, the item is a mapping of `input_ids` and `labels`, both
    (length,), in which −100 marks the prefix and the first token of the text: these are not
    predicted, so that the same tokens are as without a prefix.
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
        labels[: self.prefix + 1] = _IGNORED
        return {"input_ids": ids, "labels": labels}


@dataclass(frozen=True, kw_only=True)
class Draws:
    """The number of random windows, and the seed: the same draws give the same windows."""

    count: int  # number of windows
    length: int  # tokens a window
    seed: int  # of Python's `random`, which draws documents and starts


_MANY_CHARACTERS = 2_000_000
"""Tokenizers take seconds for so many, and show no progress."""


def tokenize(tokenizer: Any, text: str, *, special_tokens: bool = True) -> Tensor:
    """Return the token ids of a whole text (tokens,), int32, with or without special tokens."""
    return torch.tensor(_encode(tokenizer, text, special_tokens=special_tokens), dtype=torch.int32)


def _encode(tokenizer: Any, text: str | list[str], *, special_tokens: bool) -> Any:
    """The token ids of a text, or of each; a line announces a text that takes seconds."""

    def encode() -> Any:
        return tokenizer(text, add_special_tokens=special_tokens, verbose=False)["input_ids"]

    characters = len(text) if isinstance(text, str) else sum(map(len, text))
    if characters <= _MANY_CHARACTERS:
        return encode()
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    rank_zero_only(log.info)("Tokenizing %.0f million characters …", characters / 1e6)
    # Signal handlers run in the main thread, between its Python instructions: the tokenizer's long
    # call is made in another. A process that ends waits for the threads of a pool, not for this.
    result: Future[Any] = Future()

    def run() -> None:
        try:
            result.set_result(encode())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result.result()


_MOST_READINGS = 16
"""The most times that random windows may read a text on average."""
_FEWEST_TOKENS = 8
"""The fewest tokens of a text that make a window."""
_SAMPLED_DOCUMENTS = 64
_SAMPLED_CHARACTERS = 10_000  # of a document
_MOST_CHARACTERS = 100
"""More characters than tokens have on average, so that so many a token suffice to count them."""


def _usable_count(documents: Sequence[str], tokenizer: Any, draws: Draws, name: str) -> int:
    """Return how many of the windows to draw, at most 16 for each that fits into the text.

    A sample of the text is tokenized. A warning reports windows that repeat each other.
    """
    step = -(-len(documents) // _SAMPLED_DOCUMENTS)
    sample = [documents[index] for index in range(0, len(documents), step)]
    parts = [document[:_SAMPLED_CHARACTERS] for document in sample]
    tokens = sum(len(tokenize(tokenizer, part, special_tokens=False)) for part in parts)
    tokens_per_character = tokens / max(sum(map(len, parts)), 1)
    characters = sum(map(len, sample)) * len(documents) / len(sample)
    if isinstance(documents, list):  # others read each document from the disk
        characters = sum(map(len, documents))
    available, wanted = round(characters * tokens_per_character), draws.count * draws.length
    fits = available // draws.length
    if available >= wanted:
        return draws.count
    count = min(draws.count, max(1, _MOST_READINGS * available // draws.length))
    fewer = "" if count == draws.count else f" {count:,} are drawn."
    _warn(
        f"{draws.count:,} windows of {draws.length} tokens are {wanted:,} tokens, and the {name} "
        f"text has about {available:,}, enough for {fits:,} window{'s' * (fits != 1)} that do not "
        f"overlap; these repeat each other.{fewer} Give more text, or `num_samples: {fits or 1}`."
    )
    return count


def _warn(message: str) -> None:
    from lightning.pytorch.utilities.rank_zero import rank_zero_warn

    rank_zero_warn(message)


def consecutive_windows(tokens: Tensor, length: int, name: str) -> Tensor:
    """Cut tokens into windows that do not overlap; the last partial one is dropped."""
    count = len(tokens) // length
    if not count:
        raise _too_short(name, len(tokens), length)
    return tokens[: count * length].view(count, length).long()


Segments = Callable[[Sequence[str], Any, Draws, str], Tensor]
"""Draws pieces (count, length), int64, of documents, by their tokenizer, draws and name."""


def segments_of_text(tokens: Tensor, draws: Draws, name: str) -> Tensor:
    """Draw pieces of one text (tokens,), as SparseGPT's `get_wikitext2` and `get_ptb`."""
    if len(tokens) <= draws.length:
        raise DataError(
            f"the {name} text has only {len(tokens)} tokens, and random windows need more than "
            f"{draws.length}. Give shorter windows.",
            "sequence_length",
        )
    draw = random.Random(draws.seed)
    starts = [draw.randint(0, len(tokens) - draws.length - 1) for _ in range(draws.count)]
    return torch.stack([tokens[start : start + draws.length] for start in starts]).long()


def segments_of_joined(documents: Sequence[str], tokenizer: Any, draws: Draws, name: str) -> Tensor:
    """Draw pieces of all documents, joined by spaces and tokenized as one text."""
    return segments_of_text(tokenize(tokenizer, " ".join(documents)), draws, name)


def segments_of_documents(
    documents: Sequence[str], tokenizer: Any, draws: Draws, name: str
) -> Tensor:
    """Draw pieces of random long documents, each from a single one.

    The draws are SparseGPT's (`get_c4`): a document until one has more tokens than a window, then
    where its piece starts. Only documents that are drawn are read, and tokenized once.
    """

    @cache
    def tokens_of(index: int) -> Tensor | None:
        tokens = tokenize(tokenizer, documents[index])
        return tokens if len(tokens) > draws.length else None

    draw = random.Random(draws.seed)
    too_short: set[int] = set()
    windows: list[Tensor] = []
    while len(windows) < draws.count:
        index = draw.randint(0, len(documents) - 1)
        tokens = tokens_of(index)
        if tokens is None:
            too_short.add(index)
            if len(too_short) == len(documents):
                raise DataError(
                    f"none of the {len(documents)} documents of the {name} text has more than "
                    f"{draws.length} tokens. Give shorter windows.",
                    "sequence_length",
                )
            continue
        start = draw.randint(0, len(tokens) - draws.length - 1)
        windows.append(tokens[start : start + draws.length])
    return torch.stack(windows).long()


def segments_across_documents(
    documents: Sequence[str], tokenizer: Any, draws: Draws, name: str, separator: str = SEPARATOR
) -> Tensor:
    """Draw pieces that start in a random document; where it ends too soon the next ones follow.

    Texts of short documents need this: `segments_of_documents` would use none. The separator ends
    each document. Only documents that windows reach are read, and tokenized once as the first
    of a window and once as a later one, where no BOS stands before them.
    """

    @cache
    def tokens_of(index: int, *, is_first: bool) -> Tensor:
        return tokenize(tokenizer, documents[index] + separator, special_tokens=is_first)

    draw = random.Random(draws.seed)
    windows: list[Tensor] = []
    for _ in range(draws.count):
        first = draw.randrange(len(documents))
        parts: list[Tensor] = []
        size = 0
        for step in range(len(documents)):
            parts.append(tokens_of((first + step) % len(documents), is_first=not size))
            size += len(parts[-1])
            if size >= draws.length:
                break
        else:
            raise _too_short(name, size, draws.length)
        start = draw.randrange(size - draws.length + 1)
        # A view would keep all of the parts.
        windows.append(torch.cat(parts)[start : start + draws.length].clone())
    return torch.stack(windows).long()


def _too_short(name: str, num_tokens: int, length: int) -> DataError:
    return DataError(
        f"the {name} text has only {num_tokens} token{'s' * (num_tokens != 1)}, less than one "
        f"window of {length}. Give more text."
    )


@dataclass(frozen=True)
class Cutter:
    """Cuts texts into windows.

    Attributes:
        tokenizer: The tokenizer; `None` only where the model writes the text.
        length: Tokens a window, the prefix among them.
        bos: Where the tokens stand that the tokenizer puts before a text, as a rule BOS: once
            before each `text`, or as the prefix of each `window`.
    """

    tokenizer: Any
    length: int
    bos: Literal["text", "window"] = "window"

    @cached_property
    def prefix(self) -> Tensor:
        """The tokens that every window begins with, (tokens,), int64.

        They are read from a tokenized text: attributes such as `add_bos_token` may be wrong.
        """
        if self.tokenizer is None:
            raise DataError(
                "the model comes without a tokenizer, and text needs one. Name its directory or "
                "hub id.",
                "tokenizer",
            )
        if self.bos == "text":
            return torch.tensor([]).long()
        bare = tokenize(self.tokenizer, "a", special_tokens=False).tolist()
        whole = tokenize(self.tokenizer, "a").tolist()
        starts = range(len(whole) - len(bare) + 1)
        size = next((n for n in starts if whole[n : n + len(bare)] == bare), None)
        if size is None:
            raise DataError(
                "window needs to know what the tokenizer puts before a text, but it makes "
                f"{whole} of 'a', and {bare} without special tokens. Use `bos: text`.",
                "bos",
            )
        if size and size + 2 > self.length:  # the first token of the text is not predicted
            raise DataError(
                f"of {self.length} tokens {size} are what the tokenizer puts before a text, of "
                "which two or more are needed. Give longer windows, or `bos: text`.",
                "sequence_length",
            )
        return torch.tensor(whole[:size]).long()

    def within(self, documents: Iterable[str], name: str) -> "Cutter":
        """Return this cutter or, with a warning, one of the single window that a short text fills.

        Raises:
            DataError: The text has hardly a token.
        """
        wanted, tokens = self.length - len(self.prefix), 0
        for document in documents:
            part = document[: _MOST_CHARACTERS * wanted]
            tokens += len(tokenize(self._bare, part, special_tokens=False))
            if tokens >= wanted:
                return self
        if tokens < _FEWEST_TOKENS:
            raise _too_short(name, tokens, wanted)
        length = tokens + len(self.prefix)
        _warn(
            f"The {name} text has only {tokens} tokens: its windows have {length} tokens, not "
            f"{self.length}. Results are those of short contexts; give more text."
        )
        return replace(self, length=length)

    def random(
        self,
        documents: Sequence[str],
        count: int,
        seed: int,
        name: str = "train",
        segments: Segments = segments_across_documents,
    ) -> Tensor:
        """Draw at most `count` windows (windows, length), int64, in the way of `segments`.

        They are fewer, with a warning, where they would repeat a text more than 16 times.
        """
        draws = Draws(count=count, length=self.length - len(self.prefix), seed=seed)
        draws = replace(draws, count=_usable_count(documents, self._bare, draws, name))
        return self._after_prefix(segments(documents, self._bare, draws, name))

    def consecutive(self, name: str, text: str | Sequence[str], most: int | None = None) -> Windows:
        """Cut the first windows of a text, one after the other; all if `most` is `None`.

        Documents are tokenized one by one. Where windows have no prefix, special tokens stand once
        around a text, and around each of several documents.
        """
        if isinstance(text, str):
            tokens = tokenize(self._bare, text)
        else:
            documents = [document + SEPARATOR for document in text]
            encoded = _encode(self._bare, documents, special_tokens=True)
            tokens = torch.tensor(list(chain.from_iterable(encoded)), dtype=torch.int32)
        windows = consecutive_windows(tokens, self.length - len(self.prefix), name)[:most]
        return Windows(self._after_prefix(windows), len(self.prefix))

    def _bare(self, text: Any, *, add_special_tokens: bool, verbose: bool) -> Any:
        """Tokenize a text, without special tokens where windows have a prefix."""
        add_special_tokens &= not len(self.prefix)
        return self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=verbose)

    def _after_prefix(self, windows: Tensor) -> Tensor:
        return torch.cat([self.prefix.expand(len(windows), -1), windows], dim=1)
