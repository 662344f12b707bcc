"""Keeping the batches of a predict loop, and the blocks on the CPU, without running the model."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from mrp_lightning.calibration.forwards import replaced
from mrp_lightning.calibration.offload import CPU, held_on_cpu
from mrp_lightning.calibration.walks import StopForward
from mrp_lightning.errors import DataError
from mrp_lightning.upstream.lightning_names import movable


def eager() -> Any:
    """A context without compiled code, in which hooks that are added later would not fire."""
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
        """Copy the arguments to a device."""
        args, kwargs = copy_tensors((self.args, self.kwargs), device)
        return Step(args, kwargs)


def copy_tensors(data: Any, device: torch.device | None = None) -> Any:
    """Copy a collection with its tensors and arrays, and objects that Lightning can move.

    Strings and the like are kept.
    """

    def copied(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.detach().to(device or x.device, copy=True)
        x = deepcopy(x)
        return x if device is None or isinstance(x, np.ndarray) else x.to(device)

    kinds = (Tensor, np.ndarray, movable())
    return apply_to_collection(data, kinds, copied, wrong_dtype=(Mapping, Sequence))


def require_batches(module: LightningModule) -> None:
    """Refuse a `predict_step` that Lightning gives an iterator in place of batches.

    Raises:
        DataError: It takes one.
    """
    if is_param_in_hook_signature(module.predict_step, "dataloader_iter", explicit=True):
        raise DataError(
            f"{type(module).__name__}.predict_step takes `dataloader_iter`, and pruning needs the "
            "calibration batches one by one. Let it take `batch` and `batch_idx`."
        )


class StepCapture:
    """Replaces `predict_step` by one that stores its arguments and stops at the first block.

    Args:
        module: The LightningModule whose `predict_step` is replaced.
        stop_at: The modules at whose first call the forward ends.
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
            # The loop may be in inference mode, whose tensors (the batch, and what the model keeps)
            # could not be used in training later.
            with torch.inference_mode(False), torch.no_grad(), eager():
                step = Step(*copy_tensors((args, kwargs), torch.device("cpu")))
                self._check(step.batch)
                self._run_to_first_block(original, *copy_tensors((args, kwargs)))
            self.steps.append(step)
            return torch.empty(0)

        module.predict_step = predict_step  # type: ignore[method-assign]

    def _run_to_first_block(self, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Fail where the model cannot take the batch, at the cost of its embedding."""

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
        """Give the module its own `predict_step` back."""
        if self._own is None:
            self._module.__dict__.pop("predict_step", None)
        else:
            self._module.predict_step = self._own  # type: ignore[method-assign]


@contextmanager
def blocks_on_cpu(
    module: LightningModule, blocks: Callable[[], Sequence[nn.Module]]
) -> Iterator[None]:
    """Let what `configure_model` makes be made on the CPU, and the blocks stay there.

    Lightning calls `configure_model` with the accelerator as the default device, and moves the
    whole module to it before the first hook of a callback that could stop it.

    Args:
        module: The LightningModule, before it is set up.
        blocks: Finds its blocks, once they are made.
    """
    original = module.configure_model

    @functools.wraps(original)  # Lightning looks whether it is overridden
    def configure_model() -> None:
        with CPU:
            original()

    with replaced(module, "configure_model", configure_model), held_on_cpu(module, blocks):
        yield
