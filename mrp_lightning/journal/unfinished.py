"""The report of a run that is not finished, from its journal."""

from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from mrp_lightning.errors import FormatError, JournalError
from mrp_lightning.journal.block_record import BlockRecord
from mrp_lightning.journal.directory import journal_path
from mrp_lightning.journal.manifest import NAME, Manifest
from mrp_lightning.json_files import as_dataclass
from mrp_lightning.records.report import PruningReport


def find_journal(path: str | PathLike[str]) -> Path | None:
    """The journal that a path is, or that lies beside where it will be; `None` if there is none."""
    path = Path(path)
    if path.name.startswith(".") and path.name.endswith(".partial") and (path / NAME).is_file():
        return path
    beside = journal_path(path)
    return beside if not path.exists() and (beside / NAME).is_file() else None


def unfinished_report(journal: Path) -> tuple[PruningReport, str]:
    """Read the report of a run that is not complete, and in words how far it is.

    Raises:
        JournalError: The journal is damaged, or of another version of mrp-lightning.
    """
    manifest = Manifest.load(journal)
    try:
        about = as_dataclass(_About, manifest.about, f"`about` of {journal / NAME}", "prune again")
    except FormatError as error:
        raise JournalError(str(error)) from error
    report = PruningReport(
        about.config,
        seconds=manifest.seconds,
        versions=about.versions,
        provenance=about.provenance,
        model_weights=about.model_weights,
    )
    for _, entry in sorted(manifest.entries.items()):
        try:
            record = BlockRecord.load(journal / entry.file)
        except (OSError, SafetensorError, FormatError) as error:
            raise JournalError(
                f"{journal / entry.file} is damaged ({error}). The run makes it again when it goes "
                "on."
            ) from error
        report.layers += record.rows
        report.blocks += [] if record.block is None else [record.block]
    return report, f"{len(manifest.entries)} of {about.blocks} blocks are pruned so far"


@dataclass(kw_only=True)
class _About:
    """What a manifest tells of the run, beside its layers, of which a report is made."""

    config: dict[str, Any]
    versions: dict[str, str]
    provenance: dict[str, Any]
    blocks: int
    model_weights: int | None = None
