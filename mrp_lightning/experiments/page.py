"""The HTML page about runs: one self-contained file, without scripts and network access."""

import base64
from collections import Counter
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
from mrp_lightning.errors import counted
from mrp_lightning.experiments.groups import ModelRuns, find_models, plain
from mrp_lightning.experiments.pictures import (
    Part,
    Picture,
    Scale,
    color_of,
    draw_lines,
    stack_and_number,
)
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
from mrp_lightning.records.rows import LayerReport
from mrp_lightning.targets.blocks import without_numbers

_LAYER_ROWS = 2000
"""The largest number of layer rows on a page; with more, layers are not listed."""
_WORST = 5
"""The number of layers with the largest losses that a page of one result lists."""
_LOSS = Scale("relative loss", numbers.relative_loss)
_LOSS_TEXT = "Mean over the calibration tokens of ‖(w + δ)x − wx‖², relative to that of ‖wx‖²."
_ERROR_TEXT = (
    "The error is ‖y − y_d‖² / ‖y_d‖² over the windows that tuning did not see, for the "
    "outputs y of the block and y_d of the block in the dense model."
)

_Columns = Mapping[str, tuple[str, Write]]
"""The headers and the formats of values, by their keys."""
_LAYERS: _Columns = {
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
_BLOCKS: _Columns = {
    "sparsity": ("sparsity", numbers.percent),
    "error_before": ("error before", numbers.relative_loss),
    "error_after": ("error after", numbers.relative_loss),
    "epoch": ("epoch", numbers.count),
    "seconds": ("seconds", numbers.seconds),
}
_RUNS: _Columns = {
    "layers": ("layers pruned", numbers.count),
    "skipped": ("left dense", numbers.count),
    "weights": ("weights", numbers.count),
    "removed": ("weights removed", numbers.count),
    "relative_loss": ("relative layer loss", numbers.relative_loss),
    "seconds": ("seconds", numbers.seconds),
    "cpu_seconds": ("CPU seconds", numbers.seconds),
    "peak_rss": ("peak memory", numbers.memory),
    "weight_bytes": ("weight files", numbers.memory),
}


def _table(
    caption: str,
    head: str,
    columns: _Columns,
    rows: Sequence[tuple[str, str, Mapping[str, Any]]],
    group: str = "sparsity",
) -> Table:
    """Return a table of rows (group, name, values by key), without empty columns."""
    used = [key for key in columns if any(row[2].get(key) is not None for row in rows)]
    cells = [(of, name, *(columns[k][1](values.get(k)) for k in used)) for of, name, values in rows]
    return Table(caption, (head, *(columns[k][0] for k in used)), cells, group)


class Note(NamedTuple):
    """A fact that qualifies the numbers, and the names of the runs that it concerns."""

    text: str
    runs: Sequence[str] = ()


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
    model, zero_shot = frame.model, zero_shot_table(frame)
    parts = [_results_part(frame), zero_shot and Part("Zero-shot", tables=[zero_shot])]
    parts += [_loss_part(model), _block_part(model), _dense_part(model), _settings_part(model)]
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
    yield draw_lines(caption, lines, _methods(frame.model), scale, across="")


def _methods(model: ModelRuns) -> dict[str, str | None]:
    return {group.label: group.method for group in model.rows}


def _loss_part(model: ModelRuns) -> Part | None:
    """Return losses by block, and the largest ones of a single group; `None` without losses."""
    rows = [
        (group.setting, group.label, run.name, layer.block or "", layer.name, layer.relative_loss)
        for group in model.originals
        for run in group.runs
        for layer in run.pruned_layers
        if layer.relative_loss is not None
    ]
    if not rows:
        return None
    losses = pd.DataFrame(rows, columns=["setting", "label", "run", "block", "name", "loss"])
    pictures = list(_by_block(model, losses))
    if len(model.originals) > 1:
        return Part("Where it lost", _LOSS_TEXT, pictures=pictures) if pictures else None
    means = losses.groupby("name")["loss"].mean()
    largest = means.sort_values(ascending=False, kind="stable").head(_WORST)
    cells = [("", str(name), _LOSS.write(float(loss))) for name, loss in largest.items()]
    caption = f"The {len(cells)} of {len(means)} layers that lost most"
    table = Table(caption, ("layer", "relative loss"), cells)
    return Part("Where it lost", _LOSS_TEXT, [table], pictures)


def _by_block(model: ModelRuns, losses: pd.DataFrame) -> Iterator[Picture]:
    """Yield a picture for each setting: a line for each group, the mean over its runs."""
    # Sorted by list and number; the layers outside of blocks, whose block is "", come last.
    numbered = {block: stack_and_number(block) for block in dict.fromkeys(losses["block"])}
    lists = [stack for stack, _ in numbered.values()]
    blocks = sorted(
        numbered, key=lambda b: (not b, lists.index(numbered[b][0]), numbered[b][1] or 0)
    )
    if len(blocks) < 2:
        return
    by_block = losses.groupby(["setting", "block", "label"], sort=False)["loss"].mean()
    for setting, means in by_block.groupby(level="setting", sort=False):
        lines = means.droplevel("setting").unstack(sort=False).reindex(index=blocks)
        caption = f"Relative loss, mean over the layers of a block, by block at {setting}."
        yield draw_lines(caption, lines, _methods(model), _LOSS)


def _block_part(model: ModelRuns) -> Part | None:
    """Return the blocks of each group's first run; `None` without tuning or allocation."""
    rows = [
        (f"{group.setting}, {group.label}", block.name, vars(block))
        for group in model.originals
        if (report := group.runs[0].report) is not None
        for block in report.blocks
    ]
    if not rows:
        return None
    table = _table("Blocks of the first run of each result", "block", _BLOCKS, rows, "result")
    return Part("Blocks", _ERROR_TEXT, [table], folded=True)


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
    rows = counts.reset_index().to_numpy().tolist()
    table = Table("Layers that were left dense", ("layers", *counts), rows, "why")
    return Part("Left dense", tables=[table], folded=True)


def _settings_part(model: ModelRuns) -> Part:
    """Return the runs with their configuration, versions and layers."""
    rows = [
        (
            ", ".join(filter(None, [group.setting, group.label])),
            run.name,
            {**(run.report.totals if run.report else {}), "weight_bytes": run.weight_bytes},
        )
        for group in model.rows
        for run in group.runs
    ]
    table = _table("Runs", "directory", _RUNS, rows)
    folds = [Part(f"Runs ({len(model.runs)})", tables=[table])]
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
    return Table(caption, (head, "value"), rows, kind="text")


def _layer_table(run: RunDirectory) -> Table:
    """Return a table of the layers of a run, those left dense last."""
    layers = sorted(run.layers, key=lambda layer: layer.skipped is not None)
    rows = []
    for layer in layers:
        values: dict[str, Any] = {}
        for key, value in asdict(layer).items():
            nested = value if isinstance(value, dict) else {}
            values |= {f"{key}.{name}": each for name, each in nested.items()} or {key: value}
        values["shape"] = " × ".join(map(str, layer.shape))
        rows.append(("" if layer.skipped is None else "left dense", layer.name, values))
    shape: Any = {"shape": ("shape", str)}
    return _table(f"Layers of {run.name}", "layer", shape | _LAYERS, rows)


def _read(name: str) -> str:
    """Return the text of a file of this package, a template or a style sheet."""
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def notes(model: ModelRuns) -> list[Note]:
    """Return the notes on the runs of a model; a note on several runs is listed once."""
    runs: dict[str, list[str]] = {}
    for run in model.runs:
        for text in (*_run_notes(run), *_layer_notes(run)):
            runs.setdefault(text, []).append(run.name)
    doubts = [Note(doubt) for doubt in model.doubts]
    return [*doubts, *(Note(text, names) for text, names in runs.items())]


def _run_notes(run: RunDirectory) -> Iterator[str]:
    if run.report is None:
        return
    if not run.complete:
        yield (
            f"Incomplete: the run ended after {len(run.pruned_layers)} pruned layers. "
            "All others were left as they were."
        )
    if earlier := run.report.totals.get("already_pruned"):
        yield f"{earlier} of {len(run.pruned_layers)} layers had the pattern before."
    if zeros := run.report.totals.get("zeros_before"):
        yield f"{zeros:.0%} of the weights were zero before: losses are against them as they were."


def _layer_notes(run: RunDirectory) -> Iterator[str]:
    """Yield a note for each kind of problem that layers have, with the worst layer."""
    layers, tolerance = run.pruned_layers, run.config.get("tolerance")
    if isinstance(tolerance, int | float):
        near = f"may be further from the optimal loss than the tolerance of {tolerance:.0e}"
        gaps = {x: x.gap for x in layers if x.gap and x.gap > tolerance}
        how = "by at most {0.gap:.1e}, relative to it."
        yield from _worst(gaps, near.replace("e-", "e−"), how)
    raised = {x: x.raised_damping for x in layers if x.raised_damping}
    more = "{0.raised_damping:g}. More calibration tokens would help."
    yield from _worst(raised, "needed more damping than was asked for", more)
    if fallen := sum(bool(x.fallback_mask) for x in layers):
        yield f"{fallen} layers have another mask than the method's, which lost more."
    dead = {x: x.dead_inputs / x.shape[1] for x in layers if x.dead_inputs}
    of_all = "{0.dead_inputs:,} of {0.shape[1]:,}."
    yield from _worst(dead, "had input features that were always 0", of_all)
    own = [x.target.own for x in layers if x.target and x.target.own]
    for reason, number in Counter(own).items():
        yield f"{number} of {len(layers)} layers kept their own target: {reason}."
    if helped := sum(bool(x.shared_hessian) for x in layers):
        yield (
            f"{helped} experts saw fewer tokens than they have input features; the Hessian of "
            "all experts' tokens made up for it. More calibration data would help them."
        )
    alone = [x for x in layers if x.tokens is not None and not x.shared_hessian]
    few = {x: 1 - (x.tokens or 0) / x.shape[1] for x in alone if (x.tokens or 0) < x.shape[1]}
    tokens = "{0.tokens:,} for {0.shape[1]:,}. More calibration data would help."
    yield from _worst(few, "saw fewer tokens than they have input features", tokens)


def _worst(badness: Mapping[LayerReport, float], problem: str, amount: str) -> Iterator[str]:
    """Yield the number of layers that have a problem, and its amount in the worst of them."""
    if badness:
        worst = max(badness, key=lambda layer: badness[layer])
        of_worst = amount.format(worst).replace("e-", "e−")
        yield f"{counted(len(badness), 'layer')} {problem}: {worst.name} {of_worst}"
