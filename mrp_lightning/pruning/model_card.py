"""A README for a pruned checkpoint."""

from pathlib import Path

from mrp_lightning.pruning.report import PruningReport


def model_card(report: PruningReport, base_model: str | None) -> str:
    """Write a short README for the pruned checkpoint.

    Args:
        report: The report of a run that is complete.
        base_model: The directory or hub id of the dense model, if it is known.
    """
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
