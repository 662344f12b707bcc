"""What a run did to each layer."""

from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from mrp_lightning.environment import versions
from mrp_lightning.files import as_json, save_text

FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """One weight. The measures of a layer that was left dense are `None`.

    Attributes:
        name: As in the checkpoint.
        shape: Rows and columns.
        method: Mask and compensation.
        sparsity: Fraction of the weights removed.
        loss: Mean over the calibration tokens of ‖(w + δ)x − wx‖², all rows together.
        relative_loss: `loss` over the mean of ‖wx‖².
        damping: λ, what was added to the Hessian's diagonal.
        iterations: Of the exact compensation.
        gap: Certified relative distance to the optimal loss.
        seconds: Time to prune it; the first layer of those that share an input pays for preparing
            the Hessian.
        tokens: Calibration tokens that it saw.
        dead_inputs: Input features that were always 0.
        skipped: Why it was left dense.
        already_pruned: Whether it had the pattern before.
        shared_hessian: Of an expert, the weight of all experts' Hessian in its own: above 0 where
            it saw too few tokens. `loss` is then measured by that mixture. `None` for other layers.
        raised_damping: The fraction of the Hessian's mean diagonal that was added where more was
            needed than was asked for. `None` for other layers.
        peak_memory: Bytes allocated on the GPU at most while it was pruned. Only on CUDA.
    """

    name: str
    shape: tuple[int, ...]
    method: str | None = None
    sparsity: float | None = None
    loss: float | None = None
    relative_loss: float | None = None
    damping: float | None = None
    iterations: int | None = None
    gap: float | None = None
    seconds: float | None = None
    tokens: int | None = None
    dead_inputs: int | None = None
    skipped: str | None = None
    already_pruned: bool = False
    shared_hessian: float | None = None
    raised_damping: float | None = None
    peak_memory: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """The row of `pruning_report.json`."""
        row = asdict(self) | {"shape": list(self.shape)}
        del row["already_pruned"]  # counted in the totals
        for key in ("shared_hessian", "raised_damping", "peak_memory"):
            if row[key] is None:
                del row[key]
        return row


@dataclass
class PruningReport:
    """All layers of a run, in the order in which they were pruned.

    Attributes:
        config: The arguments of the run.
        layers: Pruned layers and skipped ones.
        seconds: Wall-clock time of the walk.
        complete: Whether the walk came to its end. If not, `layers` says which layers are pruned;
            all others are untouched.
    """

    config: dict[str, Any]
    layers: list[LayerReport] = field(default_factory=list)
    seconds: float = 0.0
    complete: bool = False

    @property
    def pruned(self) -> list[LayerReport]:
        """The layers that are pruned."""
        return [row for row in self.layers if row.skipped is None]

    @property
    def relative_loss(self) -> float | None:
        """Mean over the pruned layers."""
        losses = [row.relative_loss for row in self.pruned if row.relative_loss is not None]
        return sum(losses) / len(losses) if losses else None

    @property
    def totals(self) -> dict[str, Any]:
        """Sums and means over the layers."""
        weights = sum(row.shape[0] * row.shape[1] for row in self.pruned)
        zeros = sum((row.sparsity or 0) * row.shape[0] * row.shape[1] for row in self.pruned)
        peaks = [row.peak_memory for row in self.pruned if row.peak_memory is not None]
        return {
            "complete": self.complete,
            "layers": len(self.pruned),
            "skipped": len(self.layers) - len(self.pruned),
            "already_pruned": sum(row.already_pruned for row in self.pruned),
            "weights": weights,
            "removed": round(zeros),
            "sparsity": zeros / weights if weights else 0.0,
            "relative_loss": self.relative_loss,
            "seconds": self.seconds,
            **({"peak_memory": max(peaks)} if peaks else {}),
        }

    def to_dict(self) -> dict[str, Any]:
        """The content of `pruning_report.json`."""
        return {
            "format_version": FORMAT_VERSION,
            "layers": [row.to_dict() for row in self.layers],
            "totals": self.totals,
            "versions": versions(),
            "config": self.config,
        }

    def save(self, directory: str | PathLike[str]) -> Path:
        """Write `pruning_report.json` into a directory."""
        path = Path(directory) / "pruning_report.json"
        save_text(path, as_json(self.to_dict()))
        return path


def model_card(report: PruningReport, base_model: str | None) -> str:
    """A short README for the pruned checkpoint."""
    totals, config = report.totals, report.config
    kind = config.get("pattern") or f"{100 * totals['sparsity']:.3g}% unstructured"
    # The hub knows no local directory.
    is_on_hub = base_model is not None and not Path(base_model).exists()
    skipped = [row for row in report.layers if row.skipped is not None]
    lines = [
        "---",
        *([f"base_model: {base_model}"] if is_on_hub else []),
        "library_name: transformers",
        "tags: [pruned, sparse]",
        "---",
        "",
        f"# {Path(base_model).name if base_model else 'Model'}, pruned to {kind} sparsity",
        "",
        f"Pruned after training, without retraining, with mrp-lightning (method "
        f"`{config['method']}`).",
        "",
        f"- layers pruned: {totals['layers']}, left dense: {totals['skipped']}",
        f"- weights removed in them: {totals['removed']:,} of {totals['weights']:,} "
        f"({totals['sparsity']:.2%})",
        f"- mean output error of a layer, relative to its output: {totals['relative_loss']:.4f}",
        "- every layer: `pruning_report.json`",
        "",
        *(["Left dense:", ""] if skipped else []),
        *(f"- `{row.name}`: {row.skipped}" for row in skipped),
    ]
    return "\n".join(lines).rstrip() + "\n"
