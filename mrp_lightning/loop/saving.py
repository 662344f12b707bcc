"""Writing a LightningModule that was pruned."""

from os import PathLike

from lightning.pytorch import LightningModule
from safetensors.torch import save_model
from transformers import PreTrainedModel

from mrp_lightning.files import save_directory
from mrp_lightning.loop.contents import checkpoint_root
from mrp_lightning.models.saving import save_pretrained
from mrp_lightning.pruning.model_card import model_card
from mrp_lightning.pruning.report import PruningReport


def save_pruned(
    module: LightningModule,
    directory: str | PathLike[str],
    report: PruningReport,
    *,
    overwrite: bool,
) -> None:
    """Write the model and its report into a directory that appears when it is whole.

    A `PreTrainedModel` becomes a Hugging Face directory, any other module `model.safetensors` with
    the names of its `state_dict`.

    Args:
        module: The LightningModule that holds the pruned model.
        directory: The directory that is made.
        report: The report of the run.
        overwrite: Whether a directory that is not empty may be replaced.

    Raises:
        FileExistsError: The directory is not empty, and may not be replaced.
    """
    _, model = checkpoint_root(module)
    with save_directory(directory, overwrite=overwrite) as staging:
        if isinstance(model, PreTrainedModel):
            card = model_card(report, model.name_or_path or None)
            tokenizer = getattr(module, "tokenizer", None)
            save_pretrained(model, staging, tokenizer=tokenizer, card=card)
        else:
            save_model(model, str(staging / "model.safetensors"))
        report.save(staging)
