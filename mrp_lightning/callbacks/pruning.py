"""Pruning in Lightning's predict loop."""

import logging
from os import PathLike
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from mrp_lightning.environment import progress_log
from mrp_lightning.errors import ERROR_OF_ARGUMENT, DataError, OptionError
from mrp_lightning.files import output_path
from mrp_lightning.loop.run import Output, Run
from mrp_lightning.loop.saving import Pruned
from mrp_lightning.loop.signals import Interrupted
from mrp_lightning.pruning.block_tuner import BlockTuning
from mrp_lightning.pruning.job import Settings
from mrp_lightning.records.report import PruningReport
from mrp_sparse.arguments import checked

log = logging.getLogger(__name__)


class PruningCallback(Callback):
    """Prune the model that `predict` runs, calibrated on the data of that `predict`.

    For each linear layer, with H = 2·XᵀX / tokens of its inputs over the calibration data, it
    minimises ½·tr(δ H δᵀ), the mean over tokens of ‖(w + δ)x − wx‖², subject to the removed weights
    being zero. Blocks are pruned in the order in which they run, each on the outputs of the pruned
    blocks before it. Padding (`attention_mask` 0) counts nowhere.

    The loop only stores the batches. At its end the model is pruned in place, and `predict` returns
    nothing. A callback prunes once: it has no effect on later calls of `predict`.

    With `strategy="ddp"`, also under torchrun and on several machines, processes share the batches
    and the rows of each layer. All of them end with the same weights, and the first one saves.

    Args:
        method: magnitude, wanda, SS (the same as sparsegpt), SM, MS, MM, or a pair
            MASK+COMPENSATION, with MASK magnitude, wanda, S, M or J, and COMPENSATION none, S or
            M. Case matters.
        sparsity: The fraction of the weights to remove, in (0, 1). Exactly one of `sparsity` and
            `pattern` is given, or neither of them and `bits`.
        pattern: "N:M" keeps N of every M consecutive input features. Quoted in YAML, which reads
            an unquoted 2:4 as a number.
        block_size: The number of columns (input features) that are chosen together, a multiple of
            M. `None` means all.
        damping: The fraction (≥ 0) of the mean of the Hessian's diagonal that is added to it.
        tolerance: The relative distance (> 0) to the optimal loss at which the exact compensation M
            stops.
        bits: 3, 4 or 8: the kept weights are put on a grid of so many bits, with a scale for each
            row and `group_size` columns, so that the layer's outputs change least. The checkpoint
            keeps its dtype, and its values lie on the grid exactly. Without `sparsity` and
            `pattern` it is quantisation alone. `None` leaves the weights as they are.
        group_size: The number of columns (input features) of a row that share a scale, for `bits`.
        target: With "own", the target of a layer is what its dense weight gives on its inputs in
            the pruned model. With "dense", it is the layer's output in the dense model, which makes
            up for losses of earlier blocks and runs each block twice as often; it is refused for
            methods without compensation. See docs/methods.md for this and the next three.
        target_weight: The weight α of the dense target, in (0, 1]. `None` is ½, by measurement.
        allocation: With "uniform", all blocks get the same sparsity. With "output", blocks whose
            pruning changes the model's output more get less sparsity, and the model the same in
            all; this takes a dry run of the pruning. For `sparsity` only.
        tuning: Whether, or how, the kept weights of each pruned block are tuned towards its outputs
            in the dense model. The losses of layers in the report are those before tuning.
        targets: The names of the linear layers to prune; by default all layers in the blocks except
            routers. A name is one or more whole parts of a layer's name, such as `q_proj`, `mlp` or
            `layers.3`, with shell wildcards. After `re:` it is a regular expression that matches
            names of layers from their start, such as `re:.*q_proj$`. A layer outside the blocks,
            such as `lm_head`, is calibrated after the blocks.
        ignore: The names of layers to leave dense, of the same form.
        blocks: The names of the lists of blocks (`model.layers`), or of single blocks, if the
            outermost `ModuleList`s are not the right ones.
        true_sequential: Whether the layers of a block are pruned one after another (q, k, v; then
            o; …), each on the outputs of those before it. Each takes one pass over the data.
        offload: Whether blocks and stored activations stay in CPU memory, with one block at a time
            on the accelerator.
        structure: "neurons", "heads" or "experts": remove whole neurons of the MLPs, whole
            key-value groups with their query heads, or whole experts with their rows of the router,
            `sparsity` of them in each block, and leave a narrower dense model that its
            configuration describes. Of neurons a multiple of 32 stays, of experts at least as many
            as each token is sent to. For `sparsity` and the methods SM, magnitude, wanda,
            magnitude+M and wanda+M only (experts: the first three); see docs/narrower.md.
        skip_indivisible: Whether layers whose input features are no multiple of M are left dense;
            otherwise such a model is refused.
        save_dir: The directory for the pruned model and `pruning_report.json`. If the
            LightningModule holds exactly one `PreTrainedModel`, it is a Hugging Face checkpoint,
            with any other weights in `module.safetensors`; otherwise all weights are in
            `model.safetensors`. The directory appears when it is whole. Nothing is written with
            `fast_dev_run`.
        overwrite: Whether `save_dir` may be replaced, if all that it holds was written by this
            package.
        resume: Whether an interrupted run resumes at its first block that is not pruned yet, from
            the journal beside `save_dir`; `False` starts afresh. See docs/reliability.md.
        journal_beside: The directory beside which the journal lies, in place of `save_dir`. This
            journal outlives the run: the caller removes it with `remove_journal`.

    Attributes:
        settings: The arguments that say what is pruned and how, checked.
        report: What was done to each layer, `None` before the first run. After an exception it
            lists the layers that are pruned, and all others are untouched. `report.complete` is
            true once all are pruned and `save_dir`, if there is one, is written.

    Raises:
        PatternError: `sparsity`, `pattern` or `block_size` are malformed.
        MethodError: There is no such method, or it has no compensation and `target` is "dense".
        OptionError: Another argument is out of range, or does not go with the others.
    """

    @checked(errors=ERROR_OF_ARGUMENT)
    def __init__(
        self,
        *,
        method: str,
        sparsity: float | None = None,
        pattern: str | int | None = None,  # int: to explain what YAML makes of an unquoted 2:4
        block_size: int | None = 128,
        damping: float = 0.01,
        tolerance: float = 1e-6,
        bits: int | None = None,
        group_size: int = 64,
        target: str = "own",
        target_weight: float | None = None,
        allocation: str = "uniform",
        tuning: bool | BlockTuning = False,
        targets: list[str] | str | None = None,
        ignore: list[str] | str | None = None,
        blocks: list[str] | str | None = None,
        true_sequential: bool = False,
        offload: bool = False,
        skip_indivisible: bool = False,
        structure: str | None = None,
        save_dir: str | PathLike[str] | None = None,
        overwrite: bool = False,
        resume: bool = True,
        journal_beside: str | PathLike[str] | None = None,
    ) -> None:
        self.settings = Settings.of(
            method=method,
            sparsity=sparsity,
            pattern=pattern,
            block_size=block_size,
            damping=damping,
            tolerance=tolerance,
            bits=bits,
            group_size=group_size,
            target=target,
            target_weight=target_weight,
            allocation=allocation,
            tuning=tuning,
            targets=targets,
            ignore=ignore,
            blocks=blocks,
            true_sequential=true_sequential,
            offload=offload,
            skip_indivisible=skip_indivisible,
            structure=structure,
        )
        self.save_dir = None if save_dir is None else output_path(save_dir)
        self.journal_beside = None if journal_beside is None else output_path(journal_beside)
        self.overwrite, self.resume = overwrite, resume
        self.report: PruningReport | None = None
        self._run: Run | None = None
        self._pruned: Pruned | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check everything that can be checked before the data is read."""
        self._end_run()
        if stage != "predict":
            if self._pruned is None:
                log.warning(
                    "This %s prunes in `predict`; in `%s` it does nothing.",
                    type(self).__name__,
                    getattr(stage, "value", stage),
                )
            return
        unsaved = None if self._is_done else self._pruned
        if unsaved is not None and unsaved.is_of(pl_module) and self.save_dir is not None:
            self._save_as_asked(self.save_dir, unsaved)
        if self._is_done:
            log.warning("This %s has pruned already; predict only predicts.", type(self).__name__)
            return
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        mine = [c for c in callbacks if isinstance(c, PruningCallback) and not c._is_done]
        if len(mine) > 1:
            raise OptionError("A predict run takes one PruningCallback; run predict once for each.")
        output = Output(self.save_dir, self.overwrite, self.resume, self.journal_beside)
        run = Run(trainer, pl_module, self.settings, output)
        run.check(type(self).__name__)
        run.start()
        self._run = run

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start to store batches."""
        if self._run is not None:
            trainer.predict_loop.return_predictions = False
            self._run.capture()

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prune, report, save."""
        run = self._run
        if run is None or not (batches := run.num_batches()):
            return
        self._end_run()
        self.report = run.report
        with run.pruned(batches) as pruned:
            self._pruned = pruned
            if run.save_dir is None:
                pruned.complete()
            else:
                try:
                    self._save_as_asked(run.save_dir, pruned)
                finally:
                    trainer.strategy.barrier("saved")
            run.tell_result()

    def _save_as_asked(self, directory: str | PathLike[str], pruned: Pruned) -> None:
        pruned.save(directory, overwrite=self.overwrite)
        pruned.let_go()  # a callback that is done would keep all weights in memory

    @checked
    def save(self, directory: str | PathLike[str], *, overwrite: bool = False) -> None:
        """Write the pruned model with its report, as `save_dir` asks for.

        It is for a pruning without `save_dir`, or one whose saving failed: until then the callback
        keeps the model in memory. Of several processes the first one writes.

        Args:
            directory: The directory that is made; it appears when it is whole.
            overwrite: Whether what this package wrote there before may be replaced.

        Raises:
            OptionError: Nothing is pruned yet, or the model is saved and no longer in memory.
            SaveError: It could not be written, or may not be replaced. The pruned model is still
                in memory.
        """
        if self._pruned is None:
            raise OptionError(
                f"{type(self).__name__}.save: nothing is pruned yet. Run `trainer.predict` first."
            )
        self._pruned.save(directory, overwrite=overwrite)

    @property
    def kept_beside(self) -> Path | None:
        """The path beside which a run keeps what it can go on with, `None` where it keeps none."""
        return self.journal_beside or self.save_dir

    @property
    def state_key(self) -> str:
        """By which Lightning finds the state of a callback with these settings in a checkpoint."""
        return self._generate_state_key(**self.settings.state())

    def state_dict(self) -> dict[str, Any]:
        """The settings and the report, for a Lightning checkpoint of the model."""
        report = None if self.report is None else self.report.to_dict()
        return {"recipe": self.settings.config(), "report": report}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what was done to the model of a checkpoint; it is not pruned again.

        Args:
            state_dict: What `state_dict` gave. That of a callback that had not pruned all changes
                nothing.

        Raises:
            FormatError: The report in it is damaged, or of a newer version of mrp-lightning.
        """
        stored = state_dict["report"]
        report = stored and PruningReport.from_dict(stored, "the callback's state")
        if report and report.complete:
            self.report = report
            self.settings = Settings.of(**state_dict["recipe"])
            self._end_run()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Leave nothing behind; Lightning does not call `teardown` after an exception."""
        if isinstance(exception, Interrupted):
            progress_log.warning("Stopped by %s.", exception.signal.name)
        self._end_run()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse to have done nothing.

        Raises:
            DataError: There was no batch to calibrate on.
        """
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
    """`PruningCallback` with the multiple removal method: mask S, exact compensation M.

    Args:
        method: As in `PruningCallback`.
        **kwargs: The other arguments of `PruningCallback`.
    """

    def __init__(self, *, method: str = "SM", **kwargs: Any) -> None:
        super().__init__(method=method, **kwargs)
