"""The journal of a pruning in a trainer."""

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from typing import Any

from lightning.pytorch import LightningModule

from mrp_lightning.journal.journal import Journal, journal_path, require_free
from mrp_lightning.journal.shared import SharedJournal
from mrp_lightning.journal.streamed import StreamedJournal
from mrp_lightning.loop.contents import checkpoint_root
from mrp_lightning.loop.fingerprint import fingerprint
from mrp_lightning.loop.predict_loop import PruningRun
from mrp_lightning.loop.progress import log
from mrp_lightning.loop.saving import check_save_dir
from mrp_lightning.loop.streaming import streamed_blocks
from mrp_lightning.models.precision import stored_dtype


@contextmanager
def open_journal(
    run: PruningRun, beside: str | PathLike[str] | None, *, resume: bool
) -> Iterator[Journal | SharedJournal | None]:
    """Start the journal of a run, or go on with it; say how far it came if the run fails.

    Args:
        run: The run, with nothing done yet; the first of its processes keeps the journal.
        beside: The directory beside which it lies; `None` for a run without one.
        resume: Whether to go on with a journal that is there.

    Yields:
        The journal, `None` without one.

    Raises:
        JournalError: The journal that is there is of another run, damaged, or in use.
        SaveError: It cannot be written.
    """
    if beside is None:
        yield None
        return
    report, plan, processes = run.report, run.plan, run.processes
    about = {
        "config": report.config,
        "provenance": report.provenance,
        "versions": report.versions,
        "model_weights": sum(p.numel() for p in run.module.parameters()),
        "blocks": sum(1 for layers in plan.layers.values() if layers) + bool(plan.outside),
        "layers": plan.num_layers,
    }
    settings = {key: value for key, value in report.config.items() if key != "base_model"}
    found = fingerprint(run.trainer, run.module, run.steps, settings, processes)
    if processes.rank:
        yield SharedJournal(None, processes)
        return
    streamed = streamed_blocks(run.module)
    journal: Journal
    if streamed is None:
        journal = Journal.open(beside, found, resume=resume, about=about)
    else:
        journal = StreamedJournal.open(beside, found, resume=resume, about=about)
        journal.streamed = streamed
    with journal:
        try:
            yield journal if processes.size == 1 else SharedJournal(journal, processes)
        except BaseException:
            log.warning(
                "%d of %d blocks are pruned, and kept in %s. Start the same run again: it goes on "
                "there.",
                len(journal.manifest.shards),
                about["blocks"],
                journal.path,
            )
            raise


def check_places(
    save_dir: str | PathLike[str] | None,
    journal_beside: str | PathLike[str] | None,
    module: LightningModule,
    *,
    overwrite: bool,
) -> None:
    """Refuse places in which the model and the journal cannot be written, before any work.

    Args:
        save_dir: The directory of the pruned model, `None` if it is not saved.
        journal_beside: The directory beside which the journal lies, if that is not `save_dir`.
        module: The module that will be pruned.
        overwrite: Whether `save_dir` may be replaced.

    Raises:
        FileExistsError: `save_dir` may not be replaced; see `check_output_dir`.
        PermissionError: It cannot be made.
        OptionError: The disk has not enough room for both.
        JournalError: A live process holds the journal.
    """
    beside = journal_beside or save_dir
    if beside is None:
        return
    if save_dir is not None:
        room = _room(beside, module)
        check_save_dir(save_dir, module, overwrite=overwrite, journal_bytes=room)
    require_free(beside)


def _room(beside: str | PathLike[str], module: LightningModule) -> int:
    """How much more of a disk the journal may take: the weights, less what it holds already.

    That of a streamed model takes nothing more where its shards become files of the checkpoint.
    """
    model: Any = checkpoint_root(module)[1]
    if streamed_blocks(module) is not None and model.dtype == stored_dtype(model):
        return 0
    there = sum(file.stat().st_size for file in journal_path(beside).glob("*.safetensors"))
    weights = sum(p.numel() * p.element_size() for p in module.parameters())
    return max(0, weights - there)
