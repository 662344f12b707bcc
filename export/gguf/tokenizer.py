"""The tokenizer of a checkpoint as metadata of a GGUF file, for the kinds that llama.cpp knows."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, SpecialVocab, TokenType
from tokenizers import Tokenizer
from transformers import PreTrainedConfig

from export.conversion.checkpoint import Checkpoint
from mrp_lightning.errors import FormatError, OptionError, counted, first_line
from mrp_lightning.storage.json_files import read_json

_REMEDY = "Give a GGUF file of the same model with --like."

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}": "llama-bpe",
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}": "qwen2",
}
"""llama.cpp's names of pre-tokenizers, by their regular expressions."""


def tokenizer_fields(
    checkpoint: Checkpoint, config: PreTrainedConfig
) -> Callable[[GGUFWriter], None]:
    """Return a function that adds the tokenizer of a checkpoint to a writer.

    Raises:
        FormatError: tokenizer.json is damaged.
        OptionError: There is no tokenizer.json, llama.cpp has no name for its kind, or it has
            tokens without embeddings.
    """
    file = checkpoint.path / "tokenizer.json"
    if not file.is_file():
        raise OptionError(f"{checkpoint.path} has no tokenizer.json. {_REMEDY}")
    try:
        Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises no class of its own
        raise FormatError(
            f"{file} is no tokenizer that the library `tokenizers` reads ({first_line(error)}). "
            "Fetch it again."
        ) from error
    content = read_json(file, "fetch it again")
    model, added = content["model"], content["added_tokens"]
    by_bytes = model.get("byte_fallback", False)
    pre = None if by_bytes else _pre_tokenizer(content["pre_tokenizer"])
    if model["type"] != "BPE" or (pre is None and not by_bytes):
        raise OptionError(f"{file}: llama.cpp's name for this tokenizer is not known. {_REMEDY}")

    size = config.vocab_size
    _require_embeddings(file, size, model["vocab"] | {t["content"]: t["id"] for t in added})
    # llama.cpp takes the vocabulary's size from the list, so it has an entry for each embedding,
    # also for numbers without a token; these get the names that llama.cpp's converter gives.
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
    special = SpecialVocab(checkpoint.path, load_merges=not by_bytes, n_vocab=size)

    def write(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("llama" if by_bytes else "gpt2")
        writer.add_tokenizer_pre(pre or "default")
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        if by_bytes:
            # The scores of a byte-fallback tokenizer give the order of merges: the earlier a token
            # is merged, the higher its score.
            merged = ["".join(pair).replace(" ", "") for pair in model["merges"]]
            # Several merges may give the same token. Reversed, the earliest is written last, and
            # its rank, the highest score, is the one that stays.
            ranks = {token: -rank for rank, token in reversed([*enumerate(merged)])}
            writer.add_token_scores([float(ranks.get(token, -len(merged))) for token in tokens])
            writer.add_add_space_prefix(_prepends_space(content))
        special.add_to_gguf(writer, quiet=True)

    return write


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


def _pre_tokenizer(content: dict[str, Any] | None) -> str | None:
    """Return llama.cpp's name of the pre-tokenizer; None if it is unknown."""
    steps = (content or {}).get("pretokenizers") or [content or {"type": None}]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0]["individual_digits"]:
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not steps[1]["use_regex"]:
        return _SPLITS.get(steps[0]["pattern"].get("Regex", ""))
    return None


def _prepends_space(content: dict[str, Any]) -> bool:
    """Return whether a text is tokenized with a space at its start."""
    steps = (content.get("normalizer") or {}).get("normalizers") or [content.get("normalizer")]
    metaspace = content.get("pre_tokenizer") or {}
    return any(step and step["type"] == "Prepend" for step in steps) or (
        metaspace.get("type") == "Metaspace" and metaspace.get("prepend_scheme") != "never"
    )
