"""Cut text into token windows of one length, each of which begins with the same prefix."""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from mrp_lightning.environment import progress_log as log
from mrp_lightning.errors import DataError, counted

_IGNORED = -100
"""The label of a token that is not predicted, as in torch and transformers."""
SEPARATOR = "\n\n"
"""The string that joins the documents of a text, as SparseGPT joins those of WikiText2."""


class Windows(Dataset[Any]):
    """A map-style dataset of token windows to train and evaluate on.

    An item is a row of `ids` (count, length): the token ids (length,), int64. If rows begin with
    `prefix` > 0 tokens, such as BOS, the item is a mapping of `input_ids` and `labels`, both
    (length,). The labels of the prefix and of the first token after it are −100, so that the same
    tokens are predicted as without a prefix.
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
        # Without a prefix the first token has nothing before it, and is not predicted; nor is it
        # after one, so that both perplexities are means over the same tokens.
        labels[: self.prefix + 1] = _IGNORED
        return {"input_ids": ids, "labels": labels}


@dataclass(frozen=True, kw_only=True)
class Draws:
    """The number, length and seed of random windows: equal draws give equal windows."""

    count: int  # number of windows
    length: int  # tokens a window
    seed: int  # of Python's `random`, which draws documents and starts


_MANY_CHARACTERS = 2_000_000
"""Characters from which on tokenizing is announced: it takes seconds, and shows no progress."""


def tokenize(tokenizer: Any, text: str, *, special_tokens: bool = True) -> Tensor:
    """Return the token ids of a whole text (tokens,), int32, with or without special tokens."""
    return torch.tensor(_encode(tokenizer, text, special_tokens=special_tokens), dtype=torch.int32)


def _encode(tokenizer: Any, text: str | list[str], *, special_tokens: bool) -> Any:
    """Tokenize a text, or each of several; log a line before a text that takes seconds."""
    characters = len(text) if isinstance(text, str) else sum(map(len, text))
    if characters > _MANY_CHARACTERS:
        from lightning.pytorch.utilities.rank_zero import rank_zero_only

        rank_zero_only(log.info)("Tokenizing %.0f million characters …", characters / 1e6)
    return tokenizer(text, add_special_tokens=special_tokens, verbose=False)["input_ids"]


_MOST_READINGS = 16
"""The largest ratio of drawn tokens to tokens of the text: more would only repeat it."""
_FEWEST_TOKENS = 8
"""The smallest number of tokens that make a window."""
_SAMPLED_DOCUMENTS = 64
_SAMPLED_CHARACTERS = 10_000  # of a document
_CHARACTERS = 6
"""Characters a token, as many as texts have on average, or more."""
_END = 64
"""The number of tokens at the end of a part of a text that may differ from those of the text."""
_MOST_CHARACTERS = 100
"""Characters a token, more than texts have on average, for a lower bound of the tokens."""


def _usable_count(documents: Sequence[str], tokenizer: Any, draws: Draws, name: str) -> int:
    """Return the number of windows to draw, with a warning if they repeat text: at most 16 times.

    The length of the text is estimated from a tokenized sample.
    """
    # Every `step`-th document, at most 64 of them, spread over the whole: the first ones may be of
    # one kind. Tokenizing all would take longer than the draws themselves.
    step = -(-len(documents) // _SAMPLED_DOCUMENTS)
    sample = [documents[index] for index in range(0, len(documents), step)]
    parts = [document[:_SAMPLED_CHARACTERS] for document in sample]
    tokens = sum(len(tokenize(tokenizer, part, special_tokens=False)) for part in parts)
    tokens_per_character = tokens / max(sum(map(len, parts)), 1)
    characters = sum(map(len, sample)) * len(documents) / len(sample)
    if isinstance(documents, list):  # other sequences would read each document from the disk
        characters = sum(map(len, documents))
    available_tokens = round(characters * tokens_per_character)
    drawn_tokens = draws.count * draws.length
    fits = available_tokens // draws.length
    if available_tokens >= drawn_tokens:
        return draws.count
    # count·length ≤ 16·tokens, at least one window: more windows would cost time and add no text.
    count = min(draws.count, max(1, _MOST_READINGS * available_tokens // draws.length))
    fewer = "" if count == draws.count else f" {count:,} are drawn."
    _warn(
        f"{draws.count:,} windows of {draws.length} tokens are {drawn_tokens:,} tokens, and "
        f"the {name} text has about {available_tokens:,}, enough for "
        f"{counted(fits, 'window')} without overlap, so that windows repeat each "
        f"other.{fewer} Give more text, or `num_samples: {fits or 1}`."
    )
    return count


def _warn(message: str) -> None:
    from lightning.pytorch.utilities.rank_zero import rank_zero_warn

    rank_zero_warn(message)


def consecutive_windows(tokens: Tensor, length: int, name: str) -> Tensor:
    """Cut tokens into non-overlapping windows (count, length), int64; drop the last partial one."""
    count = len(tokens) // length
    if not count:
        raise _too_short(name, len(tokens), length)
    return tokens[: count * length].view(count, length).long()


Segments = Callable[[Sequence[str], Any, Draws, str], Tensor]
"""Called with (documents, tokenizer, draws, name): the token segments (count, length), int64.

A text that is too short for a segment raises a `DataError`, with its `name` in the message.
"""


def segments_of_text(tokens: Tensor, draws: Draws, name: str) -> Tensor:
    """Draw segments (count, length) of one text (tokens,), as SparseGPT's `get_wikitext2` does."""
    if len(tokens) <= draws.length:
        raise DataError(
            f"the {name} text has only {len(tokens)} tokens, and random windows need more than "
            f"{draws.length}. Give shorter windows.",
            "sequence_length",
        )
    draw = random.Random(draws.seed)
    # `randint` includes its upper end, and the protocol subtracts one more, so that the last token
    # is never drawn. The published windows depend on this, and on Python's own generator.
    starts = [draw.randint(0, len(tokens) - draws.length - 1) for _ in range(draws.count)]
    return torch.stack([tokens[start : start + draws.length] for start in starts]).long()


def segments_of_joined(documents: Sequence[str], tokenizer: Any, draws: Draws, name: str) -> Tensor:
    """Draw segments (count, length) of all documents, joined by spaces into one text."""
    return segments_of_text(tokenize(tokenizer, " ".join(documents)), draws, name)


def segments_of_documents(
    documents: Sequence[str], tokenizer: Any, draws: Draws, name: str
) -> Tensor:
    """Draw segments (count, length), each within one random document that is long enough.

    The draws are those of SparseGPT's `get_c4`: a document, until one has more tokens than a
    window, then the start of its segment. Drawn documents alone are read and tokenized, once.
    """

    @cache
    def tokens_of(index: int) -> Tensor | None:
        tokens = tokenize(tokenizer, documents[index])
        return tokens if len(tokens) > draws.length else None

    draw = random.Random(draws.seed)
    too_short: set[int] = set()
    windows: list[Tensor] = []
    # 1. A document is drawn again and again until one is long enough: each failed draw advances the
    #    generator, as in the protocol, so documents must not be filtered beforehand.
    # 2. Only then is the start drawn.
    # 3. Failures are counted by distinct documents, so that the loop ends where none is long
    #    enough.
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
    """Draw segments (count, length), each at a random place of a random document.

    The next documents are joined to one that is too short; the segment may begin in these, too.
    Texts of short documents need this, since `segments_of_documents` would use none of them. The
    separator follows each document. Only drawn and joined documents are read. Each is
    tokenized once with BOS, as the first document of a segment, and once without, as a later one.
    """

    @cache
    def tokens_of(index: int, *, is_first: bool) -> Tensor:
        return tokenize(tokenizer, documents[index] + separator, special_tokens=is_first)

    draw = random.Random(draws.seed)
    windows: list[Tensor] = []
    for _ in range(draws.count):
        # Every document is equally likely to be the first, whatever its length. After the last one
        # the text goes on with document 0, so that each start has a continuation.
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
        # Any start at which the segment fits into the parts read: size − length + 1 of them.
        start = draw.randrange(size - draws.length + 1)
        # A copy, since a view would keep all parts in memory.
        windows.append(torch.cat(parts)[start : start + draws.length].clone())
    return torch.stack(windows).long()


def _too_short(name: str, num_tokens: int, length: int) -> DataError:
    return DataError(
        f"the {name} text has only {counted(num_tokens, 'token')}, less than one "
        f"window of {length}. Give more text."
    )


@dataclass(frozen=True)
class Cutter:
    """Cuts texts into token windows.

    Attributes:
        tokenizer: The tokenizer; `None` if the model itself writes the text.
        length: Tokens a window, the prefix among them.
        bos: The place of the tokens that the tokenizer adds at the start of a text, usually BOS:
            once before each "text", or as the prefix of each "window".
    """

    tokenizer: Any
    length: int
    bos: Literal["text", "window"] = "window"

    @cached_property
    def prefix(self) -> Tensor:
        """The tokens that every window begins with, (tokens,), int64; none if `bos` is "text".

        They are taken from a tokenized text, since attributes such as `add_bos_token` may be wrong.
        """
        if self.tokenizer is None:
            raise DataError(
                "the model comes without a tokenizer, and text needs one. Name its directory or "
                "hub id.",
                "tokenizer",
            )
        if self.bos == "text":
            return torch.tensor([]).long()
        start, _ = self._added
        size = len(start)
        if size and size + 2 > self.length:  # the first token of the text is not predicted
            raise DataError(
                f"of {self.length} tokens {size} are what the tokenizer puts before a text, of "
                "which two or more are needed. Give longer windows, or `bos: text`.",
                "sequence_length",
            )
        return start

    @property
    def suffix(self) -> Tensor:
        """The tokens that the tokenizer puts after a text, such as [SEP], (tokens,), int64.

        Encoders read them at the end of a text; windows do not have them.
        """
        return self._added[1]

    @cached_property
    def _added(self) -> tuple[Tensor, Tensor]:
        """The tokens that the tokenizer puts before and after a text."""
        # whole = start + bare + end. A single letter leaves the least room for another split
        # between special tokens. The first match is the shortest start.
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
        return torch.tensor(whole[:size]).long(), torch.tensor(whole[size + len(bare) :]).long()

    def within(self, documents: Iterable[str], name: str) -> "Cutter":
        """Return this cutter or, with a warning, a shorter one if the text has less than a window.

        Fewer than eight tokens raise a DataError.
        """
        # Documents are read only until a window is full, and at most 100 characters of each for a
        # needed token: a text of gigabytes costs no more than a short one.
        needed_tokens, tokens = self.length - len(self.prefix), 0
        for document in documents:
            part = document[: _MOST_CHARACTERS * needed_tokens]
            tokens += len(tokenize(self._bare, part, special_tokens=False))
            if tokens >= needed_tokens:
                return self
        if tokens < _FEWEST_TOKENS:
            raise _too_short(name, tokens, needed_tokens)
        length = tokens + len(self.prefix)
        _warn(
            f"The {name} text has only {counted(tokens, 'token')}: its windows have {length}, not "
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
        """Draw at most `count` windows (windows, length), int64, by the function `segments`.

        Fewer are drawn, with a warning, if they would repeat the text more than 16 times.
        """
        draws = Draws(count=count, length=self.length - len(self.prefix), seed=seed)
        draws = replace(draws, count=_usable_count(documents, self._bare, draws, name))
        return self._after_prefix(segments(documents, self._bare, draws, name))

    def consecutive(
        self, name: str, text: str | Sequence[str], limit: int | None = None
    ) -> Windows:
        """Cut a text into consecutive windows, at most `limit` of them; `None` for all.

        Documents are tokenized one by one, with the tokenizer's special tokens around each, unless
        windows have a prefix. Of a long text only the beginning is tokenized, if `limit` allows it.
        """
        if isinstance(text, str):
            # Without a limit the part is no shorter than the text: `_beginning` reads it whole.
            num_tokens = (limit or len(text)) * (self.length - len(self.prefix))
            tokens = self._beginning(text, num_tokens)
        else:
            documents = [document + SEPARATOR for document in text]
            encoded = _encode(self._bare, documents, special_tokens=True)
            tokens = torch.tensor(list(chain.from_iterable(encoded)), dtype=torch.int32)
        windows = consecutive_windows(tokens, self.length - len(self.prefix), name)[:limit]
        return Windows(self._after_prefix(windows), len(self.prefix))

    def _beginning(self, text: str, num_tokens: int) -> Tensor:
        """Return the tokens (tokens,) of a text or, if it has more, at least `num_tokens`.

        A tokenizer may split the end of a text otherwise where the text goes on, so that the last
        tokens of a part are no tokens of the whole.
        """
        # The part doubles until it has enough tokens. All attempts together cost at most twice the
        # last, and the tokens are those of the whole text, since the uncertain end is dropped.
        size = _CHARACTERS * num_tokens
        while size < len(text):
            tokens = tokenize(self._bare, text[:size])[:-_END]
            if len(tokens) >= num_tokens:
                return tokens
            size *= 2
        return tokenize(self._bare, text)

    def _bare(self, text: Any, *, add_special_tokens: bool, verbose: bool) -> Any:
        """Tokenize a text, without special tokens where windows have a prefix."""
        # With a prefix, each window begins with these tokens already, and those of a document's
        # start would stand a second time in the middle of a window.
        add_special_tokens &= not len(self.prefix)
        return self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=verbose)

    def _after_prefix(self, windows: Tensor) -> Tensor:
        return torch.cat([self.prefix.expand(len(windows), -1), windows], dim=1)
