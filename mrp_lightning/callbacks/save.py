"""Write what was trained as a Hugging Face directory."""

import logging
from os import PathLike

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from mrp_lightning.files import output_path
from mrp_lightning.loop.causal_lm import CausalLM
from mrp_lightning.loop.saving import check_save_dir, save_trained
from mrp_lightning.models.loading import as_dtype
from mrp_sparse.arguments import checked

log = logging.getLogger(__name__)


class SaveModel(Callback):
    """Save a `CausalLM` when `fit` has ended, as a directory that `from_pretrained` loads.

    If a pruned model is loaded from its directory and trained with `KeepSparsity`, its
    `pruning_report.json` is copied, by which `export.to_sparse` knows the pruned layers.

    Args:
        save_dir: The directory, which is written aside and moved into place when it is whole.
        dtype: The type in which floating-point weights are stored, such as `bfloat16`. `None` keeps
            the type in which the model is trained, so that nothing is rounded: float32 for
            `CausalLM(..., dtype="float32")`, whatever the dtype of the checkpoint was.
        overwrite: Whether a directory that is not empty may be replaced.

    Raises:
        FileExistsError: `save_dir` is not empty and `overwrite` is false; before training starts.
        OptionError: `dtype` is no floating type, or what would be saved is not valid; before
            training starts.
        TypeError: The module is not a `CausalLM`.
    """

    @checked
    def __init__(
        self,
        save_dir: str | PathLike[str],
        *,
        dtype: str | None = None,
        overwrite: bool = False,
    ) -> None:
        self.save_dir = output_path(save_dir)
        self.dtype, self.overwrite = dtype, overwrite

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check before training that the result can be written."""
        if stage == "predict":
            log.warning(
                "This %s saves what `fit` trains; in `predict` it does nothing. A callback that "
                "prunes saves by its own `save_dir`.",
                type(self).__name__,
            )
        if stage != "fit":
            return
        if not isinstance(pl_module, CausalLM):
            raise TypeError(f"`SaveModel` saves a CausalLM. Got {type(pl_module).__name__}.")
        check_save_dir(
            self.save_dir, pl_module, overwrite=self.overwrite, dtype=self._dtype(pl_module)
        )

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the directory."""
        assert isinstance(pl_module, CausalLM)
        if not trainer.is_global_zero or trainer.interrupted or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        save_trained(
            pl_module,
            self.save_dir,
            dtype=self._dtype(pl_module),
            overwrite=self.overwrite,
            steps=trainer.global_step,
        )

    def _dtype(self, pl_module: CausalLM) -> torch.dtype:
        return as_dtype(self.dtype) or pl_module.model.dtype
