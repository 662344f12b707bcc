"""`python lab/train_tokenizer.py DIR` trains the tokenizer of the embedded model."""

import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mrp_lightning.text.sources import standard_library

VOCABULARY = 2048


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE of the training split of the standard library."""
    tokenizer = Tokenizer(models.BPE())
    # Runs of spaces and line ends are common words in source code, so they may merge.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(standard_library("train"), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )


if __name__ == "__main__":
    train_tokenizer().save_pretrained(sys.argv[1])
