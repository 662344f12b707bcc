"""Distinguish causal language models, other models of text, and models of other inputs."""

import inspect
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from mrp_lightning.errors import TargetError
from mrp_lightning.models.checkpoint import build_without_weights, model_class, text_config

_INPUTS = ("input_ids", "pixel_values", "input_values", "input_features", "decoder_input_ids")
"""The inputs of transformers' models, by which texts, images, sounds and second texts are read."""


def is_causal(config: PreTrainedConfig) -> bool:
    """Return whether the class that a configuration names predicts the next token.

    A class that transformers does not know, such as one of a checkpoint's own code, counts as
    causal if `AutoModelForCausalLM` takes the configuration.
    """
    kind = model_class(config)
    return kind is AutoModelForCausalLM or kind.__name__ in _CAUSAL


_CAUSAL = frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())


def reads_text_alone(model: PreTrainedModel) -> bool:
    """Return whether token ids are a model's only inputs: no images, no sounds, no second text."""
    config = model.config
    is_one = text_config(config) is config
    return is_one and model.main_input_name == "input_ids" and not config.is_encoder_decoder


def require_causal(config: PreTrainedConfig, source: str, *, trust_remote_code: bool) -> None:
    """Raise unless a configuration is of a causal language model.

    Loaded as one, another model would lose the parts that only its own class has, such as the head
    of a classifier.

    Raises:
        TargetError: It is of another model; the message shows how to prune that as it is.
        FormatError: transformers cannot build the other model.
    """
    if is_causal(config):
        return
    kind = model_class(config)
    # A model on the meta device suffices: the remedy depends on its inputs, not on its weights.
    model = build_without_weights(config, trust_remote_code=trust_remote_code)
    name = type(model).__name__
    if reads_text_alone(model):
        raise TargetError(
            f"`model`: by its config.json {source} is a {name}, which predicts no next token; as a "
            "causal language model it would lose parts. `mrp-lightning prune` takes it as it is, "
            "and so does `Trainer().predict(model, loader, callbacks=[MRPCallback(…)])` of "
            f"mrp_lightning, with `model = {kind.__name__}.from_pretrained({source!r})`."
        )
    raise of_other_inputs(model, kind, source)


def require_text(model: PreTrainedModel, kind: Any, source: str) -> None:
    """Raise the `TargetError` of `of_other_inputs` for a model that reads more than one text."""
    if not reads_text_alone(model):
        raise of_other_inputs(model, kind, source)


def of_other_inputs(model: PreTrainedModel, kind: Any, source: str) -> TargetError:
    """Return the error for a model that reads more than text, with a LightningModule to prune it.

    Args:
        model: The model, with or without weights.
        kind: The class that loads it.
        source: Its directory or hub id.
    """
    parameters = inspect.signature(model.forward).parameters
    inputs = [name for name in _INPUTS if name in parameters]
    # The main input comes first even if `forward` hides it in `**kwargs`.
    if model.main_input_name not in inputs:
        inputs.insert(0, model.main_input_name)
    arguments = ", ".join(f'{name}=batch["{name}"]' for name in inputs)
    # A cache of keys and values is of no use to a single forward, and takes memory. Models that do
    # not generate may have no such argument.
    options = ", use_cache=False" if model.can_generate() else ""
    lines = [
        "class Runner(lightning.LightningModule):",
        "    def __init__(self):",
        "        super().__init__()",
        f"        self.model = transformers.{kind.__name__}.from_pretrained({source!r})",
        "    def predict_step(self, batch, batch_idx):",
        f"        return self.model({arguments}{options})",
    ]
    listed = "\n".join(f"  {line}" for line in lines)
    return TargetError(
        f"`model`: {source} is a {type(model).__name__}, which reads {' and '.join(inputs)}; text "
        "files give token ids alone. Calibrate it by batches of its own inputs, mappings as its "
        f"processor makes them:\n{listed}\n"
        "and `mrp_lightning.Trainer().predict(Runner(), loader, callbacks=[MRPCallback(…)])`."
    )
