"""The batches of a trainer's predict loop: stored, checked and described."""

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from mrp_lightning.calibration.offload import CPU
from mrp_lightning.calibration.walks import StopForward, replaced
from mrp_lightning.environment import progress_log as log
from mrp_lightning.errors import DataError, counted
from mrp_lightning.loop.causal_lm import CausalLM
from mrp_lightning.loop.module_parts import language_models
from mrp_lightning.models.batch import check_vocabulary, token_ids
from mrp_lightning.models.checkpoint import longest_sequence
from mrp_lightning.processes import Processes
from mrp_lightning.targets.layers import ExpertStack
from mrp_lightning.targets.plan import Plan
from mrp_lightning.upstream.other_names import predict_data

_READ = {"input_ids", "attention_mask"}
"""The entries of a batch that a CausalLM reads."""
_FEW_WORDS = 8
"""The number of different tokens up to which a text counts as degenerate."""


def eager() -> Any:
    """Return a context that disables compiled code, in which hooks added later do not fire."""
    return torch.compiler.set_stance("force_eager")


@dataclass(frozen=True)
class Step:
    """The arguments of one `predict_step`, on the CPU."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def batch(self) -> Any:
        """The batch, which `predict_step` takes first."""
        return self.args[0] if self.args else self.kwargs.get("batch")

    def to(self, device: torch.device) -> "Step":
        """Return the step with copies of its arguments on a device."""
        # A copy at each run: a step may change its batch, which the next pass needs as it was.
        return Step(*move_data_to_device(deepcopy((self.args, self.kwargs)), device))


@contextmanager
def captured_steps(module: LightningModule, stop_at: Sequence[nn.Module]) -> Iterator[list[Step]]:
    """Let `predict_step` store its arguments, and run the model up to its first block alone.

    The first call of a module of `stop_at` ends the forward. A batch that `check_batch` refuses, or
    on which the model fails, raises and does not count among the steps.
    """
    original, steps = module.predict_step, list[Step]()

    def stop(_: nn.Module, __: Any) -> None:
        raise StopForward

    @functools.wraps(original)  # Lightning reads the signature
    def predict_step(*args: Any, **kwargs: Any) -> Tensor:
        # The loop may be in inference mode, whose tensors (the batch, and tensors that the model
        # stores) could not be used in training later.
        with ExitStack() as run:
            run.enter_context(torch.inference_mode(False))
            run.enter_context(torch.no_grad())
            run.enter_context(eager())
            # A copy, since the run may change the batch.
            step = Step(args, kwargs).to(CPU)
            check_batch(module, step.batch)
            for block in stop_at:
                run.enter_context(block.register_forward_pre_hook(stop))
            with suppress(StopForward):
                original(*deepcopy(args), **deepcopy(kwargs))
        steps.append(step)
        return torch.empty(0)

    with replaced(module, "predict_step", predict_step):
        yield steps


def check_batch(module: LightningModule, batch: Any) -> None:
    """Raise a DataError for a calibration batch that does not fit the model.

    Token ids and masks are checked for a module with exactly one Hugging Face model.
    """
    if isinstance(module, CausalLM) and isinstance(batch, Mapping):
        parameters = signature(module.model.forward).parameters.keys() - _READ
        values = {key: x for key, x in batch.items() if key in parameters and isinstance(x, Tensor)}
        if others := [f"`{key}`" for key, x in values.items() if x.is_floating_point()]:
            raise DataError(
                f"A CausalLM reads `input_ids` and `attention_mask` alone, so {', '.join(others)} "
                "of the batch would have no part in the calibration. Give your own "
                "LightningModule, whose `predict_step` calls the model with them."
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


def warn_of_data(steps: Sequence[Step], plan: Plan, processes: Processes) -> None:
    """Warn of few tokens, and of few words; a collective call."""
    own_windows = [window for step in steps for window in _windows(step.batch)]
    # Digests are gathered in place of windows: 40 characters each, whatever the length.
    own_sizes = {
        hashlib.sha1(window.numpy().tobytes()).hexdigest(): len(window) for window in own_windows
    }
    # Different tokens, not their counts: a text of few words is degenerate however long it is.
    own_words = torch.cat(own_windows).unique().tolist() if own_windows else []
    gathered = processes.all((own_sizes, own_words))
    windows = {window: size for sizes, _ in gathered for window, size in sizes.items()}
    known_words = {word for _, words in gathered for word in words}
    if windows:
        _warn_of_little_text(plan, [*windows.values()], len(known_words))


def _warn_of_little_text(plan: Plan, sizes: Sequence[int], words: int) -> None:
    """Warn of windows with fewer tokens (`sizes`) than columns, or few different ones (`words`)."""
    layers = [*plan.outside, *(layer for layers in plan.layers.values() for layer in layers)]
    # XᵀX of fewer tokens than columns is singular: only damping decides about the other directions.
    # A stack of experts is no layer to solve, and its experts see a part of the tokens anyway.
    solved = [layer for layer in layers if not isinstance(layer, ExpertStack)]
    widest = max(solved, key=lambda layer: layer.columns, default=None)
    tokens = sum(sizes)
    if widest is not None and tokens < widest.columns:
        log.warning(
            "The calibration data hold %s in %s, and %s, the widest of the layers to prune, has %s "
            "columns: with fewer tokens than columns, the text says nothing of some of its inputs. "
            "Give more or longer windows (`num_samples`, `sequence_length`), several times as many "
            "tokens as columns.",
            *(counted(tokens, "token"), counted(len(sizes), "different window")),
            *(widest.name, f"{widest.columns:,}"),
        )
    if words <= _FEW_WORDS:
        log.warning(
            "All %s tokens of the calibration data are repetitions of %d different ones, which is "
            "no text that a model reads. Give text of the kind that it is to be used on "
            "(`train_files` or `calibration`).",
            *(f"{tokens:,}", words),
        )


def describe_data(trainer: Trainer, steps: list[Step], processes: Processes) -> dict[str, Any]:
    """Describe the calibration data, with `None` for unknown facts; a collective call.

    Returns:
        `samples` and `sequence_length` (the longest) of token ids, and `source`, `files`,
        `text_column`, `seed` and `bos` of a data module such as `TextDataModule`.
    """
    own_shapes = [list(ids.shape) for step in steps if (ids := token_ids(step.batch)) is not None]
    shapes = [shape for process_shapes in processes.all(own_shapes) for shape in process_shapes]
    # The data of this call, since `trainer.datamodule` may be that of an earlier call.
    data: Any = predict_data(trainer)
    text = data if hasattr(data, "calibration_source") else None
    return {
        "source": text and text.calibration_source,
        "files": text and [str(file.absolute()) for file in text.train_files],
        "text_column": text and text.text_column,
        "samples": sum(samples for samples, _ in shapes) or None,
        "sequence_length": max((length for _, length in shapes), default=None),
        "seed": None if text is None else text.seed,
        "bos": text and text.bos,
    }


def _windows(batch: Any) -> list[Tensor]:
    """Return the token ids of each window of a batch, without padding; none if it has no ids."""
    ids = token_ids(batch)
    if ids is None:
        return []
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if mask is None or mask.shape != ids.shape:
        return list(ids)
    return [row[kept] for row, kept in zip(ids, mask != 0, strict=True)]
