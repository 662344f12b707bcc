"""The journal of a pruning in a trainer."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from os import PathLike
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from mrp_lightning.loop.capture import Step
from mrp_lightning.loop.contents import checkpoint_root
from mrp_lightning.loop.fingerprint import fingerprint
from mrp_lightning.loop.streaming import streamed_blocks
from mrp_lightning.models.saving import stored_dtype
from mrp_lightning.pruning.journal import Journal, journal_path
from mrp_lightning.pruning.report import PruningReport
from mrp_lightning.pruning.streamed_journal import StreamedJournal
from mrp_lightning.targets.plan import Plan


def open_journal(
    beside: str | PathLike[str] | None,
    trainer: Trainer,
    module: LightningModule,
    steps: Sequence[Step],
    plan: Plan,
    report: PruningReport,
    *,
    resume: bool,
) -> AbstractContextManager[Journal | None]:
    """Start the journal of a run, or go on with it.

    Args:
        beside: The directory beside which it lies; `None` for a run without one.
        trainer: The trainer that prunes.
        module: Its module, which is still dense.
        steps: The calibration batches.
        plan: What will be pruned.
        report: The report of the run, with nothing done yet.
        resume: Whether to go on with a journal that is there.

    Raises:
        JournalError: The journal that is there is of another run, damaged, or in use.
        SaveError: It cannot be written.
    """
    if beside is None:
        return nullcontext()
    about = {
        "config": report.config,
        "provenance": report.provenance,
        "versions": report.versions,
        "blocks": sum(1 for layers in plan.layers.values() if layers) + bool(plan.outside),
        "layers": plan.num_layers,
    }
    settings = {key: value for key, value in report.config.items() if key != "base_model"}
    found = fingerprint(trainer, module, steps, settings)
    streamed = streamed_blocks(module)
    if streamed is None:
        return Journal.open(beside, found, resume=resume, about=about)
    journal = StreamedJournal.open(beside, found, resume=resume, about=about)
    journal.streamed = streamed
    return journal


def journal_bytes(beside: str | PathLike[str], module: LightningModule) -> int:
    """How much more of a disk the journal may take: the weights, less what it holds already.

    That of a streamed model takes nothing more where its shards become files of the checkpoint.
    """
    model: Any = checkpoint_root(module)[1]
    if streamed_blocks(module) is not None and model.dtype == stored_dtype(model):
        return 0
    there = sum(file.stat().st_size for file in journal_path(beside).glob("*.safetensors"))
    weights = sum(p.numel() * p.element_size() for p in module.parameters())
    return max(0, weights - there)
