"""Callbacks that save a trained model, and the results of `test`."""

import logging
import os
from collections.abc import Mapping
from os import PathLike

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from mrp_ground.arguments import checked
from mrp_lightning.loop.causal_lm import CausalLM
from mrp_lightning.loop.pruned_module import check_save_dir, save_trained
from mrp_lightning.models.loading import as_dtype
from mrp_lightning.records import evaluation as records
from mrp_lightning.storage.files import output_path
from mrp_lightning.storage.outputs import require_writable

log = logging.getLogger(__name__)


class SaveModel(Callback):
    """Save a `CausalLM` when `fit` has ended, as a directory that `from_pretrained` loads.

    An interrupted `fit` and a `fast_dev_run` save nothing. If a pruned model is loaded from its
    directory and still has its zeros, as after training with `KeepSparsity`, or is narrower, its
    `pruning_report.json`, from which `export.to_sparse` reads the pruned layers, is written, too;
    not so that of a model of few bits, which training leaves.

    Args:
        save_dir: The directory, which appears when it is complete.
        dtype: The type in which floating-point weights are stored, such as `bfloat16`. `None` keeps
            the type in which the model is trained, so that nothing is rounded: float32 for
            `CausalLM(..., dtype="float32")`, whatever the dtype of the checkpoint was.
        overwrite: Whether `save_dir` may be replaced, if this package wrote all of its content.

    Raises:
        FileExistsError: `save_dir` is not empty and may not be replaced, is or holds the model's
            source, or is a file. All errors listed here are raised before training starts.
        PermissionError: `save_dir` cannot be created or replaced.
        OptionError: `dtype` is no floating type, the disk is too full, or transformers refuses the
            model's `generation_config`.
        SaveError: The model has other weights than its class and configuration give.
        TypeError: The module is not a `CausalLM`.
    """

    @checked
    def __init__(
        self, save_dir: str | PathLike[str], *, dtype: str | None = None, overwrite: bool = False
    ) -> None:
        self.save_dir = output_path(save_dir)
        self.dtype, self.overwrite = dtype, overwrite

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check before `fit` that the result can be written, and warn in `predict`."""
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
        """Write the directory in process 0, unless `fit` was interrupted or a `fast_dev_run`."""
        assert isinstance(pl_module, CausalLM)
        if not trainer.is_global_zero or trainer.interrupted or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        save_trained(
            pl_module,
            self.save_dir,
            dtype=self._dtype(pl_module),
            overwrite=self.overwrite,
            steps=trainer.global_step,
            texts=self.texts(trainer),
        )

    def texts(self, trainer: Trainer) -> Mapping[str, str]:
        """Return the content of files that are saved beside the model, by their names: none."""
        return {}

    def _dtype(self, pl_module: CausalLM) -> torch.dtype:
        return as_dtype(self.dtype) or pl_module.model.dtype


class SaveEvaluation(Callback):
    """Record the results of `test` of a `CausalLM` in `evaluation.json`.

    The file gets, by the name of each text, the results that `CausalLM.evaluation` lists. Recorded
    results of other texts, and of zero-shot tasks, stay. With `fast_dev_run`, nothing is written.

    Args:
        save_dir: The directory of the file, usually that of the pruned model; it is created if need
            be.

    Raises:
        TypeError: The module is not a `CausalLM`. All errors are raised before the test starts.
        FormatError: The existing `evaluation.json` cannot be read.
        FileExistsError, PermissionError: `save_dir` is a file, or cannot be created or written.
    """

    @checked
    def __init__(self, save_dir: str | os.PathLike[str]) -> None:
        self.save_dir = output_path(save_dir)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check, before `test`, the module, the directory and an existing file in it."""
        if stage != "test":
            return
        if not isinstance(pl_module, CausalLM):
            raise TypeError(f"`SaveEvaluation` needs a CausalLM. Got {type(pl_module).__name__}.")
        require_writable(self.save_dir, "save_dir")
        # The existing file is read before the test, since results are merged into it at the end,
        # when a damaged file would cost all of them.
        if (self.save_dir / records.NAME).exists():
            records.read(self.save_dir)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Enter the results of the test in `evaluation.json`, in process 0."""
        assert isinstance(pl_module, CausalLM)
        if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        path = records.record(
            self.save_dir,
            perplexity=pl_module.evaluation,
            model=pl_module.model.name_or_path or None,
        )
        rank_zero_info(f"Recorded in {path}.")
