"""Pruning in Lightning's predict loop."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from os import PathLike
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from safetensors import SafetensorError

from mrp_lightning.errors import DataError, OptionError, SaveError
from mrp_lightning.files import check_output_dir
from mrp_lightning.loop.capture import Step, StepCapture, eager
from mrp_lightning.loop.causal_lm import CausalLM
from mrp_lightning.loop.contents import check_batch, checkpoint_root
from mrp_lightning.loop.data_module import TextDataModule
from mrp_lightning.loop.placement import blocks_on_cpu
from mrp_lightning.loop.predict_loop import prune_in_trainer
from mrp_lightning.loop.saving import num_bytes, save_pruned, sources_of
from mrp_lightning.loop.strategies import require_one_process
from mrp_lightning.pruning.report import PruningReport
from mrp_lightning.solver.recipe import Recipe
from mrp_lightning.targets.blocks import find_blocks
from mrp_lightning.targets.names import as_patterns
from mrp_lightning.targets.plan import Plan, make_plan

log = logging.getLogger(__name__)


class PruningCallback(Callback):
    """Prune the model that `predict` runs, calibrated on the data that it runs on.

    For each linear layer, with H = 2·XᵀX / tokens of its inputs over the calibration data, it
    minimises ½·tr(δ H δᵀ), the mean over tokens of ‖(w + δ)x − wx‖², subject to the removed weights
    being zero. Blocks are pruned in the order in which they run, each on the outputs of the pruned
    blocks before it. Padding (`attention_mask` 0) counts nowhere.

    The loop itself only stores the batches; the work is done at its end, in place, and `predict`
    returns nothing. A callback prunes once: later `predict` calls with it are ordinary.

    Args:
        method: magnitude, wanda, SS (the same as sparsegpt), SM, MS, MM, or a pair
            MASK+COMPENSATION, with MASK magnitude, wanda, S or M, and COMPENSATION none, S or M.
            Case matters.
        sparsity: The fraction of the weights to remove, in (0, 1). Exactly one of `sparsity` and
            `pattern` is given.
        pattern: "N:M" keeps N of every M consecutive input features. Quoted in YAML, which reads
            an unquoted 2:4 as a number.
        block_size: The number of columns (input features) that are chosen together, a multiple of
            M. `None` means all.
        damping: The fraction (≥ 0) of the mean of the Hessian's diagonal that is added to it.
        tolerance: The relative distance (> 0) to the optimal loss at which the exact compensation M
            stops.
        targets: The names of the linear layers to prune, with shell wildcards: runs of whole name
            parts, such as `q_proj`, `mlp`, `layers.3`. All layers in the blocks but routers if not
            given. A name that is in no block, such as `lm_head`, is calibrated after the blocks.
        ignore: The names, of the same form, of what to leave dense.
        blocks: The names of the lists of blocks (`model.layers`), or of single blocks, where the
            outermost `ModuleList`s are not the right ones.
        true_sequential: Whether the layers of a block are pruned one after another (q, k, v; then
            o; …), each on the outputs of those before it, for one pass over the data each.
        offload: Whether blocks and stored activations stay in CPU memory, one block at a time on
            the accelerator.
        skip_indivisible: Whether layers whose input features are no multiple of M are left dense,
            instead of refusing the model.
        save_dir: The directory for the pruned model: a Hugging Face checkpoint if the
            LightningModule holds exactly one `PreTrainedModel`, else `model.safetensors`; and
            `pruning_report.json`. It appears when it is whole. Nothing is written with
            `fast_dev_run`.
        overwrite: Whether `save_dir` may be replaced, if all that it holds was written by this
            package.

    Attributes:
        report: What was done to each layer, `None` before the first run. After an exception it
            lists the layers that are pruned, and all others are untouched. `report.complete` is
            true once all are pruned and `save_dir`, if there is one, is written.

    Raises:
        PatternError: `sparsity`, `pattern` or `block_size` are malformed.
        MethodError: There is no such method.
        OptionError: `block_size`, `damping` or `tolerance` is out of range.
    """

    def __init__(
        self,
        *,
        method: str,
        sparsity: float | None = None,
        pattern: str | int | None = None,  # int: to explain what YAML makes of an unquoted 2:4
        block_size: int | None = 128,
        damping: float = 0.01,
        tolerance: float = 1e-6,
        targets: list[str] | str | None = None,
        ignore: list[str] | str | None = None,
        blocks: list[str] | str | None = None,
        true_sequential: bool = False,
        offload: bool = False,
        skip_indivisible: bool = False,
        save_dir: str | PathLike[str] | None = None,
        overwrite: bool = False,
    ) -> None:
        self.recipe = Recipe.of(
            method=method,
            sparsity=sparsity,
            pattern=pattern,  # type: ignore[arg-type]
            block_size=block_size,
            damping=damping,
            tolerance=tolerance,
        )
        self.true_sequential = true_sequential
        self.targets, self.ignore, self.blocks = targets, ignore, blocks
        self.offload, self.skip_indivisible = offload, skip_indivisible
        self.save_dir, self.overwrite = save_dir, overwrite
        self.report: PruningReport | None = None
        self._config = {
            "method": method,
            "sparsity": sparsity,
            "pattern": pattern,
            "block_size": block_size,
            "damping": damping,
            "tolerance": tolerance,
            "targets": list(as_patterns(targets)) or None,
            "ignore": list(as_patterns(ignore)) or None,
            "blocks": list(as_patterns(blocks)) or None,
            "true_sequential": true_sequential,
            "offload": offload,
            "skip_indivisible": skip_indivisible,
        }
        self._session: _Session | None = None
        self._pruned: LightningModule | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check everything that can be checked before the data is read."""
        self._end_session()
        if stage != "predict":
            if self._pruned is None:
                log.warning(
                    "This %s prunes in `predict`; in `%s` it does nothing.",
                    type(self).__name__,
                    getattr(stage, "value", stage),
                )
            return
        if self._is_unsaved_of(pl_module) and self.save_dir is not None:
            self.save(self.save_dir, overwrite=self.overwrite)
        if self._is_done:
            log.warning(
                "This %s has pruned already, so predict only predicts.", type(self).__name__
            )
            return
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        mine = [c for c in callbacks if isinstance(c, PruningCallback) and not c._is_done]
        if len(mine) > 1:
            raise OptionError("A predict run takes one PruningCallback; run predict once for each.")
        require_one_process(trainer, type(self).__name__)
        if self.save_dir is not None and not _is_rehearsal(trainer):
            self._check_save_dir(pl_module, self.save_dir)
        if not _is_built_later(pl_module):
            self._make_plan(pl_module)
        trainer.predict_loop.return_predictions = False
        self._session = _Session()
        if self.offload:
            self._session.hold(pl_module, as_patterns(self.blocks))

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start to store batches."""
        if self._session is not None:
            self._session.capture(pl_module, self._make_plan(pl_module))

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prune, report, save."""
        if self._session is None or not self._session.steps:
            return
        plan, steps = self._session.plan, self._session.steps
        self._end_session()
        config = {**self._config, "batches": len(steps), "precision": str(trainer.precision)}
        if isinstance(trainer.datamodule, TextDataModule):  # type: ignore[attr-defined]
            config["bos"] = trainer.datamodule.bos  # type: ignore[attr-defined]
        self.report = PruningReport(config)
        with torch.inference_mode(False), torch.no_grad(), eager():
            prune_in_trainer(
                trainer,
                pl_module,
                steps,
                plan,
                self.recipe,
                self.report,
                true_sequential=self.true_sequential,
                offload=self.offload,
            )
            self._pruned = pl_module
            self._note_pruned_before(self.report.totals)
            if self.save_dir is not None and not _is_rehearsal(trainer):
                self.report.complete = False  # until it is saved
                self.save(self.save_dir, overwrite=self.overwrite)
        rank_zero_info(self._summary(self.report, rehearsal=_is_rehearsal(trainer)))

    def save(self, directory: str | PathLike[str], *, overwrite: bool = False) -> None:
        """Write the pruned model with its report, as `save_dir` asks for.

        It is for a pruning without `save_dir`, or one whose saving failed.

        Args:
            directory: The directory that is made; it appears when it is whole.
            overwrite: Whether what this package wrote there before may be replaced.

        Raises:
            OptionError: Nothing is pruned yet.
            SaveError: It could not be written, or may not be replaced. The pruned model is still
                in memory.
        """
        if self._pruned is None or self.report is None:
            raise OptionError(
                f"{type(self).__name__}.save: nothing is pruned yet. Run `trainer.predict` first."
            )
        before, self.report.complete = self.report.complete, True  # as the file is to say
        try:
            save_pruned(self._pruned, directory, self.report, overwrite=overwrite)
        except BaseException as error:
            self.report.complete = before
            if not isinstance(error, OSError | SafetensorError):
                raise
            raise SaveError(
                f"The model is pruned, but could not be saved in {directory}: {error}. It is still "
                "in memory: `callback.save(directory)` writes it, and so does another `predict` "
                "with this callback, which does not prune again."
            ) from error

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Leave nothing behind; Lightning does not call `teardown` after an exception."""
        self._end_session()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse to have done nothing.

        Raises:
            DataError: There was no batch to calibrate on.
        """
        if self._session is None:
            return
        self._end_session()
        raise DataError(
            f"{type(self).__name__} pruned nothing: the predict dataloader gave no batch. "
            "Give it calibration data, and check `limit_predict_batches`."
        )

    def _end_session(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def _is_unsaved_of(self, pl_module: LightningModule) -> bool:
        """Whether this very model is pruned, and could not be saved."""
        if self._pruned is None or self._is_done:
            return False
        return checkpoint_root(pl_module)[1] is checkpoint_root(self._pruned)[1]

    def _check_save_dir(self, pl_module: LightningModule, save_dir: str | PathLike[str]) -> None:
        model = checkpoint_root(pl_module)[1]
        check_output_dir(
            save_dir,
            overwrite=self.overwrite,
            sources=sources_of(model),
            num_bytes=num_bytes(model),
        )

    @property
    def _is_done(self) -> bool:
        return self.report is not None and self.report.complete

    def _make_plan(self, pl_module: LightningModule) -> Plan:
        return make_plan(
            pl_module,
            self.recipe.pattern,
            targets=self.targets,
            ignore=self.ignore,
            blocks=self.blocks,
            skip_indivisible=self.skip_indivisible,
            prefix=checkpoint_root(pl_module)[0],
        )

    def _summary(self, report: PruningReport, *, rehearsal: bool) -> str:
        totals = report.totals
        where = f"The model is in {self.save_dir}."
        if rehearsal or self.save_dir is None:
            reason = "`fast_dev_run`" if rehearsal else "no `save_dir`"
            where = f"The model is pruned in memory only ({reason})."
        return (
            f"Pruned {totals['layers']} layers to {self.recipe.pattern} with {self.recipe.method} "
            f"in {totals['seconds']:.1f} s, {totals['skipped']} left dense. Mean output error of a "
            f"layer, relative to its output: {totals['relative_loss']:.4f}. {where}"
        )

    def _note_pruned_before(self, totals: dict[str, Any]) -> None:
        if totals["already_pruned"]:
            log.warning(
                "%d of %d layers already had the pattern %s.",
                totals["already_pruned"],
                totals["layers"],
                self.recipe.pattern,
            )


class _Session:
    """One `predict` that will prune, from its `setup` until the batches are there.

    It changes the module for that time, and `close` takes all changes back.
    """

    plan: Plan
    steps: Sequence[Step] = ()

    def __init__(self) -> None:
        self._changes = ExitStack()

    def close(self) -> None:
        """Give the module back as it was."""
        self._changes.close()

    def hold(self, pl_module: LightningModule, patterns: Sequence[str]) -> None:
        """Keep the blocks on the CPU when Lightning makes and moves the module."""

        def blocks() -> list[torch.nn.Module]:
            return [block.module for block in find_blocks(pl_module, patterns)]

        self._changes.enter_context(blocks_on_cpu(pl_module, blocks))

    def capture(self, pl_module: LightningModule, plan: Plan) -> None:
        """Store the batches of the loop in place of running the model on them."""
        self._changes.close()
        stop_at = [block.module for block in plan.blocks] or [x.module for x in plan.outside]
        capture = StepCapture(pl_module, stop_at, lambda batch: check_batch(pl_module, batch))
        self._changes.callback(capture.remove)
        self.plan, self.steps = plan, capture.steps


class MRPCallback(PruningCallback):
    """`PruningCallback` with the multiple removal method: mask S, exact compensation M.

    Args:
        method: As in `PruningCallback`.
        **kwargs: The other arguments of `PruningCallback`.
    """

    def __init__(self, *, method: str = "SM", **kwargs: Any) -> None:
        super().__init__(method=method, **kwargs)


def _is_built_later(pl_module: LightningModule) -> bool:
    """Whether the module may make its layers after the callbacks' `setup`."""
    complete = CausalLM if isinstance(pl_module, CausalLM) else LightningModule
    hooks = ("setup", "configure_model")
    return any(is_overridden(hook, pl_module, parent=complete) for hook in hooks)


def _is_rehearsal(trainer: Trainer) -> bool:
    return bool(trainer.fast_dev_run)  # type: ignore[attr-defined]
