"""A GGUF file's tokenizer: the one of llama.cpp that gives the same tokens, or none."""

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import LlamaConfig, PreTrainedTokenizerFast

pytest.importorskip("gguf", reason="needs the extra `gguf`")

import gguf

from export.conversion.checkpoint import Checkpoint
from export.gguf.tokenizer import tokenizer_fields
from mrp_lightning.errors import OptionError

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
LINES = ["I'll WON'T naïve café 12345", "def f(x):\n\n    return x  # two  spaces"] * 4
SPACE = normalizers.Replace(" ", "▁")


def by_merges(*steps, normalizer=None, **model):
    """A byte-level BPE whose texts are split by the steps."""
    tokenizer = Tokenizer(models.BPE(**model))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(steps))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=350, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


def by_regex(pattern, **options):
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return by_merges(split, level(use_regex=False), **options)


def level(add_prefix_space=False, use_regex=True):
    return pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=use_regex)


def by_scores(normalizer, pre_tokenizer=None):
    """A BPE of characters and bytes, as of SentencePiece: each split of a token is a merge."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [*"▁abcdefilnorstwx", "re", "▁r", "▁re", "tu", "rn", "▁▁", "▁a"]
    merges = [
        (token[:i], token[i:])
        for token in tokens[259:]
        for i in range(1, len(token))
        if {token[:i], token[i:]} <= {*tokens}
    ]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def between(tokenizer, single):
    """A tokenizer that puts tokens around a text."""
    special = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=f"{single} $B", special_tokens=special
    )
    return tokenizer


@pytest.fixture
def fields_of(tmp_path):
    """A function that returns the metadata of a tokenizer, and the notes."""

    def write(tokenizer):
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
        ).save_pretrained(tmp_path)
        config = LlamaConfig(vocab_size=400)
        add, notes = tokenizer_fields(Checkpoint(tmp_path, {}, [], []), config)
        writer = gguf.GGUFWriter(tmp_path / "out.gguf", "llama")
        add(writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        fields = gguf.GGUFReader(tmp_path / "out.gguf").fields
        start = "tokenizer.ggml."
        return {
            name.removeprefix(start): field.contents()
            for name, field in fields.items()
            if name.startswith(start)
        }, notes

    return write


SAME = [
    (lambda: by_merges(level()), "gpt-2", "$A"),
    (lambda: by_merges(pre_tokenizers.Digits(individual_digits=True), level()), "smollm", "<s> $A"),
    (lambda: by_regex(LLAMA3, ignore_merges=True), "llama-bpe", "<s> $A </s>"),
    (lambda: by_regex(QWEN2), "qwen2", "$A </s>"),
]


@pytest.mark.parametrize(("make", "name", "single"), SAME, ids=[name for _, name, _ in SAME])
def test_bos_and_eos_are_those_that_the_tokenizer_puts(make, name, single, fields_of):
    fields, notes = fields_of(between(make(), single))
    assert (fields["model"], fields["pre"], notes) == ("gpt2", name, [])
    assert fields["add_bos_token"] == ("<s>" in single)
    assert fields["add_eos_token"] == ("</s>" in single)


@pytest.mark.parametrize(("prefix", "single"), [(True, "<s> $A"), (False, "$A")])
def test_a_prefixed_space_is_that_of_the_tokenizer(prefix, single, fields_of):
    steps = [normalizers.Prepend("▁"), SPACE] if prefix else [SPACE]
    fields, notes = fields_of(between(by_scores(normalizers.Sequence(steps)), single))
    assert (fields["model"], fields["add_space_prefix"], notes) == ("llama", prefix, [])
    assert fields["add_bos_token"] == (single != "$A")
    assert not fields["add_eos_token"]


OTHERS = {
    "prefixed": lambda: by_merges(level(add_prefix_space=True)),
    "lowercase": lambda: by_merges(level(), normalizer=normalizers.Lowercase()),
    "compatible": lambda: by_regex(QWEN2, normalizer=normalizers.NFKC()),
    "stripped": lambda: by_regex(QWEN2, normalizer=normalizers.Strip()),
    "case": lambda: by_regex(LLAMA3.replace("(?i:", "(?:")),
    "whole": lambda: by_merges(level(use_regex=False)),
    "digits": lambda: by_merges(pre_tokenizers.Digits(), level()),
    "single spaces": lambda: by_scores(
        normalizers.Sequence([normalizers.Replace(Regex(" +"), " "), SPACE])
    ),
    "two at the start": lambda: between(by_merges(level()), "<s> <s> $A"),
    "another at the end": lambda: between(by_merges(level()), "$A <s>"),
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_a_tokenizer_that_llama_cpp_lacks_is_refused(make, fields_of):
    with pytest.raises(OptionError, match=r"(no tokenizer of llama\.cpp|llama\.cpp puts) .*--like"):
        fields_of(make())


def test_texts_that_get_other_tokens_are_noted(fields_of):
    _, notes = fields_of(by_regex(QWEN2, normalizer=normalizers.NFC()))
    assert len(notes) == 1
    assert "accents" in notes[0]
    stripping = by_regex(QWEN2)
    stripping.add_special_tokens([AddedToken("<|end|>", rstrip=True)])
    _, notes = fields_of(stripping)
    assert len(notes) == 1
    assert "2 of 9 texts with special tokens" in notes[0]
    metaspace = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    fields, notes = fields_of(by_scores(None, metaspace))
    assert fields["add_space_prefix"]
    assert [kind for note in notes for kind in ("start", "special") if kind in note] == [
        "start",
        "special",
    ]
    # llama.cpp's `smaug-bpe` splits like `llama-bpe`, and merges what is a word of the vocabulary.
    assert fields_of(by_regex(LLAMA3))[0]["pre"] in ("llama-bpe", "smaug-bpe")
