"""The vocabulary of a tokenizer, and a smaller tokenizer of a part of it, which loses no text.

A token is an entry of the tokenizer's vocabulary. The tokens that stay keep their order, and are
numbered anew. A text of which the whole tokenizer makes kept tokens alone has these same tokens in
the smaller one:

* A BPE merges the neighbours of the lowest rank. With a kept token stay the two parts of its last
  merge, and theirs. So the merges that make kept tokens of a text are all there, and no merge is
  there that the whole tokenizer lacks: the lowest rank is that of the same merge at each step.
* A Unigram model takes the sequence of tokens of the highest score, and that of a text, if all of
  its tokens stay, is the highest among fewer, too. Bytes stand for a character without a token at a
  fixed distance below the lowest score, so that the token of the lowest score stays.

Other text is spelled by shorter tokens or by bytes, of which all stay.
"""

import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from mrp_lightning.errors import DataError, OptionError, TargetError
from mrp_lightning.models.loading import load_tokenizer

_BYTES = dict.fromkeys(f"<0x{byte:02X}>" for byte in range(256))
"""The tokens of single bytes of a tokenizer that falls back to them."""
_SPACE = "▁"
"""The character for a space in such tokenizers, which they decode only where it is a token."""
_STRINGS = 1000
"""The number of strings of the text, and of strings of random characters, that are tried."""
_LONGEST = 100
"""The most characters of such a string."""
_PIECE, _PIECES = 2**16, 64
"""The characters of a piece of text that is tokenized at once, and the pieces of a batch."""


def cannot_cut(why: str) -> TargetError:
    """Return the error for a vocabulary that cannot be cut, with the reason."""
    return TargetError(f"`vocabulary`: the tokens of this model cannot be cut: {why}.")


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The vocabulary of a tokenizer.

    Attributes:
        content: The content of its tokenizer.json.
        tokens: All tokens by their number, added ones included.
    """

    content: Mapping[str, Any]
    tokens: Mapping[int, str]

    @classmethod
    def of(cls, tokenizer: Any) -> "Vocabulary":
        """Read a tokenizer, and check that it has bytes for text without other tokens."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise cannot_cut(
                "it has no tokenizer"
                if tokenizer is None
                else f"its tokenizer, a {type(tokenizer).__name__}, has no tokenizer.json"
            )
        content = json.loads(backend.to_str())
        if reason := _why_without_bytes(content):
            raise cannot_cut(reason)
        numbers = _numbers_of_tokens(content).items()
        tokens = {number: token for token, number in sorted(numbers, key=lambda x: x[1])}
        return cls(content, tokens)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, without truncation and padding."""
        return Tokenizer.from_str(json.dumps({**self.content, "truncation": None, "padding": None}))

    @cached_property
    def number(self) -> Mapping[str, int]:
        """The number of each token, by its spelling in `tokenizer.json`."""
        return {token: number for number, token in self.tokens.items()}

    @cached_property
    def num_bytes(self) -> Mapping[int, int]:
        """The numbers of bytes of text that the tokens stand for."""
        falls_back = self.content["model"]["byte_fallback"]
        added = {token["id"] for token in self.content["added_tokens"]}

        def size(number: int, token: str) -> int:
            if number in added:
                return len(token.encode())
            if falls_back:
                return 1 if token in _BYTES else len(token.replace(_SPACE, " ").encode())
            return len(token)  # a character for each byte

        return {number: size(number, token) for number, token in self.tokens.items()}

    def counts(self, documents: Iterable[str]) -> Counter[int]:
        """Return how often documents have each token, by its number; none is added to them."""
        counts = Counter[int]()
        pieces = (
            document[i : i + _PIECE]
            for document in documents
            for i in range(0, len(document), _PIECE)
        )
        while batch := [*islice(pieces, _PIECES)]:
            for encoding in self.tokenizer.encode_batch(batch, add_special_tokens=False):
                counts.update(encoding.ids)
        return counts

    def chosen(self, size: int, counts: Counter[int], required: Iterable[int]) -> list[int]:
        """Return the numbers of `size` tokens to keep, in ascending order; see `keep_tokens`.

        Raises:
            OptionError: The tokens that have to stay are more.
        """
        kept = set[int]()
        for number in chain(self._always, required):
            kept |= self._with_parts(number, kept)
        if len(kept) > size:
            raise OptionError(
                f"{len(kept):,} tokens have to stay: all bytes, the added tokens, those that the "
                f"configuration names, and their parts. Give at least as many; got {size:,}.",
                "vocabulary",
            )
        for number in sorted(self.tokens, key=lambda number: (-counts[number], number)):
            if len(kept) == size:
                break
            more = self._with_parts(number, kept)
            if len(kept) + len(more) <= size:
                kept |= more
        return sorted(kept)

    def cut(self, number: Mapping[int, int]) -> dict[str, Any]:
        """Return the content of a tokenizer.json of kept tokens, by their new numbers."""
        model, cut = self.content["model"], dict[str, Any]()
        if model["type"] == "Unigram":
            listed = [token for old, token in enumerate(model["vocab"]) if old in number]
            unknown = model["unk_id"]
            cut = {"vocab": listed, "unk_id": None if unknown is None else number[unknown]}
        else:
            vocabulary = {w: number[old] for w, old in model["vocab"].items() if old in number}
            merges = [
                (one, two)
                for one, two in self._merges
                if one in vocabulary and two in vocabulary and one + two in vocabulary
            ]
            cut = {"vocab": vocabulary, "merges": merges}
        added = [t | {"id": number[t["id"]]} for t in self.content["added_tokens"]]
        padding = self.content.get("padding")
        return {
            **self.content,
            "model": model | cut,
            "added_tokens": added,
            "post_processor": _renumbered_processor(self.content.get("post_processor"), number),
            "padding": padding and padding | {"pad_id": number[padding["pad_id"]]},
        }

    @property
    def _always(self) -> Iterator[int]:
        """Yield the numbers of the tokens that have to stay, whatever the text is."""
        model = self.content["model"]
        spelling = [*_BYTES, _SPACE] if model["byte_fallback"] else ByteLevel.alphabet()
        yield from (self.number[token] for token in spelling if token in self.number)
        yield from (token["id"] for token in self.content["added_tokens"])
        yield from _numbers_of_processor(self.content.get("post_processor"))
        if padding := self.content.get("padding"):
            yield padding["pad_id"]
        if (unknown := model.get("unk_token")) in self.number:
            yield self.number[unknown]
        if model["type"] == "Unigram":
            scores = [score for _, score in model["vocab"]]
            yield min(range(len(scores)), key=scores.__getitem__)
            if model["unk_id"] is not None:
                yield model["unk_id"]

    def _with_parts(self, number: int, kept: set[int]) -> set[int]:
        """Return a token with all tokens that it is merged of, except those in `kept`."""
        more, waiting = set[int](), [number]
        while waiting:
            if (token := waiting.pop()) not in kept and token not in more:
                more.add(token)
                waiting += (self.number[part] for part in self._parts(self.tokens[token]))
        return more

    @cached_property
    def _merges(self) -> list[tuple[str, str]]:
        pairs = self.content["model"].get("merges", [])
        return [tuple(p.split(" ", 1) if isinstance(p, str) else p) for p in pairs]

    @cached_property
    def _ranks(self) -> Mapping[tuple[str, str], int]:
        return {pair: rank for rank, pair in enumerate(self._merges)}

    @cached_property
    def _splits(self) -> Mapping[str, list[tuple[str, str]]]:
        """All merges that give a token."""
        splits: dict[str, list[tuple[str, str]]] = {}
        for pair in self._merges:
            splits.setdefault("".join(pair), []).append(pair)
        return splits

    def _parts(self, token: str) -> tuple[str, ...]:
        """Return the two parts of the last merge by which a token is made; none of other tokens."""
        splits = self._splits.get(token, [])
        if len(splits) < 2:
            return splits[0] if splits else ()
        parts, last = [*token], tuple[str, ...]()
        while len(parts) > 1:
            pairs = [*pairwise(parts)]
            place = min(
                range(len(pairs)), key=lambda i: self._ranks.get(pairs[i], len(self._ranks))
            )
            if pairs[place] not in self._ranks:
                return ()  # a token only where it stands alone
            last = pairs[place]
            parts[place : place + 2] = ["".join(last)]
        return last


def _numbers_of_tokens(content: Mapping[str, Any]) -> dict[str, int]:
    """Return the numbers of all tokens in a tokenizer.json, those of added tokens included."""
    of_model = content["model"]["vocab"]
    if isinstance(of_model, list):  # a Unigram model's
        of_model = {token: number for number, (token, _) in enumerate(of_model)}
    return of_model | {token["content"]: token["id"] for token in content["added_tokens"]}


def _why_without_bytes(content: Mapping[str, Any]) -> str | None:
    """Return why a tokenizer has no bytes for text without tokens, `None` if it has them."""
    model = content["model"]
    kind = f"its tokenizer is a {model['type']} model"
    if model["type"] not in ("BPE", "Unigram"):
        return (
            f"{kind}, which makes one unknown token of what it has no tokens for; BPE and Unigram "
            "models with tokens for bytes lose nothing"
        )
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return f"{kind} with other tokens within a token or at its end, whose merges are not joins"
    if model["byte_fallback"]:
        names = (
            {token for token, _ in model["vocab"]} if model["type"] == "Unigram" else model["vocab"]
        )
        if missing := [byte for byte in _BYTES if byte not in names]:
            return f"{kind} that falls back to bytes, and lacks {', '.join(missing[:3])}"
        return None
    if model["type"] == "BPE" and _has_byte_level(content):
        return None
    return f"{kind} without tokens for bytes, so that characters without tokens would be lost"


def _has_byte_level(content: Mapping[str, Any]) -> bool:
    steps = [content.get("pre_tokenizer"), content.get("normalizer")]
    while steps:
        if (step := steps.pop()) is None:
            continue
        if step["type"] == "ByteLevel":
            return True
        steps += [*step.get("pretokenizers", []), *step.get("normalizers", [])]
    return False


def _numbers_of_processor(processor: Mapping[str, Any] | None) -> Iterator[int]:
    """Yield the numbers of tokens in the post-processor of a tokenizer.json."""
    if processor is None:
        return
    for special in processor.get("special_tokens", {}).values():
        yield from special["ids"]
    for key in ("sep", "cls"):
        if key in processor:
            yield processor[key][1]
    for each in processor.get("processors", []):
        yield from _numbers_of_processor(each)


def _renumbered_processor(
    processor: Mapping[str, Any] | None, number: Mapping[int, int]
) -> dict[str, Any] | None:
    """Return a post-processor of a tokenizer.json whose tokens have other numbers."""
    if processor is None:
        return None
    changed = dict(processor)
    if specials := processor.get("special_tokens"):
        changed["special_tokens"] = {
            name: special | {"ids": [number[old] for old in special["ids"]]}
            for name, special in specials.items()
        }
    for key in ("sep", "cls"):
        if key in processor:
            token, old = processor[key]
            changed[key] = [token, number[old]]
    if "processors" in processor:
        each = processor["processors"]
        changed["processors"] = [_renumbered_processor(step, number) for step in each]
    return changed


def renumbered_tokenizer(
    tokenizer: Any, content: Mapping[str, Any], number: Mapping[int, int]
) -> Any:
    """Return a tokenizer with other tokens; its chat template and its settings stay.

    Raises:
        TargetError: It is not read as it is written.
    """
    with TemporaryDirectory() as directory:
        tokenizer.save_pretrained(directory)
        for name in ("vocab.json", "merges.txt", "tokenizer.model", "added_tokens.json"):
            Path(directory, name).unlink(missing_ok=True)
        Path(directory, "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
        file = Path(directory, "tokenizer_config.json")
        config = json.loads(file.read_text(encoding="utf-8"))
        if decoder := config.get("added_tokens_decoder"):
            config["added_tokens_decoder"] = {str(number[int(k)]): x for k, x in decoder.items()}
        file.write_text(json.dumps(config), encoding="utf-8")
        smaller = load_tokenizer(directory)
    smaller.name_or_path = ""  # that of no directory, whose files would be taken for its own
    if smaller.get_vocab() != _numbers_of_tokens(content):
        raise cannot_cut(
            f"a {type(tokenizer).__name__} reads the smaller tokenizer.json with other tokens or "
            "numbers than it has"
        )
    return smaller


def _strings(documents: Sequence[str]) -> Iterator[str]:
    """Yield strings of random places of a text."""
    draw = random.Random(0)
    for _ in range(_STRINGS):
        document = documents[draw.randrange(len(documents))]
        start = draw.randrange(max(1, len(document)))
        yield document[start : start + draw.randint(1, _LONGEST)]


def _random_strings() -> Iterator[str]:
    """Yield strings of random characters: of all planes, of the first, and of alphabets."""
    draw = random.Random(0)
    for _ in range(_STRINGS):
        last = draw.choice([0x10FFFF, 0xFFFF, 0x2FFF, 0x24F])
        numbers = (draw.randint(0, last) for _ in range(draw.randint(1, _LONGEST)))
        yield "".join(chr(n) for n in numbers if not 0xD800 <= n < 0xE000)  # no surrogates


def prove_tokens(
    vocabulary: Vocabulary,
    tokenizer: Any,
    number: Mapping[int, int],
    documents: Sequence[str],
) -> tuple[dict[str, int], list[int]]:
    """Prove that a smaller tokenizer loses nothing, and makes the same tokens where it can.

    Returns:
        The numbers of strings as in `VocabularyCut.proof`, and the former numbers of kept tokens,
        in strings of the text that have no others.

    Raises:
        TargetError: A string is lost, or one of kept tokens has other ones.
        DataError: No string of the text has kept tokens alone.
    """
    proof, smaller = {"same_tokens": 0}, Vocabulary.of(tokenizer).tokenizer
    window: list[int] = []
    for kind, strings in {"text": _strings(documents), "unicode": _random_strings()}.items():
        tried = [*strings]
        before, after = (
            [encoding.ids for encoding in each.encode_batch(tried, add_special_tokens=False)]
            for each in (vocabulary.tokenizer, smaller)
        )
        decoded, decoded_after = (
            each.decode_batch(ids, skip_special_tokens=False)
            for each, ids in ((vocabulary.tokenizer, before), (smaller, after))
        )
        whole = [i for i, string in enumerate(tried) if decoded[i] == string]
        if lost := [i for i in whole if decoded_after[i] != tried[i]]:
            raise cannot_cut(
                f"the smaller tokenizer loses {len(lost)} of {len(tried):,} strings, such as "
                f"{tried[lost[0]]!r}, of which it makes {decoded_after[lost[0]]!r}"
            )
        proof[kind] = len(whole)
        same = [i for i, ids in enumerate(before) if ids and all(old in number for old in ids)]
        if other := [i for i in same if [number[old] for old in before[i]] != after[i]]:
            raise cannot_cut(
                f"the smaller tokenizer makes other tokens of {len(other)} of {len(same):,} "
                f"strings of kept tokens, such as {tried[other[0]]!r}"
            )
        proof["same_tokens"] += len(same)
        if kind == "text":
            window = [*chain.from_iterable(before[i] for i in same)]
    if not window:
        raise DataError(
            "no string of the text has kept tokens alone, so that nothing can be compared. Keep "
            "more tokens, or give more text.",
            "vocabulary",
        )
    return proof, window
