"""The model that a configuration names, built without weights."""

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

from mrp_lightning.errors import FormatError


def model_class(config: PreTrainedConfig) -> Any:
    """The class of the model: `architectures` names it, or else an auto class finds it."""
    named = (config.architectures or [""])[0]
    if hasattr(transformers, named):
        return getattr(transformers, named)
    has_own_code = "AutoModelForCausalLM" in getattr(config, "auto_map", {})
    is_causal = has_own_code or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForCausalLM if is_causal else AutoModel


def build_without_weights(
    config: PreTrainedConfig, *, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model on the meta device: no weights are read or allocated, whatever its size.

    Args:
        config: Configuration of the model.
        trust_remote_code: Whether code that comes with the checkpoint may run here.

    Raises:
        FormatError: transformers cannot build a model from the configuration.
    """
    kind = model_class(config)
    try:
        with torch.device("meta"):
            if kind in (AutoModel, AutoModelForCausalLM):
                return kind.from_config(config, trust_remote_code=trust_remote_code)
            return kind._from_config(config)
    except ValueError as error:  # an unknown kind of model, or code that is not trusted
        raise FormatError(
            f"No model can be built from the configuration {type(config).__name__} (architectures "
            f"{config.architectures}): {str(error).splitlines()[0]}"
        ) from error
