"""Tiny tokenizers of each kind that a vocabulary can be cut of, trained on source code."""

import inspect
import json.decoder
import json.encoder
from functools import cache

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

TEXT = [inspect.getsource(json.decoder), "Ein Stück Käse, naïve: 日本語 ½ 🙂\n" * 3]
OTHER = inspect.getsource(json.encoder)
SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_SPACES = normalizers.Replace(" ", "▁")
_DECODER = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def by_level(**options):
    tokenizer = Tokenizer(models.BPE(**options))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([*TEXT, OTHER], trainer)
    return tokenizer


def falling_back(splits="one"):
    """A BPE with bytes; a word is merged of two parts or, as in SentencePiece, of any two."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = _SPACES
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=[*SPECIAL, *BYTES], show_progress=False
    )
    tokenizer.train_from_iterator([*TEXT, OTHER], trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = content["added_tokens"][: len(SPECIAL)]
    model = content["model"]
    if splits == "all":
        words = sorted(model["vocab"], key=model["vocab"].get)[len(SPECIAL) + 256 :]
        model["merges"] = [
            [word[:i], word[i:]]
            for word in words
            for i in range(1, len(word))
            if {word[:i], word[i:]} <= model["vocab"].keys()
        ]
    content["pre_tokenizer"] = None
    content["model"] = model
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.decoder = decoders.Sequence(_DECODER)
    return tokenizer


def unigram(byte_fallback=True):
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = _SPACES
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.UnigramTrainer(
        vocab_size=600, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator([*TEXT, OTHER], trainer)
    vocab = json.loads(tokenizer.to_str())["model"]["vocab"]
    # The characters of the last words are left to the bytes, as in a vocabulary of a small part of
    # all characters.
    known = [(word, score) for word, score in vocab[3:] if word != "½"]
    vocab = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((byte, 0.0) for byte in BYTES), *known]
    whole = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=byte_fallback))
    whole.normalizer = _SPACES
    whole.add_special_tokens(SPECIAL)
    whole.decoder = decoders.Sequence(_DECODER)
    return whole


KINDS = {
    "BPE of bytes": by_level,
    "BPE of bytes, words whole": lambda: by_level(ignore_merges=True),
    "BPE with bytes": falling_back,
    "BPE with bytes, all splits": lambda: falling_back("all"),
    "Unigram with bytes": unigram,
}


@cache
def tokenizer_of(kind):
    """Return a tokenizer of transformers with BOS, a token beside its words, and a template."""
    tokenizer = KINDS[kind]()
    tokenizer.add_tokens(["<extra>"])
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        chat_template="{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}",
    )
