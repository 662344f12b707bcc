"""Give a trained model the weights of its best step on held-out data."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from mrp_ground.arguments import checked
from mrp_lightning.errors import OptionError

_STATE = ("best", "best_step", "figures", "figures_at_start")


class KeepBest(Callback):
    """Let `fit` end with the weights that had the least value of a metric in validation.

    The start counts, too, where the trainer validates before training
    (`num_sanity_val_steps=-1`): then no training makes a model worse on the held-out data. The
    best weights of the trained parameters are kept in CPU memory, and in checkpoints, so that a
    resumed `fit` knows them. Give it before `SaveModel`.

    Args:
        monitor: The logged name of the metric; less is better, and NaN is never best.
        file: A file that holds the best weights in place of memory, for a model that nearly fills
            it; of one process, without sharded weights. It is rewritten, and nobody else's to read.

    Attributes:
        best: The least value; infinite before the first validation.
        best_step: The number of optimizer steps before it.
        figures: All metrics of that validation, by name.
        figures_at_start: The metrics before training, `None` where they were not measured.

    Raises:
        OptionError: There is no held-out data (raised before training), or a validation did not log
            the metric.
    """

    @checked
    def __init__(
        self, monitor: str = "val_kl", *, file: str | os.PathLike[str] | None = None
    ) -> None:
        self.monitor = monitor
        self.file = None if file is None else Path(file)
        self.best, self.best_step = math.inf, 0
        self.figures: dict[str, float] = {}
        self.figures_at_start: dict[str, float] | None = None
        self._weights: dict[str, Tensor] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise an OptionError before `fit` if nothing is to be validated on."""
        if stage == "fit" and not trainer.enable_validation:
            raise OptionError(
                f"KeepBest compares `{self.monitor}` on held-out data, and there is none. Give "
                "`val_dataloaders` and a `limit_val_batches` above 0, or leave the callback out."
            )

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the start, if all of the held-out data was read."""
        if trainer.num_sanity_val_steps == math.inf:
            self._record(trainer, pl_module)
            self.figures_at_start = self.figures

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the weights if they are better than all before."""
        if trainer.training or trainer.validating:
            self._record(trainer, pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Copy the best weights into the module, unless those of the last step are the best."""
        # Not `on_train_end`: a `fit` that resumes behind its last step has no training to end.
        if not self._weights:
            rank_zero_warn(
                f"KeepBest: no validation gave a finite `{self.monitor}`, so that the weights are "
                "those of the last step. Validate more often (`val_check_interval`)."
            )
        if not self._weights or self.best_step == trainer.global_step:
            return
        parameters = dict(pl_module.named_parameters())
        with torch.no_grad():
            for name, weight in self._weights.items():
                parameters[name].copy_(weight)
        rank_zero_info(
            f"Kept the weights after step {self.best_step} of {trainer.global_step}, which have "
            f"the least `{self.monitor}` ({self.best:.4g})."
        )

    def _record(self, trainer: Trainer, pl_module: LightningModule) -> None:
        value = trainer.callback_metrics.get(self.monitor)
        if value is None:
            raise OptionError(
                f"no validation logged {self.monitor!r}; there are "
                f"{', '.join(sorted(trainer.callback_metrics)) or 'none'}. Name one of these.",
                "monitor",
            )
        if float(value) < self.best:
            self.best, self.best_step = float(value), trainer.global_step
            self.figures = {n: float(metric) for n, metric in trainer.callback_metrics.items()}
            self._keep({n: p.detach() for n, p in pl_module.named_parameters() if p.requires_grad})

    def _keep(self, weights: Mapping[str, Tensor]) -> None:
        """Copy the weights to memory or to the file."""
        if self.file is None:
            self._weights = {name: w.to("cpu", copy=True) for name, w in weights.items()}
            return
        if self._weights.keys() != weights.keys():
            self._weights = _in_file(self.file, weights)
        for name, weight in weights.items():
            self._weights[name].copy_(weight)

    def state_dict(self) -> dict[str, Any]:
        """Return the attributes by name, and as `weights` the best weights by name."""
        return {name: getattr(self, name) for name in _STATE} | {"weights": self._weights}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the best weights and their value."""
        for name in _STATE:
            setattr(self, name, state_dict[name])
        self._weights = {}
        self._keep(state_dict["weights"])


def _in_file(file: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of these shapes and dtypes whose memory is a file's pages."""
    file.unlink(missing_ok=True)
    # Wide types first: a view as another type begins at a multiple of its width.
    ordered = dict(sorted(like.items(), key=lambda item: -item[1].itemsize))
    sizes = [tensor.nbytes for tensor in ordered.values()]
    pages = torch.from_file(str(file), shared=True, size=sum(sizes), dtype=torch.uint8)
    return {
        name: part.view(tensor.dtype).view(tensor.shape)
        for (name, tensor), part in zip(ordered.items(), pages.split(sizes), strict=True)
    }
