"""The page: one file that needs no other, no script and no network."""

import base64
import io
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from mrp_lightning.environment import __version__
from mrp_lightning.experiments.page import headline, palette, quantities
from mrp_lightning.experiments.page.details import dense_layers, settings
from mrp_lightning.experiments.page.drawing import Drawing
from mrp_lightning.experiments.page.layer_parts import layer_loss, sparsity, time_and_memory
from mrp_lightning.experiments.page.models import Model, find_models
from mrp_lightning.experiments.page.notes import Note, left_dense, notes
from mrp_lightning.experiments.page.parts import Names, Part
from mrp_lightning.experiments.page.results import results, zero_shot
from mrp_lightning.experiments.page.runs import Run
from mrp_lightning.experiments.page.scores import task_metrics, texts

GENERATOR = "mrp-lightning report"
"""Marks a page as one that may be written again."""


@dataclass(frozen=True)
class Section:
    """What the page says about a model."""

    id: str
    title: str
    headline: Sequence[headline.Figure]
    notes: Sequence[Note]
    parts: Sequence[Part]
    num_runs: int


@dataclass(frozen=True)
class Page:
    """A page and its drawings.

    Attributes:
        html: All of it.
        drawings: Those in it.
    """

    html: str
    drawings: Sequence[Drawing]


def make_page(runs: Sequence[Run], name: str, title: str | None = None) -> Page:
    """The page about runs.

    Args:
        runs: At least one.
        name: What the runs are called together.
        title: The heading; made from what was found if not given.
    """
    models = find_models(runs)
    slots = palette.slots(v.method for model in models for v in model.variants)
    ids = Names()
    sections = []
    for model in models:
        id_ = ids("model", model.name)
        names = Names(id_.removeprefix("model-") if len(models) > 1 else "")
        sections.append(
            Section(
                id=id_,
                title=headline.title(model),
                headline=headline.headline(model),
                notes=notes(model),
                parts=_parts(model, slots, names),
                num_runs=len(model.runs),
            )
        )
    alone = sections[0].title if len(sections) == 1 else f"{name}: {len(models)} models"
    raw = _zipped(runs)
    html = (
        _environment()
        .get_template("page.html")
        .render(
            title=title or alone,
            subtitle=_subtitle(runs, models),
            models=sections,
            generator=GENERATOR,
            version=__version__,
            colors=_colors(),
            css=_read("style.css"),
            raw=base64.b64encode(raw).decode(),
            raw_name=f"{Names()(name)}.zip",
            raw_size=quantities.memory(len(raw)),
            num_files=sum(len(run.files) for run in runs),
        )
    )
    found = [d for s in sections for p in s.parts for d in _drawings(p)]
    return Page(html, found)


def _parts(model: Model, slots: Mapping[str, int], names: Names) -> list[Part]:
    """All that have something to show."""
    found = [results(model, slots, names)] if model.variants or texts(model) else []
    if task_metrics(model):
        found.append(zero_shot(model, slots, names))
    if model.variants:
        found.append(layer_loss(model, slots, names))
        found.append(sparsity(model, names))
        found.append(time_and_memory(model, slots, names))
    if dense := left_dense(model):
        found.append(dense_layers(dense))
    return [*found, settings(model, slots)]


def _drawings(part: Part) -> list[Drawing]:
    return [
        *(d for row in part.drawings for d in row),
        *(d for fold in part.folds for d in fold.drawings),
    ]


def _subtitle(runs: Sequence[Run], models: Sequence[Model]) -> str:
    pruned = [run for run in runs if run.pruning]
    if len(pruned) < 2:
        return ""
    if len(models) > 1:
        return f"{len(pruned)} runs of {len(models)} models."
    largest = max((run.totals for run in pruned), key=lambda totals: totals["weights"])
    return (
        f"{len(pruned)} runs on {largest['layers']:,} layers with {largest['weights']:,} weights."
    )


def _zipped(runs: Sequence[Run]) -> bytes:
    """The files as they were read, the same bytes for the same files."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for run in runs:
            for name, content in run.files.items():
                where = run.name.removeprefix("../")
                entry = zipfile.ZipInfo(f"{where}/{name}")  # without a date
                archive.writestr(entry, content, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def _colors() -> str:
    def block(tone: str) -> str:
        found = (f"--{role}:{getattr(both, tone)}" for role, both in palette.ROLES.items())
        return f":root{{{';'.join(found)}}}"

    return f"{block('light')}\n@media (prefers-color-scheme: dark){{{block('dark')}}}"


def _environment() -> Environment:
    environment = Environment(
        loader=FunctionLoader(_read), autoescape=True, undefined=StrictUndefined
    )
    environment.filters["breakable"] = _breakable
    return environment


def _breakable(name: str) -> Markup:
    """A name that may be broken after its dots."""
    return Markup(".<wbr>").join(name.split("."))


def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")
