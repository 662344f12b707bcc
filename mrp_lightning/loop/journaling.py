"""The journal of a pruning in a trainer: what it keeps of the run, and which run it is of."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from os import PathLike

from lightning.pytorch import LightningModule, Trainer

from mrp_lightning.environment import progress_log as log
from mrp_lightning.journal.fingerprint import Fingerprint, fingerprint
from mrp_lightning.journal.journal import Journal
from mrp_lightning.journal.shared import SharedJournal
from mrp_lightning.journal.streamed import StreamedJournal
from mrp_lightning.loop.contents import checkpoint_root, language_models
from mrp_lightning.pruning.job import Job
from mrp_lightning.pruning.settings import Settings


@contextmanager
def open_journal(
    job: Job,
    module: LightningModule,
    trainer: Trainer,
    beside: str | PathLike[str],
    *,
    resume: bool,
) -> Iterator[Journal | SharedJournal]:
    """Start the journal of a job, or go on with it; say how far it came if the run fails.

    The first of the processes keeps it. `resume` says whether to go on with one that is there.
    """
    report, plan, processes = job.report, job.plan, job.processes
    found = _fingerprint(job, module, trainer)
    if processes.rank:
        yield SharedJournal(None, processes)
        return
    about = {
        "config": report.config,
        "provenance": report.provenance,
        "versions": report.versions,
        "model_weights": sum(p.numel() for p in module.parameters()),
        "blocks": sum(1 for layers in plan.layers.values() if layers) + bool(plan.outside),
        "layers": plan.num_layers,
    }
    kind = Journal if job.streamed is None else StreamedJournal
    journal = kind.open(beside, found, resume=resume, about=about, defaults=Settings.defaults())
    if isinstance(journal, StreamedJournal) and job.streamed is not None:
        journal.streamed = job.streamed
    with journal:
        try:
            yield journal if processes.size == 1 else SharedJournal(journal, processes)
        except BaseException:
            log.warning(
                "%d of %d blocks are pruned, and kept in %s. Start the same run again: it goes on "
                "there.",
                len(journal.manifest.entries),
                about["blocks"],
                journal.path,
            )
            raise


def _fingerprint(job: Job, module: LightningModule, trainer: Trainer) -> Fingerprint:
    held = chain(module.named_parameters(), module.named_buffers())
    settings = {key: value for key, value in job.report.config.items() if key != "base_model"}
    settings["device"] = trainer.strategy.root_device.type
    settings["model"] = type(checkpoint_root(module)[1]).__name__
    settings["whole blocks in the journal"] = job.streamed is not None
    return fingerprint(
        settings,
        [model.config for model in language_models(module).values()],
        held if job.streamed is None else job.streamed.named_tensors(),
        job.batches,
        job.processes,
    )
