"""A model as its configuration tells it: class, layers without weights, longest text."""

import inspect
from typing import Any

import torch
import transformers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from mrp_lightning.errors import FormatError, first_line
from mrp_lightning.upstream.transformers_names import from_config


def model_class(config: PreTrainedConfig) -> Any:
    """The class of the model: `architectures` names it, or else an auto class finds it."""
    architectures = config.architectures if isinstance(config.architectures, list) else []
    named = getattr(transformers, str(next(iter(architectures), "")), None)
    if inspect.isclass(named) and issubclass(named, PreTrainedModel):
        return named
    has_own_code = "AutoModelForCausalLM" in getattr(config, "auto_map", {})
    is_causal = has_own_code or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForCausalLM if is_causal else AutoModel


def build_without_weights(
    config: PreTrainedConfig, *, kind: Any = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model on the meta device: no weights are read or allocated, whatever its size.

    Args:
        config: Configuration of the model.
        kind: Class of the model; `None` is what `model_class` finds.
        trust_remote_code: Whether code that comes with the checkpoint may run here.

    Raises:
        FormatError: transformers cannot build a model from the configuration.
    """
    kind = kind or model_class(config)
    try:
        with torch.device("meta"):
            if kind in (AutoModel, AutoModelForCausalLM):
                return kind.from_config(config, trust_remote_code=trust_remote_code)
            return from_config(kind, config)
    except Exception as error:  # whatever the code of a model stumbles over in a configuration
        raise FormatError(
            f"No model can be built from the configuration {type(config).__name__} (architectures "
            f"{config.architectures}): {first_line(error)}"
        ) from error


def longest_sequence(config: PreTrainedConfig) -> int | None:
    """The most tokens that a model reads at once, as its configuration says.

    For learned positions this is the size of their table; for rotary ones, which go on beyond it,
    the length that the model was made for. Of a multimodal model the part for text counts. It is
    `None` where nothing limits it: attention is biased by distance (BLOOM, Falcon with `alibi`,
    T5), or the model keeps a state instead of positions (Mamba).
    """
    text = config.get_text_config()
    if getattr(text, "alibi", False):
        return None
    # MPT has biases by distance, too, but transformers computes them for `max_seq_len` positions.
    limit: Any = getattr(text, "max_position_embeddings", getattr(text, "max_seq_len", None))
    return limit if isinstance(limit, int) and limit > 0 else None
