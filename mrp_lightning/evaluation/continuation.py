"""What a model writes: the greedy continuation of the beginning of a text."""

from collections.abc import Callable
from os.path import commonprefix
from typing import Any

import torch
from torch import Tensor

PROMPT_TOKENS = 32
NEW_TOKENS = 48


def continuation(
    logits: Callable[[Tensor], Tensor], tokenizer: Any, window: Tensor
) -> dict[str, str]:
    """Let a model go on with the beginning of a window, always by the most likely token.

    Prompt and continuation are together no longer than the window, which the model can take.

    Args:
        logits: Gives the logits (1, length, vocabulary) of token ids (1, length).
        tokenizer: The model's, to decode.
        window: Token ids (length,) without padding.

    Returns:
        The `prompt` and the `continuation`, as text.
    """
    start = min(PROMPT_TOKENS, len(window) // 2)
    ids = window[:start]
    for _ in range(min(NEW_TOKENS, len(window) - start)):
        token = logits(ids[None])[0, -1].argmax()
        if token.item() == tokenizer.eos_token_id:
            break
        ids = torch.cat([ids, token[None]])
    decoded = [tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:start], ids)]
    # A prompt may end within a character, which only what follows completes.
    prompt = commonprefix(decoded)  # noqa: RUF071
    return {"prompt": prompt, "continuation": decoded[1].removeprefix(prompt)}
