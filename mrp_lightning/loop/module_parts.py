"""The parts of a LightningModule, and the batches of its predict loop."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from inspect import signature
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from transformers import PreTrainedModel

from mrp_lightning.calibration.offload import CPU, held_on_cpu
from mrp_lightning.calibration.walks import StopForward, replaced
from mrp_lightning.errors import DataError, OptionError, StrategyError, TargetError
from mrp_lightning.loop.causal_lm import CausalLM
from mrp_lightning.loop.trainer import ModuleRunner
from mrp_lightning.models.batch import check_vocabulary, token_ids
from mrp_lightning.models.checkpoint import longest_sequence
from mrp_lightning.models.streaming import StreamedBlocks
from mrp_lightning.targets.plan import Plan
from mrp_lightning.upstream.lightning_names import movable
from mrp_lightning.upstream.torch_names import uncompiled, without_compiled


def language_models(module: LightningModule) -> dict[str, PreTrainedModel]:
    """Return the outermost `PreTrainedModel`s of a module, by name."""
    models: dict[str, PreTrainedModel] = {}
    for name, part in module.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in models)
        if isinstance(part, PreTrainedModel) and not inside:
            models[name] = part
    return models


def checkpoint_root(module: LightningModule) -> tuple[str, nn.Module]:
    """Return the prefix of the saved module's names in the LightningModule, and the saved module.

    The saved module is the only outermost `PreTrainedModel`, or the module of a `ModuleRunner`, or
    else the whole LightningModule.
    """
    models = language_models(module)
    # Of several models none can stand for the whole, so that the LightningModule is saved.
    if len(models) == 1:
        name, model = next(iter(models.items()))
        return f"{without_compiled(name)}.", model
    if isinstance(module, ModuleRunner):
        return "model.", uncompiled(module.model)
    return "", module


def extra_weights(module: LightningModule) -> dict[str, Tensor]:
    """Return the tensors of a module's `state_dict` that are not saved with the model, by name.

    A tensor that is tied to a weight of the model is saved with the model.
    """
    _, model = checkpoint_root(module)
    # By identity, not by name: `keep_vars` gives the parameters themselves, so that a tied weight
    # is recognised under any name.
    inside = {id(x) for x in model.state_dict(keep_vars=True).values()}
    state = module.state_dict(keep_vars=True).items()
    return {name: x for name, x in state if isinstance(x, Tensor) and id(x) not in inside}


def is_built_later(module: LightningModule) -> bool:
    """Return whether the module may make its layers after the callbacks' `setup`."""
    complete = CausalLM if isinstance(module, CausalLM) else LightningModule
    hooks = ("setup", "configure_model")
    return any(is_overridden(hook, module, parent=complete) for hook in hooks)


def check_batch(module: LightningModule, batch: Any) -> None:
    """Raise for a calibration batch that does not fit the model.

    Token ids and masks are checked for a module with exactly one Hugging Face model.

    Raises:
        DataError: Windows are longer than the model's positions; tokens are outside its vocabulary;
            the mask has negative values; or a `CausalLM` is given floating inputs.
    """
    if isinstance(module, CausalLM) and isinstance(batch, Mapping):
        parameters = signature(module.model.forward).parameters.keys() - {"attention_mask"}
        values = {key: x for key, x in batch.items() if key in parameters and isinstance(x, Tensor)}
        if others := [f"`{key}`" for key, x in values.items() if x.is_floating_point()]:
            raise DataError(
                f"A CausalLM reads `input_ids` and `attention_mask` alone, so {', '.join(others)} "
                "of the batch would have no part in the calibration. Give the Hugging Face model "
                "itself to `Trainer.predict`, or your own LightningModule that calls it."
            )
    models, ids = language_models(module), token_ids(batch)
    if len(models) != 1 or ids is None or not ids.numel():
        return
    (model,) = models.values()
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if isinstance(mask, Tensor) and mask.ndim == 2 and bool((mask < 0).any()):
        raise DataError(
            f"A {type(model).__name__} takes an `attention_mask` (batch, length) of 1 for tokens "
            "and 0 for padding; got one that is added to attention scores, with values down to "
            f"{mask.min().item():g}. Give it as `(mask == 0).long()`."
        )
    limit, length = longest_sequence(model.config), ids.shape[1]
    if limit is not None and length > limit:
        raise DataError(
            f"The calibration sequences have {length} tokens, more than the {limit} positions of "
            f"the model's configuration. Cut them to `sequence_length: {limit}` or less."
        )
    check_vocabulary(model, ids, "calibration")


def streamed_blocks(module: LightningModule) -> StreamedBlocks | None:
    """Return the blocks that stay in files, `None` for a module in memory."""
    return module.streamed if isinstance(module, CausalLM) else None


def start_streamed(module: LightningModule, *, processes: int, is_kept: bool) -> None:
    """Let a streamed model read its blocks from its checkpoint, not from an earlier run's shards.

    A module in memory stays as it is. `is_kept` is true if the run has a journal. Raise an
    OptionError without one, since pruned blocks of a streamed model exist nowhere else, or if the
    module has weights outside of its model; and a StrategyError for several processes.
    """
    streamed = streamed_blocks(module)
    if streamed is None:
        return
    if not is_kept:
        raise OptionError(
            "`streaming` keeps each block in a file once it is pruned: the callback needs "
            "`save_dir`, and the trainer no `fast_dev_run`."
        )
    if extra := extra_weights(module):
        raise OptionError(
            f"`streaming` saves the Hugging Face model alone, and {type(module).__name__} has "
            f"weights beside it: {', '.join(list(extra)[:5])}. Load the model without `streaming`."
        )
    if processes > 1:
        raise StrategyError(
            f"`streaming` prunes in one process, which writes the blocks that it reads again. Got "
            f"{processes}. Use Trainer(devices=1), or load the model without `streaming`."
        )
    # After the checks, which leave the model as an earlier run left it.
    streamed.start_over()


def check_streamed_plan(module: LightningModule, plan: Plan) -> None:
    """Raise a TargetError if a plan has blocks that are not streamed, or outer layers in files."""
    streamed = streamed_blocks(module)
    if streamed is None:
        return
    streamed_modules = set(streamed.blocks.values())
    misplaced = [block.name for block in plan.blocks if block.module not in streamed_modules]
    misplaced += [layer.name for layer in plan.outside if layer.parameter.is_meta]
    if misplaced:
        raise TargetError(
            "`blocks`: with `streaming`, the blocks are those that are read from the files, "
            f"{', '.join(list(streamed.blocks)[:2])} and so on. Leave `blocks` out. Others are: "
            f"{', '.join(misplaced)}."
        )


def eager() -> Any:
    """Return a context that disables compiled code, in which hooks added later do not fire."""
    return torch.compiler.set_stance("force_eager")


@dataclass(frozen=True)
class Step:
    """The arguments of one `predict_step`, on the CPU.

    Attributes:
        args: The positional arguments.
        kwargs: The keyword arguments.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def batch(self) -> Any:
        """The batch, which `predict_step` takes first."""
        return self.args[0] if self.args else self.kwargs.get("batch")

    def to(self, device: torch.device) -> "Step":
        """Return the step with copies of its arguments on a device."""
        # A copy at each run: a step may change its batch, and the next pass over the data needs the
        # same one.
        args, kwargs = copy_tensors((self.args, self.kwargs), device)
        return Step(args, kwargs)


def copy_tensors(data: Any, device: torch.device | None = None) -> Any:
    """Copy a collection, its tensors and arrays, and other objects that Lightning can move.

    Copied tensors are detached; without a device, each copy stays where its original is. All other
    objects, such as strings, are shared with the original.
    """

    def copied(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.detach().to(device or x.device, copy=True)
        x = deepcopy(x)
        return x if device is None or isinstance(x, np.ndarray) else x.to(device)

    kinds = (Tensor, np.ndarray, movable())
    return apply_to_collection(data, kinds, copied, wrong_dtype=(Mapping, Sequence))


def require_batches(module: LightningModule) -> None:
    """Raise a DataError if `predict_step` takes an iterator in place of batches."""
    if is_param_in_hook_signature(module.predict_step, "dataloader_iter", explicit=True):
        raise DataError(
            f"{type(module).__name__}.predict_step takes `dataloader_iter`, and pruning needs the "
            "calibration batches one by one. Let it take `batch` and `batch_idx`."
        )


class StepCapture:
    """Replace `predict_step` by a function that stores its arguments and stops at the first block.

    Args:
        module: The LightningModule whose `predict_step` is replaced.
        stop_at: The modules whose first call ends the forward.
        check: Called with each batch before the forward; it may raise.

    Attributes:
        steps: The arguments of all steps so far.
    """

    def __init__(
        self, module: LightningModule, stop_at: Sequence[nn.Module], check: Callable[[Any], None]
    ) -> None:
        self.steps: list[Step] = []
        self._module, self._stop_at, self._check = module, list(stop_at), check
        self._own = module.__dict__.get("predict_step")
        original = module.predict_step

        @functools.wraps(original)  # Lightning reads the signature
        def predict_step(*args: Any, **kwargs: Any) -> Tensor:
            # The loop may be in inference mode, whose tensors (the batch, and tensors that the
            # model stores) could not be used in training later.
            with torch.inference_mode(False), torch.no_grad(), eager():
                # Stored before the run, which may change the batch; and the run has a copy of its
                # own for the same reason.
                step = Step(*copy_tensors((args, kwargs), torch.device("cpu")))
                self._check(step.batch)
                self._run_to_first_block(original, *copy_tensors((args, kwargs)))
            # After the check and the run: a batch that fails in one of them does not count.
            self.steps.append(step)
            return torch.empty(0)

        module.predict_step = predict_step  # type: ignore[method-assign]

    def _run_to_first_block(self, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the model up to its first block, so that an unsuitable batch fails early."""

        def stop(_: nn.Module, __: Any) -> None:
            raise StopForward

        handles = [module.register_forward_pre_hook(stop) for module in self._stop_at]
        try:
            step(*args, **kwargs)
        except StopForward:
            pass
        finally:
            for handle in handles:
                handle.remove()

    def remove(self) -> None:
        """Restore the module's own `predict_step`."""
        # Usually the method is of the class, and the instance has no entry to restore.
        if self._own is None:
            self._module.__dict__.pop("predict_step", None)
        else:
            self._module.predict_step = self._own  # type: ignore[method-assign]


@contextmanager
def blocks_on_cpu(
    module: LightningModule, blocks: Callable[[], Sequence[nn.Module]]
) -> Iterator[None]:
    """Run `configure_model` on the CPU, and keep the blocks there.

    Lightning calls `configure_model` with the accelerator as the default device, and moves the
    whole module there before any hook of a callback could prevent it.

    Args:
        module: The LightningModule, before it is set up.
        blocks: Returns the blocks, once they exist.
    """
    original = module.configure_model

    @functools.wraps(original)  # Lightning checks whether it is overridden
    def configure_model() -> None:
        with CPU:
            original()

    with replaced(module, "configure_model", configure_model), held_on_cpu(module, blocks):
        yield
