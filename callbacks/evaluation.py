"""Keeping the perplexities that `test` finds."""

from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

from mrp_lightning.evaluation import records
from mrp_lightning.loop.causal_lm import CausalLM


class SaveEvaluation(Callback):
    """Record what `test` of a `CausalLM` found in `evaluation.json`.

    Results of other texts, and of zero-shot tasks, that are recorded there are kept.

    Args:
        save_dir: The directory, such as that of the pruned model. It is made if it does not exist.

    Raises:
        TypeError: The module is not a `CausalLM`; before it is tested.
        FormatError: The `evaluation.json` that is there cannot be read; before it is tested.
    """

    def __init__(self, save_dir: str) -> None:
        self.save_dir = save_dir

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check before any work that the result can be recorded."""
        if stage != "test":
            return
        if not isinstance(pl_module, CausalLM):
            raise TypeError(f"`SaveEvaluation` needs a CausalLM. Got {type(pl_module).__name__}.")
        if (Path(self.save_dir) / records.NAME).exists():
            records.read(self.save_dir)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the file."""
        assert isinstance(pl_module, CausalLM)
        if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            records.record(
                self.save_dir,
                perplexity=pl_module.evaluation,
                model=pl_module.model.name_or_path or None,
            )
