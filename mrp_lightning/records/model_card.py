"""A README for a pruned checkpoint."""

import json
from pathlib import Path
from typing import Any

from mrp_lightning.records.report import PruningReport

_RECIPE = (
    *("method", "sparsity", "pattern", "block_size", "damping", "targets", "ignore", "blocks"),
    *("true_sequential", "skip_indivisible"),
)


def model_card(
    report: PruningReport, base_model: str | None, *, library: str | None = "transformers"
) -> str:
    """Write a short README for the pruned checkpoint, which the Hugging Face hub can show.

    It states no license: that is the base model's to say.

    Args:
        report: The report of a run that is complete.
        base_model: The directory or hub id of the dense model, or its class, if it is known.
        library: The library that loads the checkpoint, if one does.
    """
    totals, config = report.totals, report.config
    kind = config.get("pattern") or f"{100 * totals['sparsity']:.3g}% unstructured"
    # The hub knows no local directory, and nobody else needs to know where one lies.
    is_on_hub = base_model is not None and library is not None and not Path(base_model).exists()
    name = base_model if is_on_hub else Path(base_model).name if base_model else None
    share = f", {totals['share']:.0%} of the model's weights" if "share" in totals else ""
    skipped = [row for row in report.layers if row.skipped is not None]
    trained = report.provenance.get("trained", {})
    commands = [report.provenance.get("command"), trained.get("command")]
    made_by = [command for command in commands if command]
    lines = [
        "---",
        *([f"base_model: {base_model}"] if is_on_hub else []),
        *([f"library_name: {library}"] if library else []),
        "tags: [pruned, sparse]",
        "---",
        "",
        f"# {Path(name).name if name else 'Model'}, pruned to {kind} sparsity",
        "",
        _how(config["method"], trained),
        "",
        *([f"- base model: `{name}`"] if name else []),
        f"- layers pruned: {totals['layers']}{share}; left dense: {totals['skipped']}",
        f"- weights removed in them: {totals['removed']:,} of {totals['weights']:,} "
        f"({totals['sparsity']:.2%})",
        f"- mean output error of a layer, relative to its output: {totals['relative_loss']:.4f}",
        *_calibration(report.provenance.get("data", {})),
        "- every layer: `pruning_report.json`",
        "",
        "## Recipe",
        "",
        "```yaml",
        *_recipe(config),
        "```",
        "",
        *(["Made by:", "", "```", *made_by, "```", ""] if made_by else []),
        *(["## Left dense", ""] if skipped else []),
        *(f"- `{row.name}`: {row.skipped}" for row in skipped),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _how(method: str, trained: dict[str, Any]) -> str:
    if not trained:
        return f"Pruned after training, without retraining, with mrp-lightning (method `{method}`)."
    return (
        f"Pruned with mrp-lightning (method `{method}`), then trained for {trained['steps']:,} "
        "steps with the removed weights kept at zero. What is said of the layers' errors is from "
        "before that training."
    )


def _calibration(data: dict[str, Any]) -> list[str]:
    """What calibrated the model, as far as it is known."""
    if not data.get("samples"):
        return []
    source = f" of {data['source']}" if data.get("source") else ""
    seed = f", seed {data['seed']}" if data.get("seed") is not None else ""
    length = data["sequence_length"]
    return [f"- calibrated on: {data['samples']} windows of {length} tokens{source}{seed}"]


def _recipe(config: dict[str, Any]) -> list[str]:
    """The callback of the run, as its YAML; JSON is YAML that needs no care with 2:4."""
    given = {key: config.get(key) for key in _RECIPE}
    return [
        "class_path: callbacks.PruningCallback",
        "init_args:",
        *(
            f"  {key}: {json.dumps(value)}"
            for key, value in given.items()
            if (value is not None and value is not False) or key == "block_size"
        ),
    ]
