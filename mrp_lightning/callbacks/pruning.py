"""Pruning in Lightning's predict loop."""

import logging
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from inspect import signature
from os import PathLike
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from mrp_ground.arguments import checked
from mrp_lightning.environment import progress_log
from mrp_lightning.errors import DataError, OptionError
from mrp_lightning.loop.distributed import end_with_launcher
from mrp_lightning.loop.pruned_module import PrunedModule
from mrp_lightning.loop.pruning_run import Run
from mrp_lightning.pruning.settings import Settings
from mrp_lightning.records.report import PruningReport
from mrp_lightning.signals import Interrupted
from mrp_lightning.storage.files import output_path

log = logging.getLogger(__name__)


class PruningCallback(Callback):
    """Prune the model that `predict` runs, calibrated on the data of that `predict`.

    For each linear layer, with H = 2·XᵀX / tokens of its inputs over the calibration data, it
    minimises ½·tr(δ H δᵀ), the mean over tokens of ‖(w + δ)x − wx‖², subject to the removed weights
    being zero. Blocks are pruned in the order in which they run, each on the outputs of the pruned
    blocks before it. Padding (`attention_mask` 0) has no effect.

    The loop only stores the batches. At its end the model is pruned in place, and `predict` returns
    nothing. A callback prunes once: later calls of `predict` only predict, after they have saved a
    pruned model that could not be saved before.

    With `strategy="ddp"`, also under torchrun and on several machines, processes share the batches
    and the rows of each layer. All of them end with the same weights, and the first one saves.

    All arguments are keywords. The arguments of `Settings`, such as `pattern="2:4"` or
    `sparsity=0.5`, choose how the model is pruned; `method` is required here, and "SM" by default
    in `MRPCallback`.

    Args:
        save_dir: The directory for the pruned model and `pruning_report.json`. If the
            LightningModule holds exactly one `PreTrainedModel`, a Hugging Face checkpoint is
            written, with any other weights in `module.safetensors`; otherwise all weights are in
            `model.safetensors`. The directory appears when it is complete. Nothing is written with
            `fast_dev_run`.
        overwrite: Whether `save_dir` may be replaced, if this package wrote all of its content.
        resume: Whether an interrupted run resumes at its first block that is not pruned yet, from
            the journal next to `save_dir`; `False` starts from the first block. See docs/large.md.
        **settings: The arguments of `Settings`.

    Attributes:
        settings: The checked `Settings`.
        save_dir: The argument as an absolute `Path`, `None` if nothing is saved.
        run_directory: The directory next to which the journal is written, if it is not `save_dir`;
            else `None`, as it is unless it is set. Such a journal outlives the run, until
            `remove_journal` deletes it.
        report: The result for each layer, `None` before the first run. After an exception it lists
            the pruned layers; all others are unchanged, except in the block in progress, which may
            be scaled and tuned. `report.complete` is true once all layers are pruned and
            `save_dir`, if there is one, is written.

    Raises:
        PatternError: `sparsity`, `pattern` or `block_size` are malformed.
        MethodError: There is no such method, or not for this pattern, `structure` or `target`.
        OptionError: Another argument is out of range, or contradicts the others.
        TypeError: There is no argument of that name, or `method` is missing.
    """

    @checked
    def __init__(
        self,
        *,
        save_dir: str | PathLike[str] | None = None,
        overwrite: bool = False,
        resume: bool = True,
        **settings: Any,
    ) -> None:
        end_with_launcher()  # long before `predict`: the launcher may end at any time
        _refuse_unknown(type(self).__name__, settings)
        self.settings = Settings(**settings)
        self.save_dir = None if save_dir is None else output_path(save_dir)
        self.run_directory: Path | None = None
        self.overwrite, self.resume = overwrite, resume
        self.report: PruningReport | None = None
        self._run: Run | None = None
        self._pruned: PrunedModule | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check, before `predict` reads the data, that the model can be pruned and saved.

        If this model is pruned but could not be saved, it is saved now, and not pruned again.
        """
        self._end_run()
        caller = type(self).__name__
        if stage != "predict":
            if not self._is_done:
                name = getattr(stage, "value", stage)
                log.warning("This %s prunes in `predict`; in `%s` it does nothing.", caller, name)
            return
        # 1. A pruned model that could not be saved is saved now: pruning it again would prune
        #    pruned layers.
        # 2. A complete run has no second effect.
        # 3. Two callbacks would both capture batches and prune the same model.
        unsaved = None if self._is_done else self._pruned
        if unsaved is not None and unsaved.is_of(pl_module) and self.save_dir is not None:
            self._save_and_release(self.save_dir, unsaved)
        if self._is_done:
            log.warning(
                "This %s has pruned already, and predict only predicts; make a new callback for "
                "another model.",
                caller,
            )
            return
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        pending = [c for c in callbacks if isinstance(c, PruningCallback) and not c._is_done]
        if len(pending) > 1:
            raise OptionError("A predict run takes one PruningCallback; run predict once for each.")
        run = Run(trainer, pl_module, self)
        # The run is checked before `start`, which changes the module: a refused run leaves it as it
        # was.
        run.check()
        run.start()
        self._run = run

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the loop store batches instead of running the model, and return no predictions."""
        if self._run is not None:
            trainer.predict_loop.return_predictions = False
            self._run.capture()

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prune on the stored batches, save, and set `report`; do nothing if there is no batch."""
        run = self._run
        if run is None or not run.num_batches():
            return
        # The module gets its own methods back first, since pruning calls its forward.
        self._end_run()
        try:
            with run.job() as job:
                self._pruned = pruned = run.prune(job)
                if run.save_dir is None:
                    run.report.complete = True
                else:
                    # All processes wait even if saving raises, or the others would go on while the
                    # first one still writes.
                    try:
                        self._save_and_release(run.save_dir, pruned)
                    finally:
                        trainer.strategy.barrier("saved")
                run.log_result()
        finally:
            self.report = run.report  # also after an error: it has the layers that are pruned

    def _save_and_release(self, directory: str | PathLike[str], pruned: PrunedModule) -> None:
        pruned.save(directory, overwrite=self.overwrite)
        self._pruned = None  # else the callback would keep all weights in memory

    @checked
    def save(self, directory: str | PathLike[str], *, overwrite: bool = False) -> None:
        """Write the pruned model and its report, in the same form as `save_dir`.

        Use it for a pruning without `save_dir`, or one whose saving failed: the callback keeps the
        model in memory until it is saved. Of several processes, the first one writes.

        Args:
            directory: The directory to write; it appears when it is complete.
            overwrite: Whether a directory that this package wrote may be replaced.

        Raises:
            OptionError: Nothing is pruned yet, the model is in `save_dir` and no longer kept in
                memory, or its weights were changed after the pruning.
            SaveError: The directory could not be written, or may not be replaced. The pruned model
                is still in memory.
        """
        if self._pruned is None:
            why = "nothing is pruned yet. Run `trainer.predict` first."
            if self._is_done:
                why = f"the model is in `save_dir`, and not kept in memory. Copy {self.save_dir}."
            raise OptionError(f"{type(self).__name__}.save: {why}")
        self._pruned.save(directory, overwrite=overwrite)

    def kept(self, name: str, compute: Callable[[], Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        """Return tensors that a run in progress keeps in its journal; see `Run.kept`."""
        return compute() if self._run is None else self._run.kept(name, compute)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """End the run; Lightning does not call `teardown` after an exception."""
        if isinstance(exception, Interrupted):
            progress_log.warning("Stopped by %s.", exception.signal.name)
        self._end_run()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise a DataError if there was no batch to calibrate on."""
        # `on_predict_epoch_end` has ended the run if there was a batch. A run that is still open at
        # teardown has had none.
        if self._run is None:
            return
        self._end_run()
        size = trainer.world_size
        where = "" if size == 1 else f" to process {trainer.global_rank} of {size}"
        raise DataError(
            f"{type(self).__name__} pruned nothing: the predict dataloader gave no batch{where}. "
            "Give it calibration data, and check `limit_predict_batches`."
        )

    def _end_run(self) -> None:
        if self._run is not None:
            self._run.close()
            self._run = None

    @property
    def _is_done(self) -> bool:
        return self.report is not None and self.report.complete


class MRPCallback(PruningCallback):
    """`PruningCallback` whose method is "SM" by default: mask S, exact compensation M.

    Args:
        method: As in `PruningCallback`.
        **others: The other arguments of `PruningCallback`.
    """

    def __init__(self, *, method: str = "SM", **others: Any) -> None:
        super().__init__(method=method, **others)


def _refuse_unknown(callback: str, settings: Iterable[str]) -> None:
    """Raise a `TypeError` for names that are no settings, with the nearest argument."""
    own = list(signature(PruningCallback).parameters)
    arguments = [*own[:-1], *signature(Settings).parameters]  # the last one is `settings` itself
    for name in (name for name in settings if name not in arguments):
        nearest = get_close_matches(name, arguments, n=1)
        meant = f"Did you mean `{nearest[0]}`?" if nearest else f"There are {', '.join(arguments)}."
        raise TypeError(f"{callback} has no argument `{name}`. {meant}")
