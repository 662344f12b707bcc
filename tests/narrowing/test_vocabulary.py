"""Cut vocabularies: the smaller tokenizer against the whole one, and the logits, to the bit."""

import copy
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers_of_text import KINDS, OTHER, TEXT, by_level, tokenizer_of, unigram
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from mrp_lightning import DataError, OptionError, TargetError
from mrp_lightning.models.checkpoint import build_without_weights
from mrp_lightning.narrowing import vocabulary
from mrp_lightning.narrowing.tokenizer import Vocabulary
from mrp_lightning.narrowing.vocabulary import keep_tokens

SIZE = 420
PADDED = 1024
"""The rows of the embeddings, more than there are tokens."""


def model_of(tokenizer, model_type="llama", **options):
    config = {
        "vocab_size": PADDED,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("e")],
        "pad_token_id": tokenizer.pad_token_id,
        "max_position_embeddings": 256,
        **options,
    }
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config)).eval()


def encoded(tokenizer, texts):
    return tokenizer(texts, add_special_tokens=False).input_ids


_CUTS = {}


def cut_of(kind):
    """The whole tokenizer of a kind, the cut, the dense and the cut model."""
    if kind not in _CUTS:
        tokenizer = tokenizer_of(kind)
        dense = model_of(tokenizer)
        model = copy.deepcopy(dense)
        _CUTS[kind] = tokenizer, keep_tokens(model, tokenizer, SIZE, TEXT), dense, model
    return _CUTS[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_that_stay(kind):
    """Bytes, special tokens, those of the configuration, then by count with what they need."""
    tokenizer, cut, _, _ = cut_of(kind)
    kept, whole = {*cut.kept.tolist()}, tokenizer.get_vocab()
    smaller = cut.tokenizer.get_vocab()
    assert len(smaller) == len(kept) == SIZE
    assert cut.size == len(whole)
    assert cut.rows == PADDED
    # The order stays, and each token is what it was.
    assert sorted(smaller, key=smaller.get) == [
        w for w in sorted(whole, key=whole.get) if w in smaller
    ]
    assert [whole[token] for token in sorted(smaller, key=smaller.get)] == cut.kept.tolist()
    of_bytes = pre_tokenizers.ByteLevel.alphabet()
    if "with bytes" in kind:
        of_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    assert {*of_bytes, "<unk>", "<s>", "</s>", "<extra>", "e"} <= smaller.keys()
    # Each token of the text that was more frequent than some kept one, and is gone, had no room: a
    # count by hand.
    counts = dict.fromkeys(range(len(whole)), 0)
    for number in [n for ids in encoded(tokenizer, TEXT) for n in ids]:
        counts[number] += 1
    gone = max(count for number, count in counts.items() if number not in kept)
    assert sum(counts[number] > gone for number in kept) > 30
    assert gone <= sorted(counts.values())[-40]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_every_string_decodes_to_itself_and_tokens_map_one_to_one(kind, data):
    tokenizer, cut, _, _ = cut_of(kind)
    texts = [*TEXT, OTHER]
    places = st.tuples(st.integers(0, 2), st.integers(0, 9000), st.integers(1, 60))
    strings = st.one_of(st.text(), places.map(lambda p: texts[p[0]][p[1] : p[1] + p[2]]))
    text = data.draw(strings)
    ids, smaller = encoded(tokenizer, text), encoded(cut.tokenizer, text)
    if tokenizer.decode(ids) == text:
        assert cut.tokenizer.decode(smaller) == text
    kept = cut.kept.tolist()
    if {*ids} <= {*kept}:
        assert [kept[number] for number in smaller] == ids


@pytest.mark.parametrize("kind", KINDS)
def test_strings_of_kept_tokens_are_tried(kind):
    """Else the test above could try none. The tokens of such strings are joined anew."""
    tokenizer, cut, _, _ = cut_of(kind)
    kept = cut.kept.tolist()
    lines = [line for text in (*TEXT, OTHER) for line in text.splitlines() if line]
    same = [ids for ids in encoded(tokenizer, lines) if {*ids} <= {*kept}]
    assert len(same) > 20
    assert cut.proof["same_tokens"] > 100
    assert cut.proof["text"] > 990
    assert cut.proof["unicode"] > 990


@pytest.mark.parametrize("kind", KINDS)
def test_the_result_loads_and_its_logits_are_those_of_the_dense_model(kind, tmp_path):
    tokenizer, cut, dense, model = cut_of(kind)
    model.save_pretrained(tmp_path)
    cut.tokenizer.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    read = AutoTokenizer.from_pretrained(tmp_path)
    assert read.get_vocab() == cut.tokenizer.get_vocab()
    (ids,) = encoded(read, [OTHER[:300]])
    old = cut.kept[torch.tensor([ids])]
    with torch.no_grad():
        expected = dense(old).logits[..., cut.kept]
        assert torch.equal(loaded(torch.tensor([ids])).logits, expected)
        assert torch.equal(model(torch.tensor([ids])).logits, expected)
    # The numbers of special tokens everywhere.
    number = read.get_vocab()
    for name in ("bos_token", "eos_token", "pad_token"):
        assert getattr(read, name) == getattr(tokenizer, name)
        assert getattr(read, f"{name}_id") == number[getattr(tokenizer, name)]
    config = loaded.config
    assert config.vocab_size == SIZE
    assert config.bos_token_id == number["<s>"]
    assert config.eos_token_id == [number["</s>"], number["e"]]
    assert config.pad_token_id == number["</s>"] == loaded.model.embed_tokens.padding_idx
    generation = loaded.generation_config
    assert generation.eos_token_id == [number["</s>"], number["e"]]
    assert read("x").input_ids[0] == number["<s>"]
    assert read.apply_chat_template([{"content": "e"}])["input_ids"] == [
        number["<s>"],
        *encoded(read, "e"),
    ]
    assert encoded(read, "<extra>") == [number["<extra>"]]


@pytest.mark.parametrize(
    ("model_type", "options", "head"),
    [
        ("llama", {"tie_word_embeddings": True}, "lm_head.weight"),
        ("qwen2", {"num_key_value_heads": 2}, "lm_head.weight"),
        ("gemma2", {"head_dim": 8, "num_key_value_heads": 2}, "lm_head.weight"),
        ("phi", {}, "lm_head.bias"),
        ("gptj", {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}, "lm_head.bias"),
        ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 16}, "lm_head.weight"),
        ("bloom", {"n_layer": 2, "n_head": 4}, "lm_head.weight"),
        ("mamba", {"state_size": 8}, "lm_head.weight"),
    ],
)
def test_tied_weights_and_biases_of_a_head(model_type, options, head):
    tokenizer = tokenizer_of("BPE of bytes")
    dense = model_of(tokenizer, model_type, **options)
    if head.endswith("bias"):
        torch.nn.init.normal_(dense.get_output_embeddings().bias)
    model = copy.deepcopy(dense)
    model.generation_config.suppress_tokens = [5, 899]
    cut = keep_tokens(model, tokenizer, SIZE, TEXT)
    ids = torch.randint(SIZE, (2, 30))
    with torch.no_grad():
        expected = dense(cut.kept[ids]).logits[..., cut.kept]
        assert torch.equal(model(ids).logits, expected)
    assert model.state_dict()[head].shape[0] == SIZE
    tied = [
        m.get_input_embeddings().weight is m.get_output_embeddings().weight for m in (dense, model)
    ]
    assert tied[0] == tied[1] == dense.config.tie_word_embeddings
    built = build_without_weights(copy.deepcopy(model.config), kind=type(model))
    assert {n: x.shape for n, x in built.state_dict().items()} == {
        n: x.shape for n, x in model.state_dict().items()
    }
    number = {old: new for new, old in enumerate(cut.kept.tolist())}
    assert model.generation_config.suppress_tokens == [number[n] for n in (5, 899) if n in number]


def test_a_token_stays_with_the_parts_that_it_is_merged_of():
    """A token that many merges give is merged alone by two: only their parts have to stay."""
    merges = [("a", "b"), ("c", "d"), ("ab", "cd"), ("a", "bcd"), ("b", "cd"), ("abc", "d")]
    merges += [("b", "c"), ("a", "bc")]
    listed = [*"abcd", "ab", "cd", "bc", "bcd", "abc", "abcd"]
    tokenizer = Tokenizer(models.BPE({w: n for n, w in enumerate(listed)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole = Vocabulary.of(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    kept = whole.chosen(7, whole.counts(["abcd abcd"]), [])
    assert [listed[number] for number in kept] == [*"abcd", "ab", "cd", "abcd"]
    assert tokenizer.encode("abcd").tokens == ["abcd"]
    with pytest.raises(OptionError, match="4 tokens have to stay"):
        whole.chosen(3, whole.counts(["abcd"]), [])


def without_bytes():
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


REFUSED = {
    "WordPiece": (
        lambda: Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1})),
        "is a WordPiece model",
    ),
    "WordLevel": (
        lambda: Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")),
        "is a WordLevel model, which makes one unknown token",
    ),
    "Unigram": (lambda: unigram(byte_fallback=False), "Unigram model without tokens for bytes"),
    "BPE": (without_bytes, "BPE model without tokens for bytes"),
    "end of token": (
        lambda: Tokenizer(models.BPE({"a</w>": 0}, [], end_of_word_suffix="</w>")),
        "other tokens within a token or at its end",
    ),
    "some bytes": (
        lambda: Tokenizer(models.BPE({"<0x00>": 0}, [], byte_fallback=True)),
        "falls back to bytes, and lacks <0x01>, <0x02>, <0x03>",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_tokenizers_that_would_lose_text_are_refused(kind):
    make, reason = REFUSED[kind]
    model = model_of(tokenizer_of("BPE of bytes"))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=make())
    with pytest.raises(TargetError, match=reason):
        keep_tokens(model, tokenizer, 1, TEXT)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_what_else_is_refused(monkeypatch):
    tokenizer = tokenizer_of("BPE of bytes")
    model = model_of(tokenizer)
    with pytest.raises(TargetError, match="it has no tokenizer"):
        keep_tokens(model, None, SIZE, TEXT)
    with pytest.raises(OptionError, match="the tokenizer has 901 tokens"):
        keep_tokens(model, tokenizer, 901, TEXT)
    with pytest.raises(OptionError, match=r"26\d tokens have to stay"):
        keep_tokens(model, tokenizer, 100, TEXT)
    with pytest.raises(DataError, match="no string of the text has kept tokens alone"):
        keep_tokens(model, tokenizer, SIZE, [""])
    with pytest.raises(DataError, match="there are no documents"):
        keep_tokens(model, tokenizer, SIZE, [])
    model.generation_config.sequence_bias = [[[5], 1.0]]
    with pytest.raises(TargetError, match="`sequence_bias`"):
        keep_tokens(model, tokenizer, SIZE, TEXT)
    model.generation_config.sequence_bias = None
    model.generation_config.pad_token_id = 1000
    with pytest.raises(TargetError, match="`pad_token_id` of its GenerationConfig is 1000, a row"):
        keep_tokens(model, tokenizer, SIZE, TEXT)
    with pytest.raises(TargetError, match="without an embedding, such as '<extra>'"):
        keep_tokens(model_of(tokenizer, vocab_size=900), tokenizer, SIZE, TEXT)


@pytest.mark.parametrize("fault", ["a row", "a merge", "a byte"])
def test_a_failed_proof_leaves_the_model_as_it_was(fault, monkeypatch):
    tokenizer = tokenizer_of("BPE of bytes")
    model = model_of(tokenizer)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config, number = model.config.to_dict(), tokenizer.get_vocab()
    cut = Vocabulary.cut

    def damaged(self, numbers):
        content = json.loads(json.dumps(cut(self, numbers)))
        if fault == "a merge":
            del content["model"]["merges"][:2]
        return content

    if fault == "a row":
        rows = vocabulary._rows
        monkeypatch.setattr(vocabulary, "_rows", lambda m, kept, e: rows(m, kept.flip(0), e))
    monkeypatch.setattr(Vocabulary, "cut", damaged)
    if fault == "a byte":
        always = [n for n in Vocabulary.of(tokenizer)._always if n != number["Ð"]]
        monkeypatch.setattr(Vocabulary, "_always", always)
    reasons = {"a row": "the logits of kept tokens differ", "a merge": "makes other tokens"}
    with pytest.raises(TargetError, match=reasons.get(fault, "loses .* strings")):
        keep_tokens(model, tokenizer, SIZE, TEXT[:1])
    assert model.config.to_dict() == config
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert by_level().get_vocab_size() == 900
