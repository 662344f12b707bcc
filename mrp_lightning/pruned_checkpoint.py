"""What a LightningModule holds, and how it is written when it is pruned."""

from os import PathLike
from typing import Any

from lightning.pytorch import LightningModule
from safetensors.torch import save_model
from transformers import PreTrainedModel

from mrp_lightning.blocks import find_blocks, unwrap
from mrp_lightning.checkpoint import save_directory, save_pretrained
from mrp_lightning.padding import longest_input
from mrp_lightning.report import PruningReport, model_card


def language_models(module: LightningModule) -> dict[str, PreTrainedModel]:
    """The outermost `PreTrainedModel`s by name."""
    found: dict[str, PreTrainedModel] = {}
    for name, part in module.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(part, PreTrainedModel) and not inside:
            found[name] = part
    return found


def name_prefix(module: LightningModule) -> str:
    """What to cut from layer names, so that they are those of the checkpoint."""
    models = language_models(module)
    if len(models) != 1:
        return ""
    prefix = next(iter(models)).removesuffix("_orig_mod").rstrip(".") + "."
    blocks = find_blocks(module)
    return prefix if all(block.name.startswith(prefix) for block in blocks) else ""


def check_length(module: LightningModule, batch: Any) -> None:
    """Refuse windows that are longer than the model's positions.

    Raises:
        ValueError: It names both lengths.
    """
    models = language_models(module)
    if len(models) != 1:
        return
    config = next(iter(models.values())).config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit <= 0 or getattr(config, "alibi", False):
        return
    length = longest_input(batch)
    if length > limit:
        raise ValueError(
            f"The calibration sequences have {length} tokens, more than the {limit} positions of "
            "the model (`max_position_embeddings`). "
            f"Cut them to `sequence_length: {limit}` or less."
        )


def save_pruned(
    module: LightningModule,
    directory: str | PathLike[str],
    report: PruningReport,
    *,
    overwrite: bool,
) -> None:
    """Write the model and its report into a directory that appears when it is whole.

    A module with exactly one `PreTrainedModel` becomes a Hugging Face directory; any other
    `model.safetensors` with the names of its `state_dict`.

    Raises:
        FileExistsError: The directory is not empty, and may not be replaced.
    """
    models = list(language_models(module).values())
    with save_directory(directory, overwrite=overwrite) as staging:
        if len(models) == 1:
            model = models[0]
            card = model_card(report, model.name_or_path or None)
            tokenizer = getattr(module, "tokenizer", None)
            save_pretrained(model, staging, tokenizer=tokenizer, card=card)
        else:
            save_model(unwrap(module), str(staging / "model.safetensors"))
        report.save(staging)
