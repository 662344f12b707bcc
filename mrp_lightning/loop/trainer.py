"""Lightning's Trainer with callbacks for a single `predict`."""

import os
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl
import torch
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.callbacks import Callback, ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core import rank_zero
from torch import Tensor, nn
from transformers import PreTrainedModel

from mrp_ground.arguments import checked
from mrp_lightning.calibration.offload import explained_out_of_memory
from mrp_lightning.devices import warn_of_unused_gpu
from mrp_lightning.environment import ABSENT_DEVICES, silenced
from mrp_lightning.errors import DataError, FormatError, OptionError, SaveError, first_line
from mrp_lightning.loop.causal_lm import CausalLM, ExactValues
from mrp_lightning.loop.distributed import require_whole_models
from mrp_lightning.loop.progress import BatchLog
from mrp_lightning.models.classes import reads_text_alone
from mrp_lightning.models.integrity import explained_checkpoint, why_no_checkpoint
from mrp_lightning.models.loading import find_tokenizer
from mrp_lightning.pruning.settings import Settings
from mrp_lightning.records.report import PruningReport
from mrp_lightning.storage.files import move_durably
from mrp_lightning.upstream.other_names import unwrap_dataloaders
from mrp_lightning.upstream.torch_names import uncompiled


class Trainer(pl.Trainer):
    """A `lightning.pytorch.Trainer` whose `predict` takes callbacks and plain models.

    From checkpoints only tensors and plain containers are unpickled, unless `weights_only` is false
    or a plugin replaces Lightning's own loading.

    Args:
        devices: The number of accelerators, or their indices. With `strategy="ddp"`, several
            devices share the work of pruning; see docs/large.md.
        callbacks: One callback or several, for all calls of the trainer.
        logger: One logger or several. `True` is Lightning's default logger, which makes a directory
            of logs in the working directory at each run. By default there is no logger.
        **kwargs: The other arguments of `lightning.pytorch.Trainer`; `enable_progress_bar` is true
            by default on a terminal alone, and else lines are logged.

    Raises:
        TypeError: `callbacks` holds another object, such as a callback of `pytorch_lightning`.
        OptionError: `devices` has another type.
    """

    callbacks: list[Callback]  # Lightning sets it without declaring it

    @checked
    def __init__(
        self,
        *,
        devices: list[int] | str | int = 1,
        callbacks: list[Callback] | Callback | None = None,
        logger: Logger | Iterable[Logger] | bool | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs.get("accelerator", "auto") == "auto":
            warn_of_unused_gpu()
        logger = False if logger is None else logger
        # At the front, since Lightning requires checkpoint callbacks to come last.
        callbacks = [BatchLog(), _Unwrap(), *_checked(callbacks)]
        # In a file or notebook the lines of the log show the progress, on a terminal a bar.
        if kwargs.get("enable_progress_bar") is None:
            has_bar = any(isinstance(callback, ProgressBar) for callback in callbacks)
            kwargs["enable_progress_bar"] = has_bar or sys.stdout.isatty()
        # The logger is that of the last imported of the packages that Lightning is published as.
        with silenced(rank_zero.log.name, ABSENT_DEVICES):
            super().__init__(devices=devices, callbacks=callbacks, logger=logger, **kwargs)
        # Only Lightning's own: a user's plugin, subclasses included, stays.
        if type(self.strategy.checkpoint_io) is TorchCheckpointIO:
            self.strategy.checkpoint_io = TensorsOnly()

    def predict(  # type: ignore[override]  # (a plain module is taken too)
        self,
        model: nn.Module | str | os.PathLike[str] | None = None,
        dataloaders: Any = None,
        datamodule: pl.LightningDataModule | None = None,
        return_predictions: bool | None = None,
        ckpt_path: str | None = None,
        weights_only: bool | None = None,
        *,
        callbacks: Callback | Sequence[Callback] | None = None,
    ) -> Any:
        """Run `predict_step` over the data; see `lightning.pytorch.Trainer.predict`.

        `model` may be a Hugging Face model, too, its path or hub id, or any module, which is called
        with the batch, its first item if it is a list, or its entries if it is a mapping. The
        `callbacks` are for this call only, together with the trainer's own. From a checkpoint only
        tensors and plain containers are unpickled, unless `weights_only` is false.

        Returns:
            The results of `predict_step` on the CPU, a list for each of several dataloaders; `None`
            without `return_predictions`, or if a callback prunes.

        Raises:
            TypeError: `callbacks` holds an object that is no `lightning` callback; `model`,
                `dataloaders` or `datamodule` is of the package `pytorch_lightning`; or `model` has
                another type. `CausalLM` raises more for a path or hub id.
            DataError: A callback prunes, and there is no data to calibrate on.
            FormatError: `ckpt_path` is damaged, no checkpoint, or forbidden by `weights_only`.
            ValueError: `callbacks` holds a progress bar, and the trainer has one already.
            OutOfMemoryError: There is not enough memory to prune.
            StrategyError: A callback prunes, and the strategy shards the model, starts workers
                whose pruned weights would be lost, or is unknown.
        """
        # The class of a compiled module is torch's, and hides the package of the one inside.
        inner = uncompiled(model) if isinstance(model, nn.Module) else model
        arguments = {"model": inner, "datamodule": datamodule, "dataloaders": dataloaders}
        for argument, value in arguments.items():
            if _is_of_the_other_package(value):
                raise TypeError(f"`{argument}`: expected one of `lightning`. {_got([value])}")
        model = None if model is None else as_lightning_module(model)
        with self._borrow(callbacks), self._explained_memory():
            # Before workers are started, in which an error would end in tracebacks of all of them.
            for callback in _to_prune(self):
                require_whole_models(self, type(callback).__name__)
            if dataloaders is None and datamodule is None:
                self._require_data(model)
            options = (return_predictions, ckpt_path, weights_only)
            return super().predict(model, dataloaders, datamodule, *options)  # type: ignore[arg-type]

    def _require_data(self, model: nn.Module | None) -> None:
        """Raise a `DataError` if a callback prunes and the module has no `predict_dataloader`."""
        module = None if model is None else uncompiled(model)
        if not isinstance(module, pl.LightningModule):
            return
        if callbacks_that_prune(self) and not is_overridden("predict_dataloader", module):
            raise DataError(
                "`predict` was given nothing to calibrate on. Give `dataloaders`, or a text by "
                "`datamodule=TextDataModule(train_files=…)`; or let the model write it itself: "
                '`datamodule=TextDataModule(calibration="self")`.'
            )

    def _explained_memory(self) -> AbstractContextManager[None]:
        """Return a context that explains out-of-memory errors if a callback is to prune."""
        if not (to_prune := _to_prune(self)):
            return nullcontext()
        is_offloaded = any(callback.settings.offload for callback in to_prune)
        return explained_out_of_memory(self.strategy.root_device, offload=is_offloaded)

    @contextmanager
    def _borrow(self, callbacks: Callback | Sequence[Callback] | None) -> Iterator[None]:
        """Add those callbacks that the trainer lacks, and remove them after the context."""
        extra = list({id(callback): callback for callback in _checked(callbacks)}.values())
        # By identity, too: equal callbacks are still two, and one that is present is not doubled.
        extra = [c for c in extra if not any(c is present for present in self.callbacks)]
        if any(isinstance(c, ProgressBar) for c in extra) and self.progress_bar_callback:
            raise ValueError("`callbacks` holds a progress bar, and the trainer has one already.")
        self.callbacks = [*extra, *self.callbacks]  # the trainer's checkpoints stay last
        try:
            yield
        finally:
            # By identity: the model's configure_callbacks may have changed the list.
            borrowed = {id(callback) for callback in extra}
            self.callbacks = [c for c in self.callbacks if id(c) not in borrowed]
            for callback in extra:  # drops a bound method, which would keep the model alive
                callback.__dict__.pop("log", None)
                callback.__dict__.pop("log_dict", None)


def require_accelerator(accelerator: Any) -> None:
    """Raise an OptionError for a name of no accelerator of this machine; other objects pass."""
    accelerators = {n: AcceleratorRegistry[n]["accelerator"] for n in AcceleratorRegistry}
    available = {name for name, kind in accelerators.items() if kind.is_available()}
    # Lightning's `gpu` is not in the registry, since it stands for whichever of the two there is.
    names = {"auto", *available, *(["gpu"] if available & {"cuda", "mps"} else [])}
    if isinstance(accelerator, str) and accelerator not in names:
        raise OptionError(
            f"expected auto or one that this machine has ({', '.join(sorted(available))}). Got "
            f"{accelerator}. Name another, or leave it out.",
            "accelerator",
        )


class _Unwrap(Callback):
    def on_exception(self, *_: Any) -> None:
        """Remove Lightning's wrappers from dataloaders, as after a run without errors."""
        unwrap_dataloaders()


_OF_LAUNCHER = ".temp.ckpt"
"""The file by which Lightning brings the weights back from processes that it forked or spawned."""


class TensorsOnly(TorchCheckpointIO):
    """Load only tensors and plain containers from checkpoints, unless `weights_only` is false.

    Lightning itself would unpickle a checkpoint from a URL completely, code included. It also holds
    a file twice in memory before it writes it, where a training nearly fills the memory.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Write a checkpoint to a local file, which appears when it is complete, or to a URL.

        A SaveError is raised if torch's writer fails, as it does on a full disk.
        """
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f".{file.name}.part")
        try:
            torch.save(checkpoint, part)
            move_durably(part, file)
        except BaseException as error:
            part.unlink(missing_ok=True)
            if isinstance(error, RuntimeError):  # torch's writer names neither file nor reason
                raise SaveError(
                    f"The checkpoint {file} cannot be written: {first_line(error)}. Make room if "
                    "the disk is full; an earlier one is as it was."
                ) from error
            raise

    def load_checkpoint(
        self,
        path: Any,
        map_location: Callable | None = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint; see `explained_checkpoint`. `weights_only` is true if it is `None`."""
        weights_only = weights_only is not False
        with explained_checkpoint(path, weights_only=weights_only):
            if isinstance(path, str | Path) and zipfile.is_zipfile(path):
                # Its pages are read when they are copied, not into memory beside the copies.
                content = torch.load(path, map_location, weights_only=weights_only, mmap=True)
            else:
                content = super().load_checkpoint(path, map_location, weights_only)
            if Path(str(path)).name == _OF_LAUNCHER:
                return content
            if reason := why_no_checkpoint(content):
                raise FormatError(f"`ckpt_path`: {path} cannot be read: {reason}.")
            return content


@runtime_checkable
class Pruning(Protocol):
    """The interface of `PruningCallback`, which this package may not import."""

    settings: Settings
    report: PruningReport | None
    save_dir: Path | None
    run_directory: Path | None
    overwrite: bool
    resume: bool

    def kept(self, name: str, compute: Callable[[], Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        """Return tensors that a run in progress keeps in its journal; see `Run.kept`."""


def callbacks_that_prune(trainer: pl.Trainer) -> list[Pruning]:
    """Return the callbacks of a trainer that prune, in their order."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, Pruning)]


def _to_prune(trainer: pl.Trainer) -> list[Pruning]:
    """Return the callbacks that prune and have not finished; a callback prunes once."""
    callbacks = callbacks_that_prune(trainer)
    return [c for c in callbacks if c.report is None or not c.report.complete]


def _checked(callbacks: Callback | Sequence[Callback] | None) -> list[Callback]:
    """Return the callbacks as a list; raise a TypeError if one is not of `lightning`."""
    if callbacks is None:
        return []
    listed = list(callbacks) if isinstance(callbacks, Sequence) else [callbacks]
    foreign = [c for c in listed if not isinstance(c, Callback)]
    if foreign:
        raise TypeError(f"`callbacks` must be callbacks of `lightning`. {_got(foreign)}")
    return listed


def _is_of_the_other_package(value: object) -> bool:
    """Return whether a value is of `pytorch_lightning`, whose classes have the same names."""
    names = (kind.__module__ for kind in type(value).__mro__)
    return any(name.partition(".")[0] == "pytorch_lightning" for name in names)


def _got(values: Sequence[object]) -> str:
    """Return the end of an error message: the types of wrong values, and a likely correction."""
    if classes := [value.__name__ for value in values if isinstance(value, type)]:
        made = ", ".join(f"`{name}(…)`" for name in classes)
        return f"Got the class {', '.join(classes)}: make an object of it, {made}."
    named = ", ".join(type(value).__name__ for value in values)
    if not any(_is_of_the_other_package(value) for value in values):
        return f"Got {named}."
    return (
        f"Got {named} of `pytorch_lightning`, which is another package with the same names. "
        "Import from `lightning.pytorch`, here and where the class is defined."
    )


def as_lightning_module(model: Any) -> nn.Module:
    """Return a LightningModule for `predict`: the module itself, compiled or not, or a wrapper.

    A path or hub id is loaded as by `CausalLM`. An object of another type raises a TypeError.
    """
    if isinstance(model, str | os.PathLike):
        return CausalLM(model)
    if isinstance(uncompiled(model), pl.LightningModule):
        return model
    # Before the general case, which every PreTrainedModel fits: a CausalLM also has perplexities.
    if isinstance(model, PreTrainedModel) and model.can_generate() and reads_text_alone(model):
        return CausalLM(model)
    if isinstance(model, nn.Module):
        return ModuleRunner(model)
    raise TypeError(
        "`model` must be a LightningModule, a module, or the path or hub id of a language model; "
        f"got {type(model).__name__}."
    )


class ModuleRunner(ExactValues):
    """Calls a plain module with each batch.

    Its `tokenizer` is the one stored with a generating Hugging Face model, else `None`.

    Args:
        model: Any module.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        generates = getattr(model, "can_generate", bool)()
        source = getattr(model, "name_or_path", None) if generates else None
        self.tokenizer: Any = find_tokenizer(source) if source else None
        # Nothing is generated: cached keys and values would only take memory.
        self._options: dict[str, Any] = {"use_cache": False} if generates else {}

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """Return the output of the module for one batch."""
        if isinstance(batch, Tensor | list | tuple):
            ids = batch if isinstance(batch, Tensor) else batch[0]
            return self.model(ids, **self._options)
        # The batch goes last, so that its own `use_cache` wins.
        return self.model(**{**self._options, **batch})
