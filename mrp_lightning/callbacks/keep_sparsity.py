"""Train a pruned model without filling its zeros."""

from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from mrp_lightning.distillation.kept_values import KeptValues, is_elementwise
from mrp_lightning.errors import TargetError
from mrp_lightning.loop.causal_lm import CausalLM
from mrp_lightning.loop.distributed import is_sharded_later, require_whole_parameters
from mrp_lightning.targets.blocks import pruned_layers


class KeepSparsity(Callback):
    """Keep the removed weights of a pruned model at zero while `fit` trains the others.

    The weights that are zero when training starts, in every layer with at least 5% zeros, are
    exactly zero after each optimizer step, with any optimizer, gradient accumulation, mixed
    precision, clipping and sharding by FSDP2. The pattern (2:4, 50%, any other) follows from the
    zeros. The trained model can be packed like the pruned one.

    An optimizer of torch that treats each entry by itself, such as AdamW, gets the kept weights
    alone, in float32: its moments take that part of the memory. Their gradients are moved before
    the module's own `on_before_optimizer_step`, which finds none of them. With other optimizers,
    float16 precision, manual optimization, sharded weights, and layers that an optimizer gets
    later, gradients of removed weights are set to zero before clipping, and the weights after each
    step; this costs a bool for each weight of these layers, and a pass over the weights and one
    over their gradients.

    Attributes:
        removed: The number of weights that stay zero, by the name of their layer.

    Raises:
        TargetError: When training starts, no layer of the model is pruned.
        StrategyError: The strategy shards the parameters in another way (FSDP1, DeepSpeed).
    """

    keeps_sparsity = True
    """Marks callbacks with which `CausalLM` does not warn of training a pruned model."""

    def __init__(self) -> None:
        self.removed: dict[str, int] = {}
        self._pruned: list[tuple[nn.Parameter, Tensor]] = []
        self._hooks: list[Any] = []
        self._values: list[KeptValues] = []
        self._masks: dict[str, Tensor] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise a `StrategyError` before `fit` if the way of sharding is unknown.

        A `CausalLM` has its weights by now, so that a `TargetError` comes before its text is made.
        """
        if stage != "fit":
            return
        require_whole_parameters(trainer, type(self).__name__)
        if is_sharded_later(trainer):  # then only parts of the weights are left in a process
            self._masks = self._find(pl_module)
        elif isinstance(pl_module, CausalLM) and trainer.ckpt_path is None:
            self._find(pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the zeros, and give the optimizers the kept weights: before states are resumed."""
        self._release()
        masks, self._masks = self._masks or self._find(pl_module), {}
        parameters = dict(pl_module.named_parameters())
        pruned = {parameters[name]: _as_sharded(parameters[name], m) for name, m in masks.items()}
        # Manual optimization clips and discards the gradients of the parameters themselves.
        takes_values = pl_module.automatic_optimization and not _sharded(pruned)
        for optimizer in trainer.optimizers:
            if takes_values and _takes_kept_values(trainer, optimizer):
                kept = {parameter: ~mask for parameter, mask in pruned.items()}
                self._values.append(KeptValues(optimizer, kept))
                pruned = {p: mask for p, mask in pruned.items() if p not in self._values[-1]}
        # Of these an optimizer has the parameters, or gets them later (`BaseFinetuning`).
        self._pruned = list(pruned.items())
        # The hooks are on the optimizers and not on the batch: with accumulation there are batches
        # without a step, and with several optimizers or manual optimization several in one batch.
        self._hooks = [o.register_step_post_hook(self._after_step) for o in trainer.optimizers]

    def _find(self, pl_module: LightningModule) -> dict[str, Tensor]:
        """Return the removed weights of the pruned layers, bool, by the name of the parameter."""
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
        self.removed = {layer.name: int((layer.weight == 0).sum()) for layer in layers}
        names = {parameter: name for name, parameter in pl_module.named_parameters()}
        return {names[parameter]: mask for parameter, mask in masks.items()}

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Move the gradients of kept weights, or set those of removed ones to zero; then clip."""
        for values in self._values:
            values.take_gradients()
        for parameter, pruned in self._pruned:
            if parameter.grad is not None:
                _local(parameter.grad).masked_fill_(pruned, 0)

    def on_train_end(self, *_: Any) -> None:
        """Remove the hooks from the optimizers."""
        self._release()

    def on_exception(self, *_: Any) -> None:
        """Remove the hooks from the optimizers."""
        self._release()

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        # Zero gradients are not enough: a resumed optimizer may hold moments of removed weights,
        # and some optimizers, such as Muon, mix the entries of a matrix.
        for parameter, pruned in self._pruned:
            _local(parameter.detach()).masked_fill_(pruned, 0)

    def _release(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for values in self._values:
            values.release()
        self._hooks, self._pruned, self._values = [], [], []


def _takes_kept_values(trainer: Trainer, optimizer: Optimizer) -> bool:
    """Return whether an optimizer may get a vector of kept values in place of a parameter."""
    # A gradient scaler unscales the gradients of the optimizer's parameters, before they are moved.
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return scaler is None and is_elementwise(optimizer) and not optimizer.state


def _local(tensor: Tensor) -> Tensor:
    """Return this process's part of a sharded tensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sharded(parameters: Iterable[nn.Parameter]) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in parameters)


def _as_sharded(parameter: nn.Parameter, mask: Tensor) -> Tensor:
    """Return this process's part of a mask, sharded as its parameter is."""
    if not isinstance(parameter, DTensor):
        return mask.to(parameter.device)
    return distribute_tensor(mask, parameter.device_mesh, parameter.placements).to_local()
