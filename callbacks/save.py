"""Write what was trained as a Hugging Face directory."""

from lightning.pytorch import Callback, LightningModule, Trainer

from mrp_lightning.loop.causal_lm import CausalLM
from mrp_lightning.loop.saving import check_save_dir, save_trained


class SaveModel(Callback):
    """Save a `CausalLM` when `fit` has ended, as a directory that `from_pretrained` loads.

    With `KeepSparsity`, a model that was loaded from the directory of a pruned one stays so, and
    its `pruning_report.json` comes along, by which `export.to_sparse` knows the pruned layers.

    Args:
        save_dir: The directory, which is written aside and moved into place when it is whole.
        dtype: The type as which floating weights are stored, such as `bfloat16`. `None` keeps the
            model's.
        overwrite: Whether a directory that is not empty may be replaced.

    Raises:
        FileExistsError: `save_dir` is not empty and `overwrite` is false; before training starts.
        TypeError: The module is not a `CausalLM`.
    """

    def __init__(self, save_dir: str, *, dtype: str | None = None, overwrite: bool = False) -> None:
        self.save_dir, self.dtype, self.overwrite = save_dir, dtype, overwrite

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check before any work that the result can be written."""
        if not isinstance(pl_module, CausalLM):
            raise TypeError(f"`SaveModel` saves a CausalLM. Got {type(pl_module).__name__}.")
        check_save_dir(self.save_dir, pl_module, overwrite=self.overwrite)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the directory."""
        assert isinstance(pl_module, CausalLM)
        if not trainer.is_global_zero or trainer.interrupted or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        save_trained(
            pl_module,
            self.save_dir,
            dtype=self.dtype,
            overwrite=self.overwrite,
            steps=trainer.global_step,
        )
