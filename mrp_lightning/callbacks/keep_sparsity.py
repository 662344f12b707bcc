"""Train a pruned model without filling its zeros."""

import logging
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.optim import Optimizer

from mrp_lightning.errors import TargetError
from mrp_lightning.loop.distributed import require_whole_parameters
from mrp_lightning.targets.values import pruned_layers

log = logging.getLogger(__name__)


class KeepSparsity(Callback):
    """Keep the removed weights of a pruned model at zero while `fit` trains the others.

    The weights that are zero when training starts, in every layer with at least 5% zeros, are
    exactly zero after each optimizer step, with any optimizer, gradient accumulation, mixed
    precision and clipping. Their gradients are set to zero before clipping, so that they count
    neither in the gradient's norm nor in the optimizer's moments. The pattern (2:4, 50%, any other)
    follows from the zeros. The trained model can be packed like the pruned one.

    This costs memory for one bool for each weight of the pruned layers, and one pass over these
    weights and one over their gradients in each step.

    Attributes:
        removed: The number of weights that stay zero, by the name of their layer.

    Raises:
        TargetError: When training starts, no layer of the model is pruned.
        StrategyError: The strategy shards the parameters (FSDP, DeepSpeed, tensor parallel).
    """

    keeps_sparsity = True
    """Marks callbacks with which `CausalLM` does not warn of training a pruned model."""

    def __init__(self) -> None:
        self.removed: dict[str, int] = {}
        self._pruned: list[tuple[nn.Parameter, Tensor]] = []
        self._hooks: list[Any] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise a `StrategyError` before `fit` if a process holds only parts of the weights."""
        if stage == "fit":
            require_whole_parameters(trainer, type(self).__name__)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the zeros, and hook into every optimizer's step."""
        self._release()
        layers = pruned_layers(pl_module)
        if not layers:
            raise TargetError(
                "KeepSparsity: no layer of the model is pruned (none has 5% zeros or more), so "
                "there is nothing to keep. Give the pruned model, or leave the callback out."
            )
        # Experts share a parameter, and not all of them need be pruned.
        masks = {x.parameter: torch.zeros_like(x.parameter, dtype=torch.bool) for x in layers}
        for layer in layers:
            layer.arranged(masks[layer.parameter]).copy_(layer.view == 0)
        self._pruned = list(masks.items())
        self.removed = {layer.name: int((layer.weight == 0).sum()) for layer in layers}
        for optimizer in trainer.optimizers:
            # The hook is on the optimizer and not on the batch: with accumulation there are batches
            # without a step, and with several optimizers or manual optimisation several steps in
            # one batch.
            self._hooks.append(optimizer.register_step_post_hook(self._after_step))

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Set the gradients of removed weights to zero, before clipping."""
        for parameter, pruned in self._pruned:
            if parameter.grad is not None:
                parameter.grad.masked_fill_(pruned, 0)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove the hooks from the optimizers."""
        self._release()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Remove the hooks from the optimizers."""
        self._release()

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        # Zero gradients are not enough: a resumed optimizer may hold moments of removed weights,
        # and some optimizers, such as Muon, mix the entries of a matrix.
        for parameter, pruned in self._pruned:
            parameter.masked_fill_(pruned, 0)

    def _release(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._pruned = [], []
