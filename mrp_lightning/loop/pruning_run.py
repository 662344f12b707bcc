"""One pruning in Lightning's predict loop: from its `setup` until the module is pruned."""

import math
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from mrp_lightning.environment import command, versions
from mrp_lightning.environment import progress_log as log
from mrp_lightning.errors import counted
from mrp_lightning.journal.journal import Journal, read_kept, require_free
from mrp_lightning.journal.manifest import Fingerprint, fingerprint
from mrp_lightning.loop.calibration_data import (
    Step,
    captured_steps,
    describe_data,
    eager,
    warn_of_data,
)
from mrp_lightning.loop.distributed import (
    fail_together,
    processes_of,
    rank_zero_logging,
    refuse_together,
    require_whole_models,
)
from mrp_lightning.loop.module_parts import (
    blocks_on_cpu,
    checkpoint_root,
    is_built_later,
    language_models,
    plan_for,
    start_streamed,
    streamed_blocks,
)
from mrp_lightning.loop.progress import ProgressReporter, PruningProgress
from mrp_lightning.loop.pruned_module import PrunedModule, check_save_dir, journal_bytes
from mrp_lightning.loop.trainer import Pruning
from mrp_lightning.narrowing.blocks import ShorteningPlan, config_without, remove_blocks
from mrp_lightning.narrowing.cutting import StreamedNarrowing, narrow
from mrp_lightning.narrowing.structure import BLOCKS, NarrowingPlan, Structure
from mrp_lightning.processes import Processes
from mrp_lightning.pruning.job import Job, Listener
from mrp_lightning.pruning.sequential import prune_model
from mrp_lightning.pruning.shortening import shorten_model
from mrp_lightning.records.report import PruningReport, pruned_before
from mrp_lightning.signals import Interrupted, interruptible, unclaimed_signals
from mrp_lightning.targets.blocks import alike, find_blocks
from mrp_lightning.targets.plan import Plan

_FAR = 0.05
"""The difference between requested and removed fraction of units from which on to warn."""

_RUINED = 0.5
"""The mean relative loss of the layers above which a model is called ruined."""
_LISTED = 3
"""The number of kinds of layers that the summary lists as left dense."""
_COUNTS = ("blocks", "layers")
"""Facts about a run that its journal keeps, and that its report has by its rows."""


def _warn_of_rounding(plan: Plan, sparsity: float) -> None:
    """Warn if rounding to whole units or blocks removes a fraction far from the requested one."""
    if isinstance(plan, NarrowingPlan):
        count, number = plan.structure.count, plan.structure.units
        parts = f"{number} {plan.structure.kind} a block"
    elif isinstance(plan, ShorteningPlan):
        count, number = plan.count, len(plan.blocks)
        parts = f"{number} blocks"
    else:
        return
    if abs(count / number - sparsity) > _FAR:
        log.warning(
            "`sparsity` %g of %s removes %d of them, which is %.0f%%.",
            *(sparsity, parts, count, 100 * count / number),
        )


@contextmanager
def _explained(journal: Journal, listener: Listener, blocks: int) -> Iterator[None]:
    """Close a journal at the end; after an error, log its progress, or remove it if it has none."""
    try:
        with journal:
            yield
    except BaseException:
        # A journal with neither blocks nor kept values saves no work.
        if not journal.manifest.shards and not journal.manifest.kept:
            # If weights were changed, it stays: it keeps another run from starting with them.
            if not listener.pruned_rows:
                journal.remove()
        else:  # `rank_zero_logging` lets process 0 alone log it
            shards = len(journal.manifest.shards)
            log.warning(
                "%s kept in %s. Start the same run again: it goes on there.",
                f"{shards} of {blocks} blocks are pruned, and" if shards else "What was decided is",
                journal.path,
            )
        raise


class Run:
    """One run of `predict` that prunes.

    It replaces methods of the module during the loop; `close` restores them.

    Args:
        trainer: The trainer, which has set up its strategy.
        module: The LightningModule to prune.
        callback: The settings of the pruning, and the directories of its result and its journal.
            With `fast_dev_run`, nothing is written.

    Attributes:
        report: The report of the layers that are pruned, also after an error; empty before.
        save_dir: The directory of the pruned model; `None` if it is not saved.
        plan: The blocks and layers to prune, from `check` or `capture` on.
    """

    plan: Plan
    _about: dict[str, Any]

    def __init__(self, trainer: Trainer, module: LightningModule, callback: Pruning) -> None:
        self.trainer, self.module, self._callback = trainer, module, callback
        self.settings = callback.settings
        self.report = PruningReport({})
        self._changes = ExitStack()
        self._signals = unclaimed_signals()  # before Lightning installs its handler of SIGTERM
        self._steps: list[Step] = []
        self._batches = 0  # of all processes
        self._modules: dict[str, nn.Module] = {}  # as they were planned
        self._kept: dict[str, Mapping[str, Tensor]] = {}
        rehearsal = bool(trainer.fast_dev_run)  # type: ignore[attr-defined]
        self.save_dir = None if rehearsal else callback.save_dir
        self._journal_path = None if rehearsal else callback.run_directory or callback.save_dir

    @property
    def _processes(self) -> Processes:
        return processes_of(self.trainer)

    def check(self) -> None:
        """Raise, before the data is read, if a process cannot prune or save its module."""
        require_whole_models(self.trainer, type(self._callback).__name__)
        # Process 0 alone checks the disk, and the others must not go on without it.
        with refuse_together(self._processes):
            self._check()

    def _check(self) -> None:
        """Check this process's module, and the directories if it is process 0."""
        trainer, module = self.trainer, self.module
        start_streamed(module, processes=trainer.world_size, is_kept=self._journal_path is not None)
        if trainer.is_global_zero and self._journal_path is not None:
            if self.save_dir is not None:
                check_save_dir(
                    self.save_dir,
                    module,
                    overwrite=self._callback.overwrite,
                    journal_bytes=journal_bytes(
                        self._journal_path, module, whole=self.settings.structure is None
                    ),
                )
            # Only process 0 writes, so that only its disk is checked.
            require_free(self._journal_path)
        # An early plan refuses a wrong name before the data is read.
        if not is_built_later(module):
            self._make_plan()

    def _make_plan(self) -> None:
        self.plan = plan_for(self.module, self.settings)
        self._modules = dict(self.module.named_modules())

    def start(self) -> None:
        """Keep the blocks on the CPU when Lightning moves the module, if `offload` is set."""
        if self.settings.offload:

            def blocks() -> list[nn.Module]:
                return [block.module for block in find_blocks(self.module, self.settings.blocks)]

            self._changes.enter_context(blocks_on_cpu(self.module, blocks))

    def capture(self) -> None:
        """Store the batches of the loop, and run the model on them up to the first block alone.

        An earlier SIGTERM, for which only the trainer's loops check, raises an `Interrupted`.
        """
        self._changes.close()
        if self.trainer.received_sigterm and signal.SIGTERM in self._signals:
            raise Interrupted(signal.SIGTERM)
        # Hooks may have made or replaced layers after `check`.
        if dict(self.module.named_modules()) != self._modules:
            self._make_plan()
        plan = self.plan
        _warn_of_rounding(plan, self.settings.recipe.pattern.sparsity)
        # Without blocks, the first call of a layer to prune is as far as a batch has to come.
        stop_at = [block.module for block in plan.blocks] or [x.module for x in plan.outside]
        self._steps = self._changes.enter_context(captured_steps(self.module, stop_at))
        # Entered last, so that it is left first, before the module gets its own step back.
        self._changes.enter_context(interruptible(self._signals))

    def close(self) -> None:
        """Undo all changes of the module."""
        self._changes.close()

    def kept(self, name: str, compute: Callable[[], Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        """Return tensors that decide the batches, of an interrupted run or computed; collective.

        The journal, opened when the batches are known, keeps the tensors; see `Journal.kept`.
        """
        stored = None
        if self._processes.rank == 0 and self._callback.resume and self._journal_path is not None:
            stored = read_kept(self._journal_path, name)
        stored = self._processes.all(stored)[0]
        self._kept[name] = compute() if stored is None else stored
        return self._kept[name]

    def num_batches(self) -> int:
        """Return the total number of batches that the processes stored; a collective call."""
        counts = self._processes.numbers(len(self._steps))
        self._batches = int(sum(count for (count,) in counts))
        return self._batches

    @contextmanager
    def job(self) -> Iterator[Job]:
        """Return the job of the stored batches, with its journal locked until the context's end.

        In this context signals interrupt at once, inference mode, in which the loop may be, and
        gradients are off, and processes other than 0 log errors alone. `num_batches` is called
        before. `Journal.open` lists the errors.
        """
        self.close()
        plan, processes = self.plan, self._processes
        # The order of contexts: signals are taken first and given back last, so that none is lost
        # while the others are left. Inference mode ends before any tensor is made, since tensors of
        # inference mode can never be changed in place outside of it.
        with (
            interruptible(self._signals),
            torch.inference_mode(False),
            torch.no_grad(),
            eager(),
            rank_zero_logging(processes),
        ):
            # The calls are collective: a process that fails would leave the others waiting.
            with fail_together(processes):
                warn_of_data(self._steps, plan, processes)
                self._about = self._facts()
                listener = PruningProgress(plan.steps, ProgressReporter(self.trainer))
                journal = self._journal()
                for logger in self.trainer.loggers:
                    logger.log_hyperparams({"prune": self._about["config"]})
            held = journal and _explained(journal, listener, plan.num_steps)
            with held or nullcontext():
                yield Job(
                    model=self.module,
                    plan=plan,
                    settings=self.settings,
                    forward=self._forward,
                    batches=self._steps,
                    batch_of=lambda step: step.batch,
                    device=self.trainer.strategy.root_device,
                    streamed=streamed_blocks(self.module),
                    processes=processes,
                    journal=journal,
                    listener=listener,
                )

    def prune(self, job: Job) -> PrunedModule:
        """Return the module, pruned in place and unsaved; `report` is set after an error, too."""
        listener, narrowed = job.listener, dict[str, Any]()
        assert isinstance(listener, PruningProgress)
        with fail_together(job.processes):
            try:
                with listener.reporter.bar(job.plan.num_layers, "pruning"):
                    if isinstance(job.plan, ShorteningPlan):
                        narrowed = self._shorten(job, job.plan)
                    else:
                        prune_model(job)
                    if job.structure is not None:
                        narrowed = self._narrow(job.structure)
            finally:
                about = {key: value for key, value in self._about.items() if key not in _COUNTS}
                if listener.walk:
                    about["config"] = {**about["config"], "walk": listener.walk}
                self.report = PruningReport.of(
                    listener.results,
                    **about,
                    **asdict(listener.usage),
                    resumed_blocks=listener.resumed_blocks,
                    narrowed=narrowed,
                    vocabulary=self._vocabulary,
                )
            for name in ("sparsity", "relative_loss"):
                if (total := self.report.totals[name]) is not None:
                    self.trainer.callback_metrics[f"prune/{name}"] = torch.tensor(total)
        grid = {name: x for result in listener.results for name, x in result.grid.items()}
        # A journal of a run with a directory of its own outlives the saving of the model.
        leaves = self._callback.run_directory is not None
        return PrunedModule(self.module, self.report, grid, None if leaves else job.journal)

    def _journal(self) -> Journal | None:
        """Start or resume the journal of the run; return `None` for a run without one."""
        if self._journal_path is None:
            return None
        journal = Journal.open(
            self._journal_path,
            self._fingerprint(),
            resume=self._callback.resume,
            about=self._about,
            processes=self._processes,
            streamed=streamed_blocks(self.module),
        )
        for name, tensors in self._kept.items():
            journal.kept(name, partial(dict, tensors))
        return journal

    def _fingerprint(self) -> Fingerprint:
        """Return the facts that decide the result of the run."""
        module, streamed = self.module, streamed_blocks(self.module)
        # The weights decide, not the name under which they were loaded.
        config = {key: x for key, x in self._about["config"].items() if key != "base_model"}
        # Kinds of devices round differently, so that another one would not continue the same run.
        config["device"] = self.trainer.strategy.root_device.type
        config["model"] = type(checkpoint_root(module)[1]).__name__
        config["whole blocks in the journal"] = streamed is not None
        in_memory = chain(module.named_parameters(), module.named_buffers())
        return fingerprint(
            config,
            [model.config for model in language_models(module).values()],
            in_memory if streamed is None else streamed.named_tensors(),
            self._steps,
            self._processes,
        )

    def _facts(self) -> dict[str, Any]:
        """Return the content of the report other than results, as a journal keeps it."""
        config = self.settings.config() | {"batches": self._batches}
        config["precision"] = str(self.trainer.precision)
        if self._processes.size > 1:
            config["processes"] = self._processes.size
        provenance: dict[str, Any] = {"command": command()}
        provenance["data"] = describe_data(self.trainer, self._steps, self._processes)
        model = checkpoint_root(self.module)[1]
        if base_model := getattr(model, "name_or_path", None):
            config["base_model"] = base_model
            # A model that was distilled is read from another directory than its dense one.
            source = self.module.hparams.get("model")
            of_source = pruned_before(source) if isinstance(source, str | Path) else []
            if earlier := pruned_before(base_model) or of_source:
                provenance["pruned_before"] = earlier
        if self._vocabulary:
            config["vocabulary"] = self._vocabulary["kept"]
        return {
            "config": config,
            "provenance": provenance,
            "versions": versions(),
            # Counted before the pruning, since a narrower model has fewer.
            "model_weights": sum(p.numel() for p in self.module.parameters()),
            "blocks": self.plan.num_steps,
            "layers": self.plan.num_layers,
        }

    def log_result(self) -> None:
        """Log a summary; warn of layers that already had the pattern, and of a ruined model."""
        totals, recipe = self.report.totals, self.settings.recipe
        if self.report.narrowed:
            self._log_narrowed()
            return
        if totals["already_pruned"] and not recipe.grids:
            log.warning(
                "%d of %d layers already had the pattern %s: little or nothing was removed there.",
                *(totals["already_pruned"], totals["layers"], recipe.pattern),
            )
        zeros = totals.get("zeros_before", 0)
        zeros_note = f" (against these weights as they were, {zeros:.0%} of which were zero before)"
        rank_zero_info(
            f"Pruned {counted(totals['layers'], 'layer')} to {self.settings.recipe} with "
            f"{recipe.method} in {totals['seconds']:.1f} s: {totals['share']:.0%} of the model's "
            f"weights are in them, {1 - totals['share']:.0%} are left dense. Mean output error of "
            f"a layer, relative to its output: {totals['relative_loss']:.4f}"
            f"{zeros_note * bool(zeros)}. {self._where}"
        )
        if reasons := {row.name: row.skipped for row in self.report.layers if row.skipped}:
            groups = [f"{layers}: {reason}" for layers, reason in alike(reasons)]
            more = f"; … ({len(groups)} kinds in the report)" * (len(groups) > _LISTED)
            rank_zero_info(f"Left dense: {'; '.join(groups[:_LISTED])}{more}.")
        # Outputs of 0 have the relative loss 1: from ½ on most of the signal is gone.
        if totals["relative_loss"] > _RUINED:
            log.warning(
                "Of what these layers computed, most is lost, so that the model is hardly of use. "
                "Remove less: a lower `sparsity`, or a `pattern` that keeps more."
            )

    def _log_narrowed(self) -> None:
        narrowed, totals = self.report.narrowed, self.report.totals
        if narrowed["structure"] == BLOCKS:
            repair, removed = narrowed["repair"], narrowed["removed"]
            fitted = f", {repair['change']:.4f} after {', '.join(repair['layers'])} was fitted"
            done = f"Removed {', '.join(removed)}, {len(removed)} of {narrowed['units']} blocks,"
            change = f"change of its output: {narrowed['change']:.4f}"
            loss = change + fitted * bool(repair["layers"])
        else:
            done = (
                f"Kept {narrowed['kept']} of {narrowed['units']} {narrowed['structure']} in each "
                f"of {narrowed['blocks']} blocks with {self.settings.recipe.method}"
            )
            loss = (
                "output error of a layer that reads them, relative to its output: "
                f"{totals['relative_loss']:.4f}"
            )
        rank_zero_info(
            f"{done} in {totals['seconds']:.1f} s: the model has {narrowed['model_weights']:,} of "
            f"{totals['model_weights']:,} weights. Mean {loss}. {self._where}"
        )

    @property
    def _where(self) -> str:
        """Return the location of the pruned model, for the summary."""
        if self.save_dir is not None:
            return f"The model is in {self.save_dir}."
        reason = "no `save_dir`" if self._callback.save_dir is None else "`fast_dev_run`"
        return f"The model is pruned in memory only ({reason})."

    def _narrow(self, structure: Structure) -> dict[str, Any]:
        """Remove units from the model and its configuration, and describe that for the report."""
        config: Any = checkpoint_root(self.module)[1].config
        # Computed, not counted: with streaming, units are removed when the model is saved.
        weights = sum(p.numel() for p in self.module.parameters()) - structure.num_weights
        if (streamed := streamed_blocks(self.module)) is not None:
            streamed.narrowing = StreamedNarrowing(structure, config)
        else:
            narrow(structure, config)
        return {
            "structure": structure.kind,
            "units": structure.units,
            "kept": structure.kept,
            "blocks": len(structure.blocks),
            "config": dict(structure.config),
            "model_weights": weights,
        }

    def _shorten(self, job: Job, plan: ShorteningPlan) -> dict[str, Any]:
        """Choose blocks, repair those that stay, remove the others, and describe that."""
        removal, repair = shorten_model(job)
        names = [plan.blocks[k].name for k in removal.blocks]
        config = config_without(plan, removal.blocks)
        remove_blocks(plan, removal.blocks)
        known = {"run_change": removal.run_change, "greedy_change": removal.greedy_change}
        return {
            "structure": BLOCKS,
            "units": len(plan.blocks),
            "kept": len(plan.blocks) - len(names),
            "removed": names,
            "change": removal.change,
            **{name: change for name, change in known.items() if math.isfinite(change)},
            "repair": {"layers": [*repair.weights], "change": repair.change},
            "config": config,
            "model_weights": sum(p.numel() for p in self.module.parameters()),
        }

    def _forward(self, step: Step) -> Any:
        strategy = self.trainer.strategy
        on_device = step.to(strategy.root_device)
        # The strategy's, for its precision.
        return strategy.predict_step(*on_device.args, **on_device.kwargs)

    @property
    def _vocabulary(self) -> dict[str, Any]:
        """The record of the cut of the vocabulary before this run; empty without one."""
        return getattr(self.module, "vocabulary", None) or {}
