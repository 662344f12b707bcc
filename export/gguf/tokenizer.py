"""The tokenizer of a checkpoint as metadata of a GGUF file, proven to give the same tokens.

llama.cpp has tokenizers of its own, of which a file gives the name, the vocabulary and few
switches. Each is imitated here by the library `tokenizers`, with the vocabulary as it is written.
The one that gives the tokens of the checkpoint's tokenizer on texts which separate them is taken.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, SpecialVocab, TokenType
from tokenizers import Tokenizer
from transformers import PreTrainedConfig

from export.conversion.checkpoint import Checkpoint
from mrp_lightning.errors import OptionError, counted
from mrp_lightning.models.loading import load_tokenizer
from mrp_lightning.text.windows import Cutter

_REMEDY = "Give a GGUF file of the same model with --like."

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_PRE_TOKENIZERS = {
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3,),
    "smaug-bpe": (_LLAMA3,),
    "qwen2": (rf"{_WORDS}|\p{{N}}|{_REST}",),
}
"""The regular expressions by which llama.cpp's BPE splits texts in turn, by its names."""
_WHOLE_WORDS = ("llama-bpe",)
"""The names with which a word of the vocabulary is a token also where no merges lead to it."""

_TEXTS = (
    "def main(argv=None):\n    return {'a': [0, 1.5]}  # twice\n\n\n\tif x != y_1:\r\n\r\n",
    "I'll don't WON'T we'Ve it's IT'S 'tis O'TIS o'clock ’s",
    "two  spaces   three \n \n  new line\t\ttabs \u00a0nbsp\u3000wide ",
    "1 12 123 1234 12345678 3.14159 x1y22 ٣٤٥ ½ ² Ⅷ",
    "naïve café STRASSE straße Ünïcode ÀÉÎ İstanbul ŁÓDŹ",
    "日本語のテキスト。中文，混合English文字 한국어 텍스트 ไทย हिन्दी עברית العربية Ελληνικά Привет",
    "!?... --- *** /path/to/file.txt a@b.c #tag $5 <b>x</b> -> => ``` “quoted” «x» …\n…\n\n",
    "🙂👩‍👩‍👧 ∑ √2 ≤ ﬁ ① ™ ａｂｃ",
    "trailing ",
    "\nline",
    "word",
)
"""Texts that separate the tokenizers: case, contractions, spaces, digits, scripts, punctuation."""


def tokenizer_fields(
    checkpoint: Checkpoint, config: PreTrainedConfig
) -> tuple[Callable[[GGUFWriter], None], list[str]]:
    """Return a function that adds a checkpoint's tokenizer to a writer, and notes.

    The notes name texts of which llama.cpp makes other tokens: those with a space at the start,
    accents that are not composed, special tokens, or rare words.

    Raises:
        DataError: tokenizer.json is damaged.
        OptionError: There is no tokenizer.json, no tokenizer of llama.cpp gives the same tokens, or
            there are tokens without embeddings.
    """
    file = checkpoint.path / "tokenizer.json"
    if not file.is_file():
        raise OptionError(f"{checkpoint.path} has no tokenizer.json. {_REMEDY}")
    tokenizer = load_tokenizer(checkpoint.path)
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    model, added = content["model"], content["added_tokens"]
    if model["type"] != "BPE":
        raise OptionError(f"{file}: llama.cpp has no tokenizer of type {model['type']}. {_REMEDY}")
    _require_embeddings(file, config.vocab_size, tokenizer.get_vocab())
    by_bytes = model.get("byte_fallback", False)
    candidates = _by_scores(content) if by_bytes else _by_merges(content)
    name, notes = _equal(content, candidates, file)
    # llama.cpp takes the vocabulary's size from the list, so it has an entry for each embedding,
    # also for numbers without a token; these get the names that llama.cpp's converter gives.
    size = config.vocab_size
    tokens, types = [f"[PAD{i}]" for i in range(size)], [TokenType.UNUSED] * size
    for token, number in model["vocab"].items():
        is_byte = by_bytes and len(token) == 6 and token.startswith("<0x")
        tokens[number], types[number] = token, TokenType.BYTE if is_byte else TokenType.NORMAL
    # Added tokens come after the vocabulary, since some are in both, and only here is it known
    # whether they are control tokens.
    for token in added:
        is_unknown = token["content"] == model.get("unk_token")
        kind = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
        tokens[token["id"]] = token["content"]
        types[token["id"]] = TokenType.UNKNOWN if is_unknown else kind
    special = SpecialVocab(checkpoint.path, n_vocab=size)
    first, last = _around(tokenizer, file)
    if first:
        special.special_token_ids["bos"] = first[0]
    if last:
        special.special_token_ids["eos"] = last[0]
    # Always written, since llama.cpp's defaults depend on the kind of the tokenizer.
    special.add_special_token = {"bos": bool(first), "eos": bool(last)}

    def write(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("llama" if by_bytes else "gpt2")
        writer.add_tokenizer_pre("default" if by_bytes else name)
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        if by_bytes:
            scores = _scores(model)
            writer.add_token_scores([scores.get(token, -float(len(scores))) for token in tokens])
            writer.add_add_space_prefix(name == _PREFIX)
        else:
            writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
        special.add_to_gguf(writer, quiet=True)

    return write, notes


def _by_merges(content: dict[str, Any]) -> dict[str, Tokenizer]:
    """Return llama.cpp's tokenizers that merge by rank, by the names of their pre-tokenizers."""
    by_bytes = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    return {
        name: _plain(
            content,
            model=content["model"] | {"ignore_merges": name in _WHOLE_WORDS},
            pre_tokenizer={
                "type": "Sequence",
                "pretokenizers": [
                    *(
                        {
                            "type": "Split",
                            "pattern": {"Regex": pattern},
                            "behavior": "Isolated",
                            "invert": False,
                        }
                        for pattern in patterns
                    ),
                    by_bytes | {"trim_offsets": True},
                ],
            },
        )
        for name, patterns in _PRE_TOKENIZERS.items()
    }


_PREFIX, _NO_PREFIX = "a space at the start", "no space at the start"


def _by_scores(content: dict[str, Any]) -> dict[str, Tokenizer]:
    """Return llama.cpp's tokenizers that merge by score, with and without a prefixed space."""
    vocabulary, scores = content["model"]["vocab"], _scores(content["model"])
    # llama.cpp merges any two neighbours whose union is a token, so that all splits are merges.
    merges = [
        [token[:i], token[i:]]
        for token in sorted(vocabulary, key=lambda token: -scores.get(token, -len(scores)))
        for i in range(1, len(token))
        if token[:i] in vocabulary and token[i:] in vocabulary
    ]
    model = content["model"] | {"merges": merges, "ignore_merges": False}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prepend = {"type": "Prepend", "prepend": "▁"}
    return {
        name: _plain(content, model=model, normalizer={"type": "Sequence", "normalizers": steps})
        for name, steps in {_PREFIX: [prepend, replace], _NO_PREFIX: [replace]}.items()
    }


def _scores(model: dict[str, Any]) -> dict[str, float]:
    """Return the scores of the tokens of merges: the earlier one is merged, the higher."""
    # Several merges may give the same token. Reversed, the earliest is written last, and its rank,
    # the highest score, is the one that stays.
    return {"".join(pair): -float(rank) for rank, pair in reversed([*enumerate(model["merges"])])}


def _plain(content: dict[str, Any], **parts: Any) -> Tokenizer:
    """Return a tokenizer of some parts, which takes added tokens as they are, as llama.cpp does."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    of_model = {"dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    parts["model"] |= of_model
    others = ("normalizer", "pre_tokenizer", "post_processor", "truncation", "padding")
    added = [token | flags for token in content["added_tokens"]]
    return _tokenizer(content | dict.fromkeys(others) | {"added_tokens": added} | parts)


def _tokenizer(content: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(content))


def _equal(
    content: dict[str, Any], candidates: Mapping[str, Tokenizer], file: Path
) -> tuple[str, list[str]]:
    """Return the name of the candidate that gives the same tokens, and notes on rare texts."""
    own = _tokenizer(content | {"truncation": None, "padding": None})
    different = {name: _different(own, other, _TEXTS) for name, other in candidates.items()}
    name = min(different, key=lambda name: len(different[name]))
    if texts := different[name]:
        raise OptionError(
            f"{file}: no tokenizer of llama.cpp gives the tokens of this one. The closest, {name}, "
            f"differs in {len(texts)} of {len(_TEXTS)} texts, such as {texts[0]!r}. {_REMEDY}"
        )
    rare = {
        "a space at the start": [" x", "  two", " \n"],
        "accents that are not composed": [
            "cafe\u0301",
            "A\u030angstro\u0308m \u212b",
            "\u1112\u1161\u11ab",
        ],
        "special tokens": [
            text
            for special in [token["content"] for token in content["added_tokens"]]
            for text in (f"a{special}b", f"a {special} b", f"{special}\n{special}")
        ],
        "single words of the vocabulary": [
            text
            for number in range(own.get_vocab_size())
            if "\ufffd" not in (text := own.decode([number], skip_special_tokens=False))
        ],
    }
    return name, [
        f"llama.cpp makes other tokens of {len(texts):,} of {len(tried):,} texts with {kind}, such "
        f"as {texts[0]!r}."
        for kind, tried in rare.items()
        if (texts := _different(own, candidates[name], tried))
    ]


def _different(one: Tokenizer, other: Tokenizer, texts: Sequence[str]) -> list[str]:
    """Return the texts of which two tokenizers make other tokens, or pieces before merging."""
    encoded = zip(
        texts,
        *(each.encode_batch(texts, add_special_tokens=False) for each in (one, other)),
        strict=True,
    )
    return [
        text
        for text, encoding, other_encoding in encoded
        if encoding.ids != other_encoding.ids
        or (other.pre_tokenizer and _pieces(one, text) != _pieces(other, text))
    ]


def _pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    """Return the parts of a text within which tokens are merged."""
    if tokenizer.normalizer:
        text = tokenizer.normalizer.normalize_str(text)
    if tokenizer.pre_tokenizer is None:
        return [text]
    return [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


def _around(tokenizer: Any, file: Path) -> tuple[list[int], list[int]]:
    """Return the tokens that a tokenizer puts before and after a text, at most one each."""
    cutter = Cutter(tokenizer, length=2**16)  # no text is cut here
    first, last = cutter.prefix.tolist(), cutter.suffix.tolist()
    if len(first) > 1 or last not in ([], [tokenizer.eos_token_id]):
        raise OptionError(
            f"{file} puts {tokenizer.convert_ids_to_tokens(first)} before a text and "
            f"{tokenizer.convert_ids_to_tokens(last)} after it; llama.cpp puts at most one token "
            f"before it, and `eos_token` ({tokenizer.eos_token!r}) after it. {_REMEDY}"
        )
    return first, last


def _require_embeddings(file: Path, size: int, numbers: Mapping[str, int]) -> None:
    """Raise an OptionError if tokens have numbers from the number of embeddings on."""
    without = sorted((number, token) for token, number in numbers.items() if number >= size)
    if without:
        listed = ", ".join(f"{token!r} ({number})" for number, token in without[:5])
        raise OptionError(
            f"{file}: {counted(len(without), 'token')} without an embedding, as the model has "
            f"{size:,}: {listed}. Remove them from the tokenizer, or call "
            f"`model.resize_token_embeddings({without[-1][0] + 1})`, train, and save the model."
        )
