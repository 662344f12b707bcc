"""The parts for the record: what was left dense, the runs, their settings, every layer."""

from collections.abc import Mapping, Sequence

from mrp_lightning.experiments import numbers
from mrp_lightning.experiments.numbers import Write
from mrp_lightning.experiments.page.layers import place
from mrp_lightning.experiments.page.models import Model
from mrp_lightning.experiments.page.parts import Column, Fold, Part, Row, Table
from mrp_lightning.experiments.runs import Run
from mrp_lightning.records.rows import LayerReport

LAYER_ROWS = 2000
"""Layers that a page lists at most; a page of fewer runs lists them."""


def dense_layers(model: Model) -> Part | None:
    """The layers that were left dense, by kind and reason."""
    found: dict[tuple[str, str], list[tuple[str, Run]]] = {}
    for run in (run for variant in model.originals for run in variant.runs):
        for layer in run.layers:
            if layer.skipped is not None:
                block, kind = place(layer.name)
                where = f"{block.stack}.*.{kind}" if block.stack else kind
                found.setdefault((where, layer.skipped), []).append((layer.name, run))
    if not found:
        return None
    rows = [
        Row(where, [reason, *(str(len(set(column))) for column in zip(*layers, strict=True))])
        for (where, reason), layers in found.items()
    ]
    columns = [Column("layers", numeric=False), Column("why", numeric=False)]
    columns += [Column("number"), Column("in runs")]
    return Part("Left dense", "", [Table("Layers that were left dense", columns, {"": rows})])


def settings(model: Model) -> Part:
    """Runs, configuration, versions, layers."""
    runs = model.runs
    pruned = [run for run in runs if run.report]
    folds = [Fold(f"Runs ({len(runs)})", [run_table(model)])]
    if pruned:
        configs = [run.config for run in pruned]
        table = key_values("Arguments of the runs", configs, "argument")
        folds.append(Fold("Configuration", [table]))
    versions = [*(run.versions for run in runs), *(run.evaluation.versions for run in runs)]
    table = key_values("Libraries of the runs", versions, "library")
    folds.append(Fold("Versions", [table]))
    originals = [run for variant in model.originals for run in variant.runs]
    rows = sum(len(run.layers) for run in originals)
    text = ""
    if rows <= LAYER_ROWS:
        folds += [Fold(f"Layers of {run.name}", [layer_table(run)]) for run in originals]
    else:
        text = (
            f"The {rows:,} layers of these runs are in the raw data; the page of a single run "
            f"lists them if they are at most {LAYER_ROWS:,}."
        )
    return Part("Runs and settings", text, folds=folds)


def run_table(model: Model) -> Table:
    """Every run with its directory."""
    columns = [
        *(Column("directory", numeric=False), Column("what", numeric=False)),
        *(Column("layers pruned"), Column("left dense"), Column("weights removed")),
        *(Column("relative layer loss"), Column("seconds"), Column("CPU seconds")),
        *(Column("peak memory"), Column("weight files"), Column("complete", numeric=False)),
    ]
    rows = []
    if model.dense:
        size = numbers.memory(model.dense.weight_bytes)
        rows.append(Row(model.dense.name, ["dense", *[""] * 7, size, ""]))
    for variant in model.variants:
        for run in variant.runs:
            assert run.report is not None  # a variant is pruned
            totals = run.report.totals
            cells = [
                f"{variant.setting}, {variant.label}",
                numbers.count(totals["layers"]),
                numbers.count(totals["skipped"]),
                f"{numbers.count(totals['removed'])} of {numbers.count(totals['weights'])}",
                numbers.relative_loss(run.report.relative_loss),
                numbers.seconds(run.report.seconds),
                numbers.seconds(run.report.cpu_seconds),
                numbers.memory(run.report.peak_rss),
                numbers.memory(run.weight_bytes),
                "yes" if run.complete else "no",
            ]
            rows.append(Row(run.name, cells, variant.method))
    return Table("Runs", columns, {"": rows})


def key_values(caption: str, found: Sequence[Mapping[str, object]], header: str) -> Table:
    """Keys and their values in several mappings, each different value once."""
    keys = dict.fromkeys(key for mapping in found for key in mapping)
    rows = []
    for key in keys:
        values = dict.fromkeys(_as_text(m[key]) for m in found if key in m)
        rows.append(Row(key, [", ".join(values)]))
    columns = [Column(header, numeric=False), Column("value", numeric=False)]
    return Table(caption, columns, {"": rows})


def layer_table(run: Run) -> Table:
    """Every layer of a run; only columns that hold something."""
    fields: list[tuple[str, str, Write]] = [
        ("sparsity", "sparsity", numbers.percent),
        ("relative_loss", "relative loss", numbers.relative_loss),
        ("loss", "loss", numbers.number),
        ("target_loss", "target loss", numbers.number),
        ("damping", "λ", numbers.number),
        ("iterations", "iterations", numbers.count),
        ("gap", "gap", numbers.number),
        ("tokens", "tokens", numbers.count),
        ("dead_inputs", "dead inputs", numbers.count),
        ("shared_hessian", "shared Hessian", numbers.number),
        ("seconds", "seconds", numbers.seconds),
        ("peak_memory", "peak memory", numbers.memory),
    ]
    held = [f for f in fields if any(getattr(layer, f[0]) is not None for layer in run.layers)]
    columns = [Column("layer", numeric=False), Column("shape"), *(Column(f[1]) for f in held)]

    def row(layer: LayerReport) -> Row:
        shape = " × ".join(map(str, layer.shape))
        return Row(layer.name, [shape, *(write(getattr(layer, key)) for key, _, write in held)])

    dense = [layer for layer in run.layers if layer.skipped is not None]
    groups = {"": [row(layer) for layer in run.pruned]}
    if dense:
        groups["left dense"] = [row(layer) for layer in dense]
    return Table(f"Layers of {run.name}", columns, groups)


def _as_text(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
