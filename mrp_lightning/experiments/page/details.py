"""The parts for the record: what was left dense, the runs, their settings, every layer."""

from collections.abc import Mapping, Sequence
from typing import Any

from mrp_lightning.experiments import numbers
from mrp_lightning.experiments.models import Model, plain
from mrp_lightning.experiments.numbers import Write
from mrp_lightning.experiments.page.parts import Fold, Part, Row, Table, columns
from mrp_lightning.experiments.runs import Run
from mrp_lightning.targets.blocks import without_numbers

LAYER_ROWS = 2000
"""Layers that a page lists at most; a page of fewer runs lists them."""

_IN_LAYERS: tuple[tuple[str, str, Write], ...] = (
    ("sparsity", "sparsity", numbers.percent),
    ("relative_loss", "relative loss", numbers.relative_loss),
    ("loss", "loss", numbers.number),
    ("target_loss", "target loss", numbers.number),
    ("bits", "bits", numbers.count),
    ("zeros_loss", "loss of the zeros", numbers.number),
    ("grid_loss", "loss of the grid", numbers.number),
    ("damping", "λ", numbers.number),
    ("iterations", "iterations", numbers.count),
    ("gap", "gap", numbers.number),
    ("tokens", "tokens", numbers.count),
    ("dead_inputs", "dead inputs", numbers.count),
    ("shared_hessian", "shared Hessian", numbers.number),
    ("seconds", "seconds", numbers.seconds),
    ("peak_memory", "peak memory", numbers.memory),
)


def dense_part(model: Model) -> Part | None:
    """The layers that were left dense, by kind and reason."""
    found: dict[tuple[str, str], list[tuple[str, Run]]] = {}
    for run in (run for result in model.originals for run in result.runs):
        for layer in run.layers:
            if layer.skipped is not None:
                key = (without_numbers(layer.name), layer.skipped)
                found.setdefault(key, []).append((layer.name, run))
    if not found:
        return None
    rows = [
        Row(name, [reason, *(str(len(set(column))) for column in zip(*layers, strict=True))])
        for (name, reason), layers in found.items()
    ]
    shown = columns("layers:", "why:", "number", "in runs")
    return Part(
        "Left dense", tables=[Table("Layers that were left dense", shown, {"": rows})], folded=True
    )


def settings_part(model: Model) -> Part:
    """Runs, configuration, versions, layers."""
    folds = [Fold(f"Runs ({len(model.runs)})", [_run_table(model)])]
    configs = [run.config for run in model.runs if run.report]
    if configs:
        folds.append(Fold("Configuration", [_keys("Arguments of the runs", configs, "argument")]))
    versions = [run.report.versions for run in model.runs if run.report]
    versions += [run.evaluation.versions for run in model.runs]
    folds.append(Fold("Versions", [_keys("Libraries of the runs", versions, "library")]))
    originals = [run for result in model.originals for run in result.runs]
    rows = sum(len(run.layers) for run in originals)
    if rows > LAYER_ROWS:
        text = (
            f"The {rows:,} layers of these runs are in the raw data; the page of a single run "
            f"lists them if they are at most {LAYER_ROWS:,}."
        )
        return Part("Runs and settings", text, folds=folds, folded=True)
    folds += [Fold(f"Layers of {run.name}", [_layer_table(run)]) for run in originals]
    return Part("Runs and settings", folds=folds, folded=True)


def _run_table(model: Model) -> Table:
    """Every run with its directory."""
    written: dict[str, Write] = {
        "layers pruned": numbers.count,
        "left dense": numbers.count,
        "weights": numbers.count,
        "weights removed": numbers.count,
        "relative layer loss": numbers.relative_loss,
        "seconds": numbers.seconds,
        "CPU seconds": numbers.seconds,
        "peak memory": numbers.memory,
        "weight files": numbers.memory,
    }
    rows = []
    for result in model.rows:
        for run in result.runs:
            totals = run.report.totals if run.report else {}
            keys = ("layers", "skipped", "weights", "removed", "relative_loss", "seconds")
            found = [totals.get(key) for key in (*keys, "cpu_seconds", "peak_rss")]
            values = zip([*found, run.weight_bytes], written.values(), strict=True)
            cells = [write(x) if x is not None or run.report else "" for x, write in values]
            what = ", ".join(filter(None, [result.setting, result.label]))
            complete = ("yes" if run.complete else "no") if run.report else ""
            rows.append(Row(run.name, [what, *cells, complete], result.method))
    return Table("Runs", columns("directory:", "what:", *written, "complete:"), {"": rows})


def _keys(caption: str, found: Sequence[Mapping[str, Any]], header: str) -> Table:
    """Keys and their values in several mappings, each different value once."""
    rows = []
    for key in dict.fromkeys(key for mapping in found for key in mapping):
        values = dict.fromkeys(plain(mapping[key]) for mapping in found if key in mapping)
        rows.append(Row(key, [", ".join(values)]))
    return Table(caption, columns(f"{header}:", "value:"), {"": rows})


def _layer_table(run: Run) -> Table:
    """Every layer of a run; only columns that hold something."""
    held = [f for f in _IN_LAYERS if any(getattr(layer, f[0]) is not None for layer in run.layers)]
    groups: dict[str, list[Row]] = {"": []}
    for layer in sorted(run.layers, key=lambda layer: layer.skipped is not None):
        shape = " × ".join(map(str, layer.shape))
        row = Row(layer.name, [shape, *(write(getattr(layer, key)) for key, _, write in held)])
        groups.setdefault("" if layer.skipped is None else "left dense", []).append(row)
    shown = columns("layer:", "shape", *(label for _, label, _ in held))
    return Table(f"Layers of {run.name}", shown, groups)
