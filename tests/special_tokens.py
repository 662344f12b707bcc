"""The embedded model's tokenizer with special tokens around a text."""

from functools import cache
from typing import Any

from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from mrp_lightning.embedded import STDLIB_LLAMA


@cache
def tokenizer_with(template: str) -> Any:
    """The tokenizer whose texts are `$A` in a template such as "[E] $A", [E] for <|endoftext|>."""
    tokenizer = AutoTokenizer.from_pretrained(STDLIB_LLAMA)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=template.replace("[E]", "<|endoftext|>"), special_tokens=[("<|endoftext|>", 0)]
    )
    return tokenizer
