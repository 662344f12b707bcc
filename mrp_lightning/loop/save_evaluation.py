"""A callback that keeps what `test` finds."""

import os
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from mrp_lightning.evaluation.continuation import continuation
from mrp_lightning.files import output_path
from mrp_lightning.loop.causal_lm import CausalLM
from mrp_lightning.models.batch import split_batch
from mrp_lightning.records import evaluation as records


class SaveEvaluation(Callback):
    """Record what `test` of a `CausalLM` found in `evaluation.json`.

    It keeps the perplexity of each text and, where the model has a tokenizer, what the model writes
    after the first tokens of the text. Results of other texts, and of zero-shot tasks, that are
    recorded there are kept.

    Args:
        save_dir: The directory, such as that of the pruned model. It is made if it does not exist.

    Raises:
        TypeError: The module is not a `CausalLM`; before it is tested.
        FormatError: The `evaluation.json` that is there cannot be read; before it is tested.
    """

    def __init__(self, save_dir: str | os.PathLike[str]) -> None:
        self.save_dir = output_path(save_dir)
        self._windows: list[Tensor] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check before any work that the result can be recorded."""
        if stage != "test":
            return
        if not isinstance(pl_module, CausalLM):
            raise TypeError(f"`SaveEvaluation` needs a CausalLM. Got {type(pl_module).__name__}.")
        if (self.save_dir / records.NAME).exists():
            records.read(self.save_dir)
        self._windows = []

    def on_test_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Note the first window of each text."""
        if batch_idx == 0:
            ids, mask = split_batch(batch)
            self._windows.append(ids[0] if mask is None else ids[0][mask[0] != 0])

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the file."""
        assert isinstance(pl_module, CausalLM)
        if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        written = {}
        if pl_module.tokenizer is not None and trainer.world_size == 1:
            with trainer.precision_plugin.forward_context(), torch.no_grad():
                for text, window in zip(pl_module.evaluation, self._windows, strict=True):
                    written[text] = continuation(pl_module, pl_module.tokenizer, window)
        path = records.record(
            self.save_dir,
            perplexity=pl_module.evaluation,
            continuations=written,
            model=pl_module.model.name_or_path or None,
        )
        rank_zero_info(f"Recorded in {path}.")
