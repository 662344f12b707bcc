"""What is known of a model that was pruned, and trained since."""

from pathlib import Path

from torch import nn

from mrp_lightning.records.report import NAME, PruningReport
from mrp_lightning.targets.zeros import pruned_layers


def kept_report(model: nn.Module, directory: str) -> PruningReport | None:
    """The report of the pruned model that a model started as, if its zeros are still there.

    Args:
        model: The model, with the names of the checkpoint.
        directory: Where the pruned model was loaded from.

    Raises:
        FormatError: The report there cannot be read.
    """
    file = Path(directory) / NAME
    if not file.is_file():
        return None
    report = PruningReport.load(file)
    zeros = {layer.name: int((layer.weight == 0).sum()) for layer in pruned_layers(model)}
    removed = {r.name: round((r.sparsity or 0) * r.shape[0] * r.shape[1]) for r in report.pruned}
    kept = all(zeros.get(name, 0) >= count for name, count in removed.items())
    return report if kept else None
