"""The HTML page about runs: one self-contained file, without scripts and network access."""

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from itertools import cycle
from math import inf, isfinite
from statistics import fmean
from typing import Any, NamedTuple

import pandas as pd
from jinja2 import Environment, FunctionLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from mrp_lightning.commands import numbers
from mrp_lightning.commands.numbers import MISSING, Write
from mrp_lightning.environment import __version__
from mrp_lightning.experiments.groups import ModelRuns, find_models, plain
from mrp_lightning.experiments.pictures import SERIES, Picture, draw_lines
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
from mrp_lightning.records.model_card import kept_units
from mrp_lightning.records.rows import LayerReport
from mrp_lightning.targets.blocks import without_numbers

_LAYER_ROWS = 2000
"""The largest number of layer rows on a page; with more, layers are not listed."""
_WORST = 5
"""The number of layers with the largest losses that a page of one result lists."""
_LOSS_TEXT = "Mean over the calibration tokens of ‖(w + δ)x − wx‖², relative to that of ‖wx‖²."
_ERROR_TEXT = (
    "The error is ‖y − y_d‖² / ‖y_d‖² over the windows that tuning did not see, for the "
    "outputs y of the block and y_d of the block in the dense model."
)
_WRITE: dict[str, Write] = {
    **dict.fromkeys(("sparsity", "share", "zeros_before"), numbers.percent),
    **dict.fromkeys(("relative_loss", "error_before", "error_after"), numbers.relative_loss),
    **dict.fromkeys(("seconds", "cpu_seconds"), numbers.seconds),
    **dict.fromkeys(("peak_memory", "peak_rss", "weight_bytes"), numbers.memory),
}
"""The formats of values in reports by their keys; others depend on their type."""

_Colors = Mapping[str, str]
"""The colours of groups by their labels."""


@dataclass(frozen=True)
class Part:
    """A part of a page: a text, pictures, tables, and parts that are folded away inside it."""

    title: str
    text: str = ""
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()
    folds: Sequence["Part"] = ()
    folded: bool = False  # until its content is asked for


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
    labels = dict.fromkeys(group.label for model in models for group in model.groups)
    colors = dict(zip(labels, cycle(SERIES[4:] + SERIES[:4]), strict=False))  # the accent first
    for number, model in enumerate(models, start=1):
        frame = ScoreFrame(model)
        sections.append(
            {
                "id": f"model-{number}",
                "model": model,
                "title": _title_of(model),
                "headline": list(headline(frame)),
                "notes": notes(model),
                "parts": list(filter(None, _parts_of(frame, colors))),
            }
        )
    several = f"{name}: {len(models)} models"
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
        colors=colors,
        css=_read("style.css"),
    )


def _parts_of(frame: ScoreFrame, colors: _Colors) -> Iterator[Part | None]:
    """Yield the parts of a page, `None` for those without content."""
    model, zero_shot = frame.model, zero_shot_table(frame)
    yield _results_part(frame, colors)
    yield Part("Zero-shot", tables=[zero_shot]) if zero_shot else None
    yield _loss_part(model, colors)
    yield _block_part(model)
    yield _dense_part(model)
    yield _settings_part(model)


def _title_of(model: ModelRuns) -> str:
    """Return the name of a model with the settings and methods of its groups."""
    labels = list(dict.fromkeys(group.label for group in model.originals))
    if not labels:
        return model.name
    by = labels[0] if len(labels) == 1 else f"{len(labels)} methods"
    return f"{model.name}, {', '.join(model.settings)} by {by}"


def headline(frame: ScoreFrame) -> Iterator[_HeadValue]:
    """Yield the scores and costs of a single group, before and after; nothing for several."""
    if len(frame.model.originals) != 1:
        return
    (group,) = frame.model.originals
    rows = [("", frame.model.given)] * bool(frame.model.dense) + [(group.setting, group.label)]
    for score in filter(lambda score: score.is_perplexity, frame.scores):
        values = [frame.means.loc[row, score] for row in rows]
        details = [f"context {score.context}" if score.context else "", frame.detail(score)]
        if len(values) == 2 and all(map(isfinite, values)):
            details.insert(0, f"{100 * (values[1] / values[0] - 1):+.1f}%")
        shown = " → ".join(frame.texts.loc[row, score] or MISSING for row in rows)
        yield _HeadValue(
            f"Perplexity on {named(score.of)}", shown, ", ".join(filter(None, details))
        )
    report = group.runs[0].report
    assert report is not None  # groups consist of pruned runs
    totals, narrowed, share = report.totals, report.narrowed, report.totals["sparsity"]
    if totals["layers"]:
        loss = frame.texts.loc[rows[-1]].get(RELATIVE_LOSS, MISSING)
        yield _HeadValue("Relative layer loss", loss, f"mean over {totals['layers']} layers")
    removed = f"of {numbers.count(totals['weights'])} in the pruned layers"
    removed += f"; {totals['skipped']} left dense" if totals["skipped"] else ""
    if narrowed:
        removed = f"of {numbers.count(totals['model_weights'])} in the model: "
        removed += f"{kept_units(narrowed)} are left"
        share = 1 - narrowed["model_weights"] / totals["model_weights"]
    yield _HeadValue("Weights removed", numbers.percent(share), removed)
    for copy in frame.model.groups:
        if sizes := [run.weight_bytes for run in copy.runs if run.weight_bytes]:
            of = "without the removed weights" if narrowed else "with the removed weights as zeros"
            of = copy.runs[0].exported or of
            yield _HeadValue("Weight files", numbers.memory(fmean(sizes)), of)


def _results_part(frame: ScoreFrame, colors: _Colors) -> Part | None:
    """Return perplexity, loss and time of all groups; `None` if nothing was measured."""
    table = results_table(frame)
    if table is None:
        return None
    compared = max(frame.model.settings.values(), default=0) > 1
    text = "Lower is better; the lowest of each sparsity is bold." if compared else ""
    perplexities = [score for score in frame.scores if score.is_perplexity and compared]
    drawn = [_by_setting(frame, score, colors) for score in perplexities]
    title = "What changed" if len(frame.model.originals) == 1 else "Results"
    return Part(title, text, [table], list(filter(None, drawn)))


def _by_setting(frame: ScoreFrame, score: Score, colors: _Colors) -> Picture | None:
    """Draw the finite values of each group over the settings, and that of the dense model."""
    means = frame.means[score]
    finite = means[means.map(isfinite)]
    given = frame.model.given
    dense = finite.get(("", given))
    lines = finite.unstack("label", sort=False).drop(index="", errors="ignore")
    lines = lines.dropna(axis="columns", how="all")
    if lines.empty:
        return None
    if dense is not None:
        lines.insert(0, given, dense)
    return draw_lines(f"Perplexity on {named(score.of)}, by sparsity.", lines, colors, score)


def _loss_part(model: ModelRuns, colors: _Colors) -> Part | None:
    """Return losses by block, and the largest ones of a single group; `None` without losses."""
    rows = [
        (group.setting, group.label, layer.block or "others", layer.name, layer.relative_loss)
        for group in model.originals
        for run in group.runs
        for layer in run.pruned_layers
        if layer.relative_loss is not None
    ]
    if not rows:
        return None
    losses = pd.DataFrame(rows, columns=["setting", "label", "block", "name", "loss"])
    means = losses.groupby(["setting", "block", "label"], sort=False)["loss"].mean()
    pictures = []
    for setting, of_setting in means.groupby(level="setting", sort=False):
        lines = of_setting.droplevel("setting").unstack("label", sort=False)
        if len(lines) > 1:
            caption = f"Relative loss, mean over the layers of a block, by block at {setting}."
            pictures.append(draw_lines(caption, lines, colors, RELATIVE_LOSS))
    if len(model.originals) > 1:
        return Part("Where it lost", _LOSS_TEXT, pictures=pictures) if pictures else None
    by_layer = losses.groupby("name")["loss"].mean()
    largest = by_layer.sort_values(ascending=False, kind="stable").head(_WORST)
    cells = [("", str(name), RELATIVE_LOSS.write(float(loss))) for name, loss in largest.items()]
    caption = f"The {len(cells)} of {len(by_layer)} layers that lost most"
    table = Table(caption, ("layer", "relative loss"), cells)
    return Part("Where it lost", _LOSS_TEXT, [table], pictures)


def _block_part(model: ModelRuns) -> Part | None:
    """Return the blocks of each group's first run; `None` without tuning or allocation."""
    rows = [
        (f"{group.setting}, {group.label}", block.name, {**vars(block), "name": None})
        for group in model.originals
        if (report := group.runs[0].report) is not None
        for block in report.blocks
    ]
    if not rows:
        return None
    table = _table("Blocks of the first run of each result", "block", rows, "result")
    return Part("Blocks", _ERROR_TEXT, [table], folded=True)


def _dense_part(model: ModelRuns) -> Part | None:
    """Return the layers that were left dense in any run, by reason and kind."""
    names: dict[tuple[str, str], set[str]] = {}
    for layer in (layer for group in model.originals for run in group.runs for layer in run.layers):
        if layer.skipped is not None:
            kind = (layer.skipped, without_numbers(layer.name))
            names.setdefault(kind, set()).add(layer.name)
    if not names:
        return None
    rows = [(*kind, str(len(layers))) for kind, layers in names.items()]
    table = Table("Layers that were left dense", ("layers", "number"), rows, "why")
    return Part("Left dense", tables=[table], folded=True)


def _settings_part(model: ModelRuns) -> Part:
    """Return the runs with their configuration, versions and layers."""
    rows = [
        (
            ", ".join(filter(None, [group.setting, group.label])),
            run.name,
            {"weight_bytes": run.weight_bytes, **(run.report.totals if run.report else {})},
        )
        for group in model.rows
        for run in group.runs
    ]
    folds = [Part(f"Runs ({len(model.runs)})", tables=[_table("Runs", "directory", rows)])]
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
    rows = []
    for layer in sorted(run.layers, key=lambda layer: layer.skipped is not None):
        shown = asdict(layer) | {"shape": " × ".join(map(str, layer.shape))}
        shown |= dict.fromkeys(("name", "method", "skipped", "block"))
        for part in ("grid", "target", "zeros"):
            shown |= {f"{part}_{key}": value for key, value in (shown.pop(part) or {}).items()}
        rows.append(("" if layer.skipped is None else "left dense", layer.name, shown))
    return _table(f"Layers of {run.name}", "layer", rows)


def _table(
    caption: str,
    head: str,
    rows: Sequence[tuple[str, str, Mapping[str, Any]]],
    group: str = "sparsity",
) -> Table:
    """Return a table of rows (group, name, values by key), without empty columns."""
    values = pd.DataFrame([row[2] for row in rows], dtype=object)  # whole numbers stay whole
    values = values.dropna(axis="columns", how="all")
    cells = [
        (of, name, *map(_written, values, line))
        for (of, name, _), line in zip(rows, values.to_numpy(), strict=True)
    ]
    return Table(caption, (head, *(key.replace("_", " ") for key in values)), cells, group)


def _written(key: str, value: Any) -> str:
    """Format a value of a report."""
    if pd.isna(value):
        return MISSING
    kinds = {int: numbers.count, float: numbers.number}
    return (_WRITE.get(key) or kinds.get(type(value), str))(value)


def _read(name: str) -> str:
    """Return the text of a file of this package, a template or a style sheet."""
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def notes(model: ModelRuns) -> list[Note]:
    """Return the notes on the runs of a model; a note on several runs is listed once."""
    runs: dict[str, list[str]] = {}
    for run in model.runs:
        for text in _notes_on(run):
            runs.setdefault(text, []).append(run.name)
    return [Note(text, names) for text, names in runs.items()]


def _notes_on(run: RunDirectory) -> Iterator[str]:
    """Yield what weakens the result of a run; the table of its layers has the amounts."""
    layers, tolerance = run.pruned_layers, run.config.get("tolerance")
    if run.report is None:
        return
    if not run.complete:
        yield (
            f"Incomplete: the run ended after {len(layers)} pruned layers. "
            "All others were left as they were."
        )
    if zeros := run.report.totals.get("zeros_before"):
        yield f"{zeros:.0%} of the weights were zero before: losses are against them as they were."
    largest = tolerance if isinstance(tolerance, int | float) else inf
    near = f"may be further from the optimal loss than the tolerance of {largest:g}"
    problems: dict[str, Callable[[LayerReport], object]] = {
        near: lambda x: (x.gap or 0) > largest,
        "had the pattern before": lambda x: x.zeros and x.zeros.had_pattern,
        "needed more damping than was asked for; more calibration tokens would help": (
            lambda x: x.raised_damping
        ),
        "have another mask than the method's, which lost more": lambda x: x.fallback_mask,
        "had input features that were always 0": lambda x: x.dead_inputs,
        "kept their own target": lambda x: x.target and x.target.own,
        "saw fewer tokens than they have input features; more calibration data would help": (
            lambda x: x.shared_hessian or (x.tokens is not None and x.tokens < x.shape[1])
        ),
    }
    for problem, has in problems.items():
        if number := sum(bool(has(layer)) for layer in layers):
            yield f"{number} of {len(layers)} layers {problem}."
