"""A model from a packed directory, or a dense one, all of whose weights are checked to be there."""

import os
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from mrp_lightning.errors import FormatError
from mrp_lightning.models.checkpoint import refuse_adapter
from mrp_lightning.models.integrity import check_files, explained_damage
from mrp_lightning.models.loading import load_config
from mrp_lightning.models.skeleton import build_without_weights, model_class


def load(directory: str | os.PathLike[str], **options: Any) -> PreTrainedModel:
    """A model, packed or dense but not torchao's, by `from_pretrained`; see `export.load`."""
    refuse_adapter(directory)
    if not (Path(directory) / "config.json").is_file():
        raise FileNotFoundError(f"{directory} holds no config.json: not a model directory.")
    trust = bool(options.get("trust_remote_code"))
    config = load_config(str(directory), trust_remote_code=trust)
    if not trust:
        check_files(Path(directory), build_without_weights(config))
    with explained_damage(str(directory), None):
        model, loading = model_class(config).from_pretrained(
            directory, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    problems = [
        f"{kind.replace('_', ' ')}: {', '.join(sorted(map(str, loading[kind])))}"
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
        if loading[kind]
    ]
    if problems:
        raise FormatError(f"{directory} does not fit {type(model).__name__}: {'; '.join(problems)}")
    return model
