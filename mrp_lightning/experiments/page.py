"""The HTML page about runs: one self-contained file, without scripts and network access."""

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib import resources
from math import isfinite
from statistics import fmean
from typing import Any, NamedTuple

import pandas as pd
from jinja2 import Environment, FunctionLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from mrp_lightning.commands import numbers
from mrp_lightning.commands.numbers import MISSING, Write
from mrp_lightning.environment import __version__
from mrp_lightning.experiments.groups import ModelRuns, find_models, plain
from mrp_lightning.experiments.layers import block_part, loss_part
from mrp_lightning.experiments.notes import notes
from mrp_lightning.experiments.pictures import Part, Picture, Scale, color_of, draw_lines
from mrp_lightning.experiments.runs import RunDirectory
from mrp_lightning.experiments.scores import (
    RELATIVE_LOSS,
    Score,
    ScoreFrame,
    Table,
    named,
    results_table,
    zero_shot_table,
)
from mrp_lightning.targets.blocks import without_numbers

_LAYER_ROWS = 2000
"""The largest number of layer rows on a page; with more, layers are not listed."""

_LAYER_COLUMNS: dict[str, tuple[str, Write]] = {
    "sparsity": ("sparsity", numbers.percent),
    "relative_loss": ("relative loss", numbers.relative_loss),
    "loss": ("loss", numbers.number),
    "target.loss": ("target loss", numbers.number),
    "grid.bits": ("bits", numbers.count),
    "grid.zeros_loss": ("loss of the zeros", numbers.number),
    "grid.grid_loss": ("loss of the grid", numbers.number),
    "damping": ("λ", numbers.number),
    "iterations": ("iterations", numbers.count),
    "gap": ("gap", numbers.number),
    "tokens": ("tokens", numbers.count),
    "dead_inputs": ("dead inputs", numbers.count),
    "shared_hessian": ("shared Hessian", numbers.number),
    "seconds": ("seconds", numbers.seconds),
    "peak_memory": ("peak memory", numbers.memory),
}
_RUN_COLUMNS: tuple[tuple[str, str, Write], ...] = (
    ("layers", "layers pruned", numbers.count),
    ("skipped", "left dense", numbers.count),
    ("weights", "weights", numbers.count),
    ("removed", "weights removed", numbers.count),
    ("relative_loss", "relative layer loss", numbers.relative_loss),
    ("seconds", "seconds", numbers.seconds),
    ("cpu_seconds", "CPU seconds", numbers.seconds),
    ("peak_rss", "peak memory", numbers.memory),
    ("weight_bytes", "weight files", numbers.memory),
)


class _HeadValue(NamedTuple):
    """A value at the head of a page: its label, and how it was measured."""

    label: str
    value: str
    detail: str


def make_page(
    runs: Sequence[RunDirectory], name: str, title: str | None = None, *, command: str = ""
) -> str:
    """Return the HTML page about runs.

    Args:
        runs: The runs, at least one.
        name: The name in the default title of several models.
        title: The title; by default it names the model, the sparsities and the methods.
        command: The command that makes the page again, which the page shows.
    """
    models, sections = find_models(runs), list[dict[str, Any]]()
    several = f"{name}: {len(models)} models"
    for number, model in enumerate(models, start=1):
        frame = ScoreFrame(model)
        sections.append(
            {
                "id": f"model-{number}",
                "model": model,
                "title": _title_of(model),
                "headline": list(headline(frame)),
                "notes": notes(model),
                "parts": _parts_of(frame),
            }
        )
    # Undefined names raise and values are escaped: names of layers and paths are the user's, and a
    # page may be published.
    environment = Environment(
        loader=FunctionLoader(_read), autoescape=select_autoescape(), undefined=StrictUndefined
    )
    environment.filters["base64"] = lambda content: base64.b64encode(content).decode()
    environment.filters["breakable"] = lambda name: Markup(".<wbr>").join(name.split("."))
    return environment.get_template("page.html").render(
        title=title or (sections[0]["title"] if len(sections) == 1 else several),
        sections=sections,
        version=__version__,
        command=command,
        color=color_of,
        css=_read("style.css"),
    )


def _parts_of(frame: ScoreFrame) -> list[Part]:
    """Return the parts of a page that are not empty: scores, losses, the rest."""
    model = frame.model
    parts = [_results_part(frame), _zero_shot_part(frame), loss_part(model), block_part(model)]
    parts += [_dense_part(model), _settings_part(model)]
    return [part for part in parts if part]


def _title_of(model: ModelRuns) -> str:
    """Return the name of a model with the settings and methods of its groups."""
    names = list(dict.fromkeys(group.trial.label for group in model.originals))
    if len(model.originals) == 1:
        names = [model.originals[0].label]
    if not names:
        return model.name
    methods = names[0] if len(names) == 1 else f"{len(names)} methods"
    return f"{model.name}, {', '.join(model.by_setting(model.groups))} by {methods}"


def headline(frame: ScoreFrame) -> Iterator[_HeadValue]:
    """Yield the scores and costs of a single group, else the perplexities of the dense model."""
    groups = frame.model.originals
    if len(groups) > 1:
        return
    key, dense = (groups[0].setting, groups[0].label) if groups else ("", ""), ("", "dense")
    means, texts = frame.means, frame.texts
    for score in filter(lambda score: score.is_perplexity, frame.scores):
        values = [row for row in (dense, key) if row in means.index and texts.loc[row, score]]
        details = [f"context {score.context}" if score.context else "", frame.detail(score)]
        if len(values) == 2 and means.loc[values, score].map(isfinite).all():
            change = 100 * (means.loc[key, score] / means.loc[dense, score] - 1)
            details.insert(0, numbers.signed(change, "{:.1f}%".format))
        if values and (key in values or not groups):
            written = " → ".join(texts.loc[row, score] for row in values)
            details = [detail for detail in details if detail]
            yield _HeadValue(f"Perplexity on {named(score.of)}", written, ", ".join(details))
    if not groups:
        return
    report = groups[0].runs[0].report
    assert report is not None  # groups consist of pruned runs
    totals = report.totals
    loss = texts.loc[key].get(RELATIVE_LOSS, MISSING) or MISSING
    yield _HeadValue("Relative layer loss", loss, f"mean over {totals['layers']} layers")
    removed = f"of {numbers.count(totals['weights'])} in the pruned layers"
    if of_all := totals.get("model_weights"):
        removed += f", {numbers.percent(totals['removed'] / of_all)} of all"
    removed += f"; {totals['skipped']} left dense" if totals["skipped"] else ""
    yield _HeadValue("Weights removed", numbers.percent(totals["sparsity"]), removed)
    for copy in frame.model.groups:
        if sizes := [run.weight_bytes for run in copy.runs if run.weight_bytes]:
            of = copy.runs[0].exported or "with the removed weights as zeros"
            yield _HeadValue("Weight files", numbers.memory(fmean(sizes)), of)


def _results_part(frame: ScoreFrame) -> Part | None:
    """Return perplexity, loss and time of all groups; `None` if nothing was measured."""
    table = results_table(frame)
    if table is None:
        return None
    by_setting = frame.model.by_setting()
    compared = any(len(groups) > 1 for groups in by_setting.values())
    text = "Lower is better; the lowest of each sparsity is bold." if compared else ""
    pictures = [
        picture
        for score in frame.scores
        if score.is_perplexity and compared
        for picture in _perplexity_picture(frame, score)
    ]
    title = "What changed" if len(frame.model.originals) == 1 else "Results"
    return Part(title, text, [table], pictures)


def _perplexity_picture(frame: ScoreFrame, score: Score) -> Iterator[Picture]:
    """Draw a line for each group over the settings, and one for the dense model."""
    means = frame.means[score].dropna()
    finite = means[means.map(isfinite)]
    lost = [f"{label} at {setting}" for setting, label in means.index.difference(finite.index)]
    lines = finite[finite.index.get_level_values("setting") != ""].unstack(sort=False)
    if lines.empty:
        return
    if ("", "dense") in finite:
        lines.insert(0, "dense", finite["", "dense"])
    caption = f"Perplexity on {named(score.of)}, by sparsity."
    caption += f" Not finite: {', '.join(lost)}." if lost else ""
    scale = Scale(str(score), score.write, zero=False)
    yield draw_lines(caption, lines, _methods(frame), scale, across="")


def _zero_shot_part(frame: ScoreFrame) -> Part | None:
    """Return zero-shot results before and after pruning; `None` if there are none."""
    table = zero_shot_table(frame)
    if table is None:
        return None
    return Part("Zero-shot", tables=[table])


def _methods(frame: ScoreFrame) -> dict[str, str | None]:
    return {group.label: group.method for group in frame.model.rows}


def _dense_part(model: ModelRuns) -> Part | None:
    """Return the layers that were left dense, by kind and reason."""
    layers = pd.DataFrame(
        [
            (layer.skipped, without_numbers(layer.name), layer.name, run.name)
            for group in model.originals
            for run in group.runs
            for layer in run.layers
            if layer.skipped is not None
        ],
        columns=["reason", "layers", "number", "in runs"],
    )
    if layers.empty:
        return None
    counts = layers.groupby(["reason", "layers"], sort=False).nunique().astype(str)
    table = Table("Layers that were left dense", counts, "layers", "why")
    return Part("Left dense", tables=[table], folded=True)


def _settings_part(model: ModelRuns) -> Part:
    """Return the runs with their configuration, versions and layers."""
    header = ("directory", *(label for _, label, _ in _RUN_COLUMNS), "complete")
    rows = []
    for group in model.rows:
        name = ", ".join(filter(None, [group.setting, group.label]))
        for run in group.runs:
            values = {**(run.report.totals if run.report else {}), "weight_bytes": run.weight_bytes}
            cells = [
                write(values.get(key)) if values.get(key) is not None or run.report else ""
                for key, _, write in _RUN_COLUMNS
            ]
            complete = ("yes" if run.complete else "no") if run.report else ""
            rows.append((name, run.name, *cells, complete))
    folds = [Part(f"Runs ({len(model.runs)})", tables=[Table.of_rows("Runs", header, rows)])]
    reports = [run.report for run in model.runs if run.report]
    if reports:
        arguments = _values_table("Arguments of the runs", "argument", [r.config for r in reports])
        folds.append(Part("Configuration", tables=[arguments]))
    versions = [report.versions for report in reports]
    versions += [run.evaluation.versions for run in model.runs]
    libraries = _values_table("Libraries of the runs", "library", versions)
    folds.append(Part("Versions", tables=[libraries]))
    originals = [run for group in model.originals for run in group.runs]
    text, number = "", sum(len(run.layers) for run in originals)
    if number > _LAYER_ROWS:
        text = (
            f"The {number:,} layers of these runs are in their reports; the page of a single run "
            f"lists them if they are at most {_LAYER_ROWS:,}."
        )
    else:
        folds += [Part(f"Layers of {run.name}", tables=[_layer_table(run)]) for run in originals]
    return Part("Runs and settings", text, folds=folds, folded=True)


def _values_table(caption: str, head: str, configs: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of the keys of several mappings with their distinct values."""
    rows = []
    for key in dict.fromkeys(key for config in configs for key in config):
        values = dict.fromkeys(plain(config[key]) for config in configs if key in config)
        rows.append(("", key, ", ".join(values)))
    return Table.of_rows(caption, (head, "value"), rows, kind="text")


def _layer_table(run: RunDirectory) -> Table:
    """Return a table of the layers of a run, without empty columns."""
    layers = sorted(run.layers, key=lambda layer: layer.skipped is not None)
    values = pd.json_normalize([asdict(layer) for layer in layers])
    columns = [c for c in _LAYER_COLUMNS if c in values and values[c].notna().any()]
    rows = [
        (
            "" if layer.skipped is None else "left dense",
            layer.name,
            " × ".join(map(str, layer.shape)),
            *(_LAYER_COLUMNS[c][1](None if pd.isna(row[c]) else row[c]) for c in columns),
        )
        for layer, (_, row) in zip(layers, values.iterrows(), strict=True)
    ]
    header = ("layer", "shape", *(_LAYER_COLUMNS[c][0] for c in columns))
    return Table.of_rows(f"Layers of {run.name}", header, rows)


def _read(name: str) -> str:
    """Return the text of a file of this package, a template or a style sheet."""
    return resources.files(__package__).joinpath(name).read_text("utf-8")
