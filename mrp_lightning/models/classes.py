"""Distinguish causal language models, other models of text, and models of other inputs."""

import inspect
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from transformers import MODEL_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from mrp_lightning.environment import progress_log as log
from mrp_lightning.errors import FormatError, TargetError
from mrp_lightning.models.checkpoint import (
    build_without_weights,
    model_class,
    names_in_model,
    text_config,
)
from mrp_lightning.models.companions import MODULES


def is_causal(config: PreTrainedConfig) -> bool:
    """Return whether the class that a configuration names predicts the next token.

    A class that transformers does not know, such as one of a checkpoint's own code, counts as
    causal if `AutoModelForCausalLM` takes the configuration.
    """
    kind = model_class(config)
    return kind is AutoModelForCausalLM or kind.__name__ in _CAUSAL


_CAUSAL = frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())


def name_class_of_files(config: PreTrainedConfig, directory: Path, names: Iterable[str]) -> None:
    """Let a configuration name the base class if a checkpoint holds no weight of its class's head.

    Embedding models are published so: the weights of a `BertModel`, and a config.json of the
    `BertForMaskedLM` that was trained. A head that is tied to the embeddings is in no file; there
    the base class counts if the directory is one of sentence-transformers. A head of which the
    files hold some weights is one, and `misfits` refuses what lacks. `architectures` of the
    configuration is changed; `names` are those of the tensors in the files, none if unknown.
    """
    base = MODEL_MAPPING.get(type(config), None)
    is_plain = not hasattr(config, "auto_map") and not hasattr(config, "quantization_config")
    if not is_plain or not inspect.isclass(base) or not (names := set(names)):
        return
    try:
        model = build_without_weights(config)
    except FormatError:  # who loads the model raises it again
        return
    name_in_model = names_in_model(model, get_model_conversion_mapping(model))
    stored = {name_in_model(name)[0] for name in names}
    inside = f"{model.base_model_prefix}."
    # Tied parameters are listed once, by the name in the base model.
    weights = {name for name, _ in model.named_parameters()}
    head = {name for name in weights if not name.startswith(inside)}
    outside = {name for name in model.state_dict() if not name.startswith(inside)}
    if type(model) is base or outside & stored or not weights - head <= stored:
        return
    if head or (directory / MODULES).is_file():
        _log_base_class(str(directory), type(model).__name__, base.__name__)
        config.architectures = [base.__name__]


@cache
def _log_base_class(source: str, named: str, base: str) -> None:
    """Log the class of a checkpoint once, however often its configuration is loaded."""
    log.warning(
        "`model`: config.json of %s names %s, and its files hold no weight of that head: it is "
        "loaded, pruned and saved as a %s.",
        *(source, named, base),
    )


def reads_text_alone(model: PreTrainedModel) -> bool:
    """Return whether token ids are a model's only inputs: no images, no sounds, no second text.

    The encoder alone of T5 reads one text, though its configuration is of an encoder and a decoder.
    """
    config = model.config
    is_one = text_config(config) is config
    has_decoder = "decoder_input_ids" in inspect.signature(model.forward).parameters
    return is_one and model.main_input_name == "input_ids" and not has_decoder


def require_causal(config: PreTrainedConfig, source: str, *, trust_remote_code: bool) -> None:
    """Raise a TargetError unless a configuration is of a causal language model.

    Loaded as one, another model would lose the parts that only its own class has, such as the head
    of a classifier. The message shows how to prune it as it is.
    """
    if is_causal(config):
        return
    kind = model_class(config)
    # A model on the meta device suffices: the remedy depends on its inputs, not on its weights.
    model = build_without_weights(config, trust_remote_code=trust_remote_code)
    require_text(model, kind, source)
    raise TargetError(
        f"`model`: {source} is a {type(model).__name__}, which predicts no next token; as a causal "
        "language model it would lack parts or lose some. `mrp-lightning prune` takes it as it is, "
        f"and so does {_predict(kind, source)}"
    )


def require_text(model: PreTrainedModel, kind: Any, source: str) -> None:
    """Raise a `TargetError` for a model of `source`, loaded by `kind`, that reads other inputs."""
    if not reads_text_alone(model):
        raise TargetError(
            f"`model`: {source} is a {type(model).__name__}, which reads other inputs than one "
            "text. Calibrate it by batches of its own inputs, mappings as its processor makes "
            f"them: {_predict(kind, source)}"
        )


def _predict(kind: Any, source: str) -> str:
    return (
        "`Trainer().predict(model, loader, callbacks=[MRPCallback(…)])` of mrp_lightning, with "
        f"`model = {kind.__name__}.from_pretrained({source!r})`."
    )
