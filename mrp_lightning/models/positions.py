"""How long a text a model can read."""

from typing import Any

from transformers import PreTrainedConfig


def longest_sequence(config: PreTrainedConfig) -> int | None:
    """The most tokens that a model reads at once, as its configuration says.

    For learned positions this is the size of their table; for rotary ones, which go on beyond it,
    the length that the model was made for.

    Args:
        config: Configuration of the model; of a multimodal one the part for text counts.

    Returns:
        Number of tokens, or `None` where nothing limits it: attention is biased by distance (BLOOM,
        Falcon with `alibi`, T5), or the model keeps a state instead of positions (Mamba).
    """
    text = config.get_text_config()
    if getattr(text, "alibi", False):
        return None
    # MPT has biases by distance, too, but transformers computes them for `max_seq_len` positions.
    limit: Any = getattr(text, "max_position_embeddings", getattr(text, "max_seq_len", None))
    return limit if isinstance(limit, int) and limit > 0 else None
