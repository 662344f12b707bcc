"""The HTML page about runs: one self-contained file, without scripts and network access."""

import base64
import itertools
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib import resources
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pandas as pd
from jinja2 import Environment, FunctionLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from mrp_lightning.commands import numbers
from mrp_lightning.commands.numbers import MISSING, Write
from mrp_lightning.environment import __version__
from mrp_lightning.experiments.groups import ModelRuns, RunGroup, find_models, plain
from mrp_lightning.experiments.layers import block_part, loss_part
from mrp_lightning.experiments.notes import notes
from mrp_lightning.experiments.pictures import Part, Picture, Scale, color_of, draw_lines
from mrp_lightning.experiments.runs import RunDirectory
from mrp_lightning.experiments.scores import (
    RELATIVE_LOSS,
    SECONDS,
    Score,
    ScoreFrame,
    Table,
    named,
    results_table,
    zero_shot_table,
)
from mrp_lightning.storage.files import check_output_file, save_ours
from mrp_lightning.storage.outputs import check_output_dir, save_directory
from mrp_lightning.targets.blocks import without_numbers

_LAYER_ROWS = 2000
"""The largest number of layer rows on a page; with more, layers are not listed."""

_FEW_TOKENS = 4  # tokens per input feature below which a note advises more
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


class Page(NamedTuple):
    """The HTML of a page, and its pictures by the names of their PNG files."""

    html: str
    pictures: dict[str, Picture]


class _HeadValue(NamedTuple):
    """A value at the head of a page: its label, and how it was measured."""

    label: str
    value: str
    detail: str


class _NextStep(NamedTuple):
    """A recommendation, and the command that follows it."""

    text: str
    command: str = ""


def make_page(
    runs: Sequence[RunDirectory], name: str, title: str | None = None, *, command: str = ""
) -> Page:
    """Return the HTML page about runs.

    Args:
        runs: The runs, at least one.
        name: The name in the default title of several models.
        title: The title; by default it names the model, the sparsities and the methods.
        command: The command that makes the page again, which the page shows.
    """
    models = find_models(runs)
    sections: list[dict[str, Any]] = []
    for id_, model in zip(_unique([model.name for model in models]), models, strict=True):
        frame = ScoreFrame(model)
        sections.append(
            {
                "id": f"model-{id_}",
                "model": model,
                "title": _title_of(model),
                "headline": list(headline(frame)),
                "notes": notes(model),
                "parts": parts_of(frame),
                "steps": list(_next_steps(frame)),
            }
        )
    default_title = sections[0]["title"] if len(sections) == 1 else f"{name}: {len(models)} models"
    # Undefined names raise and values are escaped: names of layers and paths are the user's, and a
    # page may be published.
    environment = Environment(
        loader=FunctionLoader(_read), autoescape=select_autoescape(), undefined=StrictUndefined
    )
    environment.filters["base64"] = lambda content: base64.b64encode(content).decode()
    environment.filters["breakable"] = lambda name: Markup(".<wbr>").join(name.split("."))
    html = environment.get_template("page.html").render(
        title=title or default_title,
        sections=sections,
        version=__version__,
        command=command,
        color=color_of,
        css=_read("style.css"),
    )
    return Page(html, _named_pictures(sections))


def check_page(out: Path, *, overwrite: bool = False) -> None:
    """Raise if files would be replaced that this package did not write.

    With `overwrite`, the page may replace any file, but the pictures may not.

    Raises:
        FileExistsError: `out` is a directory, or a file that this package did not write or that was
            changed; or the pictures would replace a directory with such files.
        PermissionError: The directory of the pictures cannot be created or replaced.
    """
    check_output_dir(pictures_directory(out), overwrite=True, argument="--out")
    if not overwrite or out.is_dir():
        check_output_file(out, "--out", "allow it to be replaced with --overwrite")


def pictures_directory(out: Path) -> Path:
    """Return the directory of the PNG files of a page."""
    return out.with_name(f"{out.stem}-figures")


def write_page(page: Page, out: Path, *, overwrite: bool = False) -> None:
    """Write a page and its pictures as PNG files, in place of all earlier pictures.

    Raises:
        FileExistsError: See `check_page`.
    """
    # Both outputs are checked before either is written, and the page is written last: it is there
    # only if its pictures are.
    check_page(out, overwrite=overwrite)
    pictures = pictures_directory(out)
    if page.pictures:
        with save_directory(pictures, overwrite=True, argument="--out") as staging:
            for name, picture in page.pictures.items():
                (staging / f"{name}.png").write_bytes(picture.png)
    elif pictures.exists():
        shutil.rmtree(pictures)
    save_ours(out, page.html)


def _named_pictures(sections: Sequence[Mapping[str, Any]]) -> dict[str, Picture]:
    """Return pictures by the names of their files, which begin with the model's if several are."""
    pictures = [
        (f"{section['model'].name}-{picture.name}" if len(sections) > 1 else picture.name, picture)
        for section in sections
        for part in section["parts"]
        for picture in part.pictures
    ]
    names = _unique([name for name, _ in pictures])
    return dict(zip(names, (picture for _, picture in pictures), strict=True))


def parts_of(frame: ScoreFrame) -> list[Part]:
    """Return the parts of a page that are not empty: scores, losses, the rest."""
    model = frame.model
    parts = [results_part(frame), zero_shot_part(frame), loss_part(model), block_part(model)]
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
    key = (groups[0].setting, groups[0].label) if groups else ("", "dense")
    for text in frame.scores:
        if text.is_perplexity and not pd.isna(frame.means.loc[key, text]):
            label = f"Perplexity on {named(text.of)}"
            if groups:
                yield _perplexity(frame, groups[0], text, label)
            else:
                yield _HeadValue(label, frame.texts.loc[key, text], _measured(frame, text))
    if groups:
        yield from _costs(frame, groups[0])


def _perplexity(frame: ScoreFrame, group: RunGroup, text: Score, label: str) -> _HeadValue:
    pruned = float(frame.means.loc[(group.setting, group.label), text])
    dense = float(frame.means[text].get(("", "dense"), float("nan")))
    value = text.write(pruned)
    details = []
    if isfinite(dense):
        value = f"{text.write(dense)} → {value}"
        change = numbers.signed(100 * (pruned / dense - 1), "{:.1f}%".format)
        details = [change] if isfinite(pruned) else []
    details += [f"mean of {len(group.runs)} runs"] if len(group.runs) > 1 else []
    return _HeadValue(label, value, ", ".join([*details, _measured(frame, text)]))


def _measured(frame: ScoreFrame, text: Score) -> str:
    context = f"context {text.context}, " if text.context else ""
    return context + frame.detail(text)


def _costs(frame: ScoreFrame, group: RunGroup) -> Iterator[_HeadValue]:
    report = group.runs[0].report
    assert report is not None  # groups consist of pruned runs
    totals, key = report.totals, (group.setting, group.label)
    loss = frame.texts.loc[key].get(RELATIVE_LOSS, MISSING) or MISSING
    yield _HeadValue("Relative layer loss", loss, f"mean over {totals['layers']} layers")
    removed = f"of {numbers.count(totals['weights'])} in the pruned layers"
    if of_all := totals.get("model_weights"):
        removed += f", {numbers.percent(totals['removed'] / of_all)} of all"
    removed += f"; {totals['skipped']} left dense" if totals["skipped"] else ""
    yield _HeadValue("Weights removed", numbers.percent(totals["sparsity"]), removed)
    if bits := report.config.get("bits"):
        lost, by_grid = report.losses
        share = f"{by_grid / lost:.0%} of the layers' loss is the grid's" if lost else ""
        yield _HeadValue("Bits of a kept weight", numbers.count(bits), share)
    for copy in frame.model.groups:
        exported = copy.runs[0].exported
        if sizes := [run.weight_bytes for run in copy.runs if run.weight_bytes]:
            label = f"Weight files, {exported}" if exported else "Weight files"
            detail = "" if exported else "with the removed weights as zeros"
            yield _HeadValue(label, numbers.memory(fmean(sizes)), detail)
    seconds = numbers.duration(float(frame.means.loc[key].get(SECONDS, 0.0)))
    yield _HeadValue("Time to prune", seconds, "with calibration, without writing files")


def results_part(frame: ScoreFrame) -> Part | None:
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
    scale, name = Scale(str(score), score.write, zero=False), str(score).partition(" @")[0]
    yield draw_lines(name, caption, lines, _methods(frame), scale, across="")


def zero_shot_part(frame: ScoreFrame) -> Part | None:
    """Return zero-shot results before and after pruning; `None` if there are none."""
    table = zero_shot_table(frame)
    if table is None:
        return None
    shares = [score for score in frame.scores if score.in_percent]
    pictures = []
    for setting in frame.model.by_setting(frame.model.groups):
        means = frame.means[shares].rename(columns=str)
        means = means[means.index.get_level_values("setting").isin(["", setting])]
        lines = means.droplevel("setting").T.dropna(how="all").dropna(axis=1, how="all")
        if set(lines) - {"dense"} and len(lines) > 1:
            caption = f"Zero-shot results at {setting}, in percent."
            scale = Scale("%", "{:.2f}".format, zero=False)
            axis = (_methods(frame), scale)
            pictures.append(draw_lines(f"zeroshot-{setting}", caption, lines, *axis, across=""))
    return Part("Zero-shot", "", [table], pictures)


def _methods(frame: ScoreFrame) -> dict[str, str | None]:
    return {group.label: group.method for group in frame.model.rows}


def _next_steps(frame: ScoreFrame) -> Iterator[_NextStep]:
    """Yield recommendations after a single result; none if several are compared."""
    model = frame.model
    if len(model.originals) != 1:
        return
    run = model.originals[0].runs[0]
    directory = shlex.quote(str(run.directory))
    if not run.complete:
        yield _NextStep("Run the same command again: it goes on at the block where this run ended.")
        return
    if not run.evaluation.perplexity:
        test = f"mrp-lightning test --model.model {directory}"
        yield _NextStep("Measure its perplexity on your text, which is kept beside it.", test)
    elif model.dense is None:
        source = shlex.quote(str(run.config.get("base_model") or "MODEL"))
        dense = shlex.quote(str(run.directory.parent / "dense"))
        save = f"--trainer.callbacks=callbacks.SaveEvaluation --trainer.callbacks.save_dir={dense}"
        test = f"mrp-lightning test --model.model {source} {save}"
        yield _NextStep("Measure the dense model, too, which this page then compares with.", test)
    # With fewer tokens than input features, H = 2·XᵀX / tokens has no full rank, and with few more
    # its small eigenvalues are noise. Experts with a shared Hessian have other tokens, too.
    tokens = {x: (x.tokens or 0) / x.shape[1] for x in run.pruned_layers if not x.shared_hessian}
    if tokens and 0 < (least := min(tokens.values())) < _FEW_TOKENS:
        layer = min(tokens, key=lambda layer: tokens[layer])
        yield _NextStep(
            f"Calibrate on more text (--num-samples): {layer.name} saw {least:.1f} tokens "
            "for each of its input features."
        )
    if run.config.get("target") != "dense" and not run.config.get("tuning"):
        yield _NextStep(
            "If it lost too much, aim at the dense model's outputs and tune each block. It takes "
            "several times as long, and fits the calibration text closely: give text like yours.",
            "mrp-lightning prune MODEL --recipe best …",
        )
    is_exported = any(copy.exported for other in model.groups for copy in other.runs)
    is_narrower = run.report is not None and bool(run.report.narrowed)
    if not (is_exported or is_narrower):  # a narrower model has no zeros to leave out
        pack = f"mrp-lightning export {directory}"
        yield _NextStep("Pack it: its files become smaller, and its layers faster to decode.", pack)


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


def _slug(name: str) -> str:
    """Return a name in letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower().replace(":", "of")).strip("-") or "picture"


def _unique(names: Sequence[str]) -> list[str]:
    """Return the slugs of names, numbered from the second on if several are equal."""
    unique: list[str] = []
    for slug in map(_slug, names):
        tries = (slug if i == 1 else f"{slug}-{i}" for i in itertools.count(1))
        unique.append(next(name for name in tries if name not in unique))
    return unique
