"""The page: one file that needs no other, no script and no network."""

import base64
import io
import itertools
import re
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from mrp_lightning.environment import __version__
from mrp_lightning.experiments import numbers
from mrp_lightning.experiments.page import headline
from mrp_lightning.experiments.page.blocks import block_part
from mrp_lightning.experiments.page.details import dense_layers, settings
from mrp_lightning.experiments.page.drawing import Picture, color_of
from mrp_lightning.experiments.page.layer_parts import LayerParts
from mrp_lightning.experiments.page.models import Model, find_models
from mrp_lightning.experiments.page.notes import Note, notes
from mrp_lightning.experiments.page.parts import Part
from mrp_lightning.experiments.page.results import continuations, results, zero_shot
from mrp_lightning.experiments.runs import Run
from mrp_lightning.files import check_output_dir, save_directory, save_text

GENERATOR = "mrp-lightning report"
"""Marks a page as one that may be written again."""


@dataclass(frozen=True)
class Section:
    """What the page says about a model."""

    id: str
    title: str
    headline: Sequence[headline.Value]
    notes: Sequence[Note]
    parts: Sequence[Part]
    num_runs: int


@dataclass(frozen=True)
class Page:
    """A page and its pictures.

    Attributes:
        html: The whole page, which has the pictures in it.
        pictures: The pictures by the names of their PNG files, without the ending.
    """

    html: str
    pictures: Mapping[str, Picture]


def make_page(
    runs: Sequence[Run], name: str, title: str | None = None, *, command: str = ""
) -> Page:
    """The page about runs.

    Args:
        runs: At least one run.
        name: What the runs are called together.
        title: The heading; made from what was found if not given.
        command: The command line that makes the page again.
    """
    models = find_models(runs)
    ids = _unique([model.name for model in models])
    sections = [
        Section(
            id=f"model-{id_}",
            title=headline.title(model),
            headline=headline.headline(model),
            notes=notes(model),
            parts=_parts(model),
            num_runs=len(model.runs),
        )
        for id_, model in zip(ids, models, strict=True)
    ]
    prefixes = [f"{id_}-" if len(models) > 1 else "" for id_ in ids]
    pictures = [
        (f"{prefix}{picture.name}", picture)
        for prefix, section in zip(prefixes, sections, strict=True)
        for part in section.parts
        for picture in part.all_pictures
    ]
    names = _unique([name for name, _ in pictures])
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
            command=command,
            css=_read("style.css"),
            raw=raw,
            raw_name=f"{_slug(name)}.zip",
            raw_size=numbers.memory(len(raw)),
            num_files=sum(len(run.files) for run in runs),
        )
    )
    return Page(html, dict(zip(names, (picture for _, picture in pictures), strict=True)))


def check_out(out: Path, *, overwrite: bool = False) -> None:
    """Refuse to replace what this command did not write.

    Raises:
        FileExistsError: `out` is a directory, or a file that is no report; or its pictures would
            replace a directory with other files.
    """
    if out.is_dir():
        raise FileExistsError(f"`--out`: expected a file, but {out} is a directory.")
    check_output_dir(pictures_directory(out), overwrite=True, argument="--out", ours=["*.png"])
    if overwrite or not out.exists():
        return
    if GENERATOR not in out.read_bytes()[:2000].decode("utf-8", "replace"):
        raise FileExistsError(
            f"`--out`: {out} exists and is no report. Name another file, or allow it to be "
            "replaced with --overwrite."
        )


def pictures_directory(out: Path) -> Path:
    """Where the PNG files of a page are."""
    return out.with_name(f"{out.stem}-figures")


def write_page(page: Page, out: Path, *, overwrite: bool = False) -> None:
    """Write a page and, beside it, its pictures as PNG files.

    Raises:
        FileExistsError: See `check_out`.
    """
    check_out(out, overwrite=overwrite)
    pictures = pictures_directory(out)
    if page.pictures:
        with save_directory(pictures, overwrite=True, argument="--out", ours=["*.png"]) as staging:
            for name, picture in page.pictures.items():
                (staging / f"{name}.png").write_bytes(picture.png)
    elif pictures.exists():
        shutil.rmtree(pictures)
    save_text(out, page.html)


def _parts(model: Model) -> list[Part]:
    """All parts that have something to show."""
    measured = model.variants or any(run.evaluation.perplexity for run in model.runs)
    found = [results(model) if measured else None, zero_shot(model), continuations(model)]
    if model.variants:
        found += [block_part(model), *LayerParts(model).parts()]
    found += [dense_layers(model), settings(model)]
    return [part for part in found if part]


def _subtitle(runs: Sequence[Run], models: Sequence[Model]) -> str:
    pruned = [run.report for run in runs if run.report]
    if len(pruned) < 2:
        return ""
    if len(models) > 1:
        return f"{len(pruned)} runs of {len(models)} models."
    largest = max((report.totals for report in pruned), key=lambda totals: totals["weights"])
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


def _slug(name: str) -> str:
    """A name as letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower().replace(":", "of")).strip("-") or "picture"


def _unique(names: Sequence[str]) -> list[str]:
    """Slugs of names, numbered from the second on where several are the same."""
    given: list[str] = []
    for slug in map(_slug, names):
        tries = (slug if i == 1 else f"{slug}-{i}" for i in itertools.count(1))
        given.append(next(name for name in tries if name not in given))
    return given


def _environment() -> Environment:
    environment = Environment(
        loader=FunctionLoader(_read), autoescape=True, undefined=StrictUndefined
    )
    environment.filters["breakable"] = _breakable
    environment.filters["color"] = color_of
    environment.filters["base64"] = lambda content: base64.b64encode(content).decode()
    return environment


def _breakable(name: str) -> Markup:
    """A name that may be broken after its dots."""
    return Markup(".<wbr>").join(name.split("."))


def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")
