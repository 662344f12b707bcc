"""From text to token windows of one length: consecutive ones, and random ones."""

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mrp_lightning.errors import DataError


def tokenize(tokenizer: Any, text: str, *, special_tokens: bool = True) -> list[int]:
    """Token ids of a whole text, with what the tokenizer puts around one (BOS for LLaMA)."""
    return tokenizer(text, add_special_tokens=special_tokens, verbose=False)["input_ids"]


def consecutive_windows(tokens: Sequence[int], length: int, name: str) -> Tensor:
    """Cut tokens into windows that do not overlap; the last partial one is dropped.

    Args:
        tokens: Token ids.
        length: Tokens a window.
        name: Of the text, for the message.

    Returns:
        Windows (count, length), int64.

    Raises:
        DataError: There is not one whole window.
    """
    count = len(tokens) // length
    if not count:
        raise _too_short(name, len(tokens), length)
    return torch.tensor(tokens[: count * length]).view(count, length)


def segments_of_documents(
    documents: Sequence[str], tokenizer: Any, *, count: int, length: int, seed: int, name: str
) -> Tensor:
    """Random pieces of random long documents, each from a single one.

    The draws are SparseGPT's (`get_c4`): of Python's `random`, a document until one has more than
    `length` tokens, then where its piece starts. The same seed and tokenizer give the same pieces.

    Args:
        documents: Texts; only those that are drawn are read.
        tokenizer: A Hugging Face tokenizer.
        count: Windows to draw.
        length: Tokens a window.
        seed: Of the draws.
        name: Of the text, for the message.

    Returns:
        Windows (count, length), int64.

    Raises:
        DataError: No document is long enough.
    """
    draw = random.Random(seed)
    too_short: set[int] = set()
    windows: list[list[int]] = []
    while len(windows) < count:
        index = draw.randint(0, len(documents) - 1)
        tokens = [] if index in too_short else tokenize(tokenizer, documents[index])
        if len(tokens) <= length:
            too_short.add(index)
            if len(too_short) == len(documents):
                raise DataError(
                    f"TextDataModule: none of the {len(documents)} documents of the {name} text "
                    f"has more than {length} tokens. Give shorter windows (`data.sequence_length`)."
                )
            continue
        start = draw.randint(0, len(tokens) - length - 1)
        windows.append(tokens[start : start + length])
    return torch.tensor(windows)


def segments_of_text(
    tokens: Sequence[int], *, count: int, length: int, seed: int, name: str
) -> Tensor:
    """Random pieces of one text, by the draws of SparseGPT's `get_wikitext2` and `get_ptb`.

    Args:
        tokens: Token ids of the whole text.
        count: Windows to draw.
        length: Tokens a window.
        seed: Of the draws.
        name: Of the text, for the message.

    Returns:
        Windows (count, length), int64.

    Raises:
        DataError: The text is no longer than a window.
    """
    if len(tokens) <= length:
        raise DataError(
            f"TextDataModule: the {name} text has only {len(tokens)} tokens, and random windows "
            f"need more than `data.sequence_length` {length}. Give shorter windows."
        )
    draw = random.Random(seed)
    starts = [draw.randint(0, len(tokens) - length - 1) for _ in range(count)]
    return torch.tensor([tokens[start : start + length] for start in starts])


def segments_across_documents(
    documents: Sequence[str],
    tokenizer: Any,
    *,
    separator: str,
    count: int,
    length: int,
    seed: int,
    name: str,
) -> Tensor:
    """Random pieces that start in a random document; where it ends too soon the next ones follow.

    For texts of short documents, of which `segments_of_documents` would find none.

    Args:
        documents: Texts.
        tokenizer: A Hugging Face tokenizer.
        separator: Ends each document.
        count: Windows to draw.
        length: Tokens a window.
        seed: Of the draws.
        name: Of the text, for the message.

    Returns:
        Windows (count, length), int64.

    Raises:
        DataError: All documents together are too short.
    """
    draw = random.Random(seed)
    windows = []
    for _ in range(count):
        first = draw.randrange(len(documents))
        tokens: list[int] = []
        for step in range(len(documents)):
            document = documents[(first + step) % len(documents)] + separator
            tokens += tokenize(tokenizer, document, special_tokens=not tokens)
            if len(tokens) >= length:
                break
        else:
            raise _too_short(name, len(tokens), length)
        start = draw.randrange(len(tokens) - length + 1)
        windows.append(tokens[start : start + length])
    return torch.tensor(windows)


def _too_short(name: str, num_tokens: int, length: int) -> DataError:
    return DataError(
        f"TextDataModule: the {name} text has only {num_tokens} tokens, less than one window "
        f"of `data.sequence_length` {length}. Give more text or shorter windows."
    )
