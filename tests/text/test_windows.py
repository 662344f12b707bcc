"""Random windows follow their draws, whatever the documents, and no text is tokenized in vain."""

import random
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrp_lightning.errors import DataError
from mrp_lightning.text.windows import (
    Draws,
    segments_across_documents,
    segments_of_documents,
    segments_of_text,
)


class Letters:
    """A tokenizer whose tokens are letters, between a BOS and an EOS; spaces give no token."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, bool]] = Counter()

    def __call__(self, text: str, *, add_special_tokens: bool, verbose: bool):
        self.calls[text, add_special_tokens] += 1
        letters = [ord(letter) for letter in text if letter != " "]
        return {"input_ids": [1, *letters, 2] if add_special_tokens else letters}


class OnlyLetters(Letters):
    """The same, but nothing stands around a text that has no letter: it gives no token at all."""

    def __call__(self, text: str, *, add_special_tokens: bool, verbose: bool):
        special_tokens = add_special_tokens and bool(text.strip())
        return super().__call__(text, add_special_tokens=special_tokens, verbose=verbose)


texts = st.lists(st.text("abcdef ", max_size=12), min_size=1, max_size=8)
draws_of = st.builds(
    Draws, count=st.integers(1, 9), length=st.integers(1, 8), seed=st.integers(0, 1000)
)


@given(documents=texts, draws=draws_of)
def test_random_segments_follow_the_draws_of_the_protocol(documents, draws):
    length, count = draws.length, draws.count
    streams = [
        Letters()(text, add_special_tokens=True, verbose=False)["input_ids"] for text in documents
    ]
    if max(map(len, streams)) <= length:
        with pytest.raises(DataError, match=f"none of the {len(documents)} documents .* {length}"):
            segments_of_documents(documents, Letters(), draws, "c4")
    else:
        random.seed(draws.seed)
        expected = []
        while len(expected) < count:
            stream = streams[random.randint(0, len(streams) - 1)]
            if len(stream) > length:
                start = random.randint(0, len(stream) - length - 1)
                expected.append(stream[start : start + length])
        assert segments_of_documents(documents, Letters(), draws, "c4").tolist() == expected
    tokens = torch.tensor(streams[0])
    if len(tokens) <= length:
        with pytest.raises(DataError, match=r"only \d+ tokens, and random windows need more than"):
            segments_of_text(tokens, draws, "c4")
    else:
        random.seed(draws.seed)
        starts = [random.randint(0, len(tokens) - length - 1) for _ in range(count)]
        expected = [streams[0][start : start + length] for start in starts]
        assert segments_of_text(tokens, draws, "c4").tolist() == expected


@pytest.mark.parametrize("kind", [Letters, OnlyLetters])
@given(documents=texts, draws=draws_of, separator=st.sampled_from([";", " "]))
def test_segments_go_on_in_the_next_documents(kind, documents, draws, separator):
    """Special tokens stand around the first document alone."""

    def tokens_from(first: int) -> list[int]:
        tokens: list[int] = []
        for document in documents[first:] + documents[:first]:
            encoded = kind()(document + separator, add_special_tokens=not tokens, verbose=False)
            tokens += encoded["input_ids"]
            if len(tokens) >= draws.length:
                return tokens
        raise DataError(f"only {len(tokens)} tokens")

    random.seed(draws.seed)
    expected = []
    try:
        for _ in range(draws.count):
            tokens = tokens_from(random.randrange(len(documents)))
            start = random.randrange(len(tokens) - draws.length + 1)
            expected.append(tokens[start : start + draws.length])
    except DataError as error:
        with pytest.raises(DataError, match=str(error)):
            segments_across_documents(documents, kind(), draws, "train", separator=separator)
        return
    windows = segments_across_documents(documents, kind(), draws, "train", separator=separator)
    assert windows.dtype == torch.int64
    assert windows.tolist() == expected


class Recorded(list):
    """Documents that count how often each is read."""

    def __init__(self, documents: list[str]) -> None:
        super().__init__(documents)
        self.read: Counter[int] = Counter()

    def __getitem__(self, index):
        self.read[index] += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("segments", [segments_of_documents, segments_across_documents])
def test_a_document_is_tokenized_once_and_only_if_it_is_drawn(segments):
    draws = Draws(count=64, length=5, seed=0)
    options = {"separator": ";"} if segments is segments_across_documents else {}
    alone, whole = Letters(), "abcdef" * 100
    segments([whole], alone, draws, "train", **options)
    assert list(alone.calls.values()) == [1]

    several, documents = Letters(), Recorded([letter * 3 for letter in "abcd"] + [whole] * 2000)
    segments(documents, several, draws, "train", **options)
    assert max(documents.read.values()) == 1
    assert len(documents.read) <= draws.count
    assert sum(several.calls.values()) == len(documents.read)


def test_a_document_is_tokenized_again_only_where_no_bos_stands_before_it():
    tokenizer, draws = Letters(), Draws(count=64, length=12, seed=0)
    segments_across_documents(["aaaa", "bbbb", "cccc"], tokenizer, draws, "train", separator=";")
    texts_with_and_without = [(text, bos) for text in ("aaaa;", "bbbb;", "cccc;") for bos in (0, 1)]
    assert tokenizer.calls == dict.fromkeys(texts_with_and_without, 1)
