"""From text to token windows of one length, each of which begins with the same prefix."""

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import Dataset

from mrp_lightning.environment import progress_log as log
from mrp_lightning.errors import DataError

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


SEPARATOR = "\n\n"
"""Between the documents of a text that is not published, as SparseGPT joins those of WikiText2."""


@dataclass(frozen=True, kw_only=True)
class Draws:
    """How many random windows are wanted, and which: the same draws give the same windows."""

    count: int  # number of windows
    length: int  # tokens a window
    seed: int  # of Python's `random`, which draws documents and places


_MANY_CHARACTERS = 2_000_000
"""Tokenizers take seconds for so many, and show no progress."""


def tokenize(tokenizer: Any, text: str, *, special_tokens: bool = True) -> Tensor:
    """The token ids of a whole text (tokens,), int32, with special tokens, such as BOS, or not."""
    return torch.tensor(encode(tokenizer, text, special_tokens=special_tokens), dtype=torch.int32)


def encode(tokenizer: Any, text: str | list[str], *, special_tokens: bool = False) -> Any:
    """The token ids of a text, or of each. That it takes long is said before, where it does."""

    def ids() -> Any:
        return tokenizer(text, add_special_tokens=special_tokens, verbose=False)["input_ids"]

    characters = len(text) if isinstance(text, str) else sum(map(len, text))
    if characters <= _MANY_CHARACTERS:
        return ids()
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    rank_zero_only(log.info)("Tokenizing %.0f million characters …", characters / 1e6)
    return _while_signals_are_heard(ids)


def _while_signals_are_heard(work: Callable[[], Any]) -> Any:
    """Do in a thread what calls no Python for long: their handlers run in the main thread alone."""
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # raised where it is waited for
            done.set_exception(error)

    # A process that ends waits for the threads of a pool, but not for this one.
    threading.Thread(target=run, daemon=True).start()
    return done.result()


_MOST_READINGS = 16
"""How often random windows may read a text over on the average."""
_SAMPLED_DOCUMENTS = 64
_SAMPLED_CHARACTERS = 10_000  # of a document


def check_amount(documents: Sequence[str], tokenizer: Any, draws: Draws, name: str) -> None:
    """Warn before windows are drawn of a text that has not so many tokens as they hold.

    Its tokens are counted in a sample of its documents, which is all of a short text.

    Raises:
        DataError: It has far fewer.
    """
    step = -(-len(documents) // _SAMPLED_DOCUMENTS)
    sample = [documents[index] for index in range(0, len(documents), step)]
    parts = [document[:_SAMPLED_CHARACTERS] for document in sample]
    tokens = sum(len(tokenize(tokenizer, part, special_tokens=False)) for part in parts)
    tokens_per_character = tokens / max(sum(map(len, parts)), 1)
    characters = sum(map(len, sample)) * len(documents) / len(sample)
    if isinstance(documents, list):  # others read each document from the disk
        characters = sum(map(len, documents))
    there, wanted = round(characters * tokens_per_character), draws.count * draws.length
    if not draws.length <= there < wanted:  # drawing tells of a text that is too short for one
        return
    problem = (
        f"TextDataModule: {draws.count:,} windows of {draws.length} tokens are {wanted:,} tokens, "
        f"and the {name} text has about {there:,}, enough for {there // draws.length:,} windows"
    )
    advice = f"Give more text, or `data.num_samples: {there // draws.length}`."
    if wanted > _MOST_READINGS * there:
        raise DataError(f"{problem}. {advice}")
    from lightning.pytorch.utilities.rank_zero import rank_zero_warn

    rank_zero_warn(f"{problem} that do not overlap; these repeat each other. {advice}")


def consecutive_windows(tokens: Tensor, length: int, name: str) -> Tensor:
    """Cut tokens into windows that do not overlap; the last partial one is dropped.

    Raises:
        DataError: The text is shorter than one window.
    """
    count = len(tokens) // length
    if not count:
        raise _too_short(name, len(tokens), length)
    return tokens[: count * length].view(count, length).long()


def segments_of_text(tokens: Tensor, draws: Draws, name: str) -> Tensor:
    """Random pieces of one text (tokens,): the draws of SparseGPT's `get_wikitext2` and `get_ptb`.

    Raises:
        DataError: The text is no longer than a window.
    """
    if len(tokens) <= draws.length:
        raise DataError(
            f"TextDataModule: the {name} text has only {len(tokens)} tokens, and random windows "
            f"need more than {draws.length}. Give shorter windows (`data.sequence_length`)."
        )
    draw = random.Random(draws.seed)
    starts = [draw.randint(0, len(tokens) - draws.length - 1) for _ in range(draws.count)]
    return torch.stack([tokens[start : start + draws.length] for start in starts]).long()


def segments_of_documents(
    documents: Sequence[str], tokenizer: Any, draws: Draws, name: str
) -> Tensor:
    """Random pieces of random long documents, each from a single one.

    The draws are SparseGPT's (`get_c4`): a document until one has more tokens than a window, then
    where its piece starts. Only documents that are drawn are read, and tokenized once.

    Raises:
        DataError: No document is long enough.
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
                    f"TextDataModule: none of the {len(documents)} documents of the {name} text has"
                    f" more than {draws.length} tokens. Give shorter windows "
                    "(`data.sequence_length`)."
                )
            continue
        start = draw.randint(0, len(tokens) - draws.length - 1)
        windows.append(tokens[start : start + draws.length])
    return torch.stack(windows).long()


def segments_across_documents(
    documents: Sequence[str], tokenizer: Any, draws: Draws, name: str, *, separator: str
) -> Tensor:
    """Random pieces that start in a random document; where it ends too soon the next ones follow.

    For texts of short documents, of which `segments_of_documents` would find none. The separator
    ends each document. Only documents that windows reach are read, and tokenized once as the first
    of a window and once as a later one, where no BOS stands before them.

    Raises:
        DataError: All documents together are too short.
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
        f"TextDataModule: the {name} text has only {num_tokens} tokens, less than one window "
        f"of {length}. Give more text, or shorter windows (`data.sequence_length`)."
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
