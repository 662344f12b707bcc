"""The page: one HTML file that needs no other, no script and no network, or one in Markdown."""

import io
import itertools
import re
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from mrp_lightning.environment import __version__
from mrp_lightning.experiments import numbers
from mrp_lightning.experiments.models import Model, find_models
from mrp_lightning.experiments.page import headline
from mrp_lightning.experiments.page.claims import claims_part
from mrp_lightning.experiments.page.details import dense_part, settings_part
from mrp_lightning.experiments.page.drawing import PAPER, color_of
from mrp_lightning.experiments.page.layers import Layers
from mrp_lightning.experiments.page.notes import notes
from mrp_lightning.experiments.page.outcomes import (
    continuations_part,
    results_part,
    zero_shot_part,
)
from mrp_lightning.experiments.page.parts import Part, Picture
from mrp_lightning.experiments.page.peers import NO_PEERS, Peers
from mrp_lightning.experiments.page.render import read_template, render
from mrp_lightning.experiments.page.steps import next_part
from mrp_lightning.experiments.page.texts import texts_part
from mrp_lightning.experiments.page.weights import weights_part
from mrp_lightning.experiments.runs import Run
from mrp_lightning.files import check_output_file, save_ours
from mrp_lightning.outputs import check_output_dir, save_directory

GENERATOR = "mrp-lightning report"
"""Marks a page as one that may be written again."""


class Page(NamedTuple):
    """The whole page, which has the pictures in it, and these by the names of their PNG files."""

    html: str
    pictures: dict[str, Picture]


def parts_of(model: Model) -> list[Part]:
    """All parts that have something to show: what changed, where it lost, what next, the rest."""
    layers = Layers(model) if model.results else None
    found = [results_part(model), texts_part(model), zero_shot_part(model)]
    found += [layers.loss_part()] if layers else []
    found += [next_part(model), continuations_part(model)]
    found += layers.parts() if layers else []
    found += [weights_part(model), dense_part(model), settings_part(model)]
    return [part for part in found if part]


def brief_parts_of(model: Model, peers: Peers, *, continuations: bool) -> list[Part]:
    """The parts that compare what comes out, for a page of many runs."""
    found = [results_part(model, peers), texts_part(model), zero_shot_part(model)]
    layers = Layers(model) if model.results else None
    found += [layers.block_part()] if layers and len(layers.of_blocks) else []
    found += [continuations_part(model)] if continuations else []
    return [part for part in found if part]


def make_page(
    runs: Sequence[Run], name: str, title: str | None = None, *, command: str = ""
) -> Page:
    """The HTML page about runs that are called `name` together, made again by `command`.

    A title that is not given is made from what was found.
    """
    models = find_models(runs)
    sections: list[dict[str, Any]] = [
        {
            "id": f"model-{id_}",
            "title": headline.title(model),
            "headline": list(headline.headline(model)),
            "notes": notes(model),
            "parts": parts_of(model),
            "num_runs": len(model.runs),
        }
        for id_, model in zip(_unique([model.name for model in models]), models, strict=True)
    ]
    pictures = _named(
        {model: section["parts"] for model, section in zip(models, sections, strict=True)}
    )
    alone = sections[0]["title"] if len(sections) == 1 else f"{name}: {len(models)} models"
    raw = _zipped(runs)
    html = render(
        "page.html",
        title=title or alone,
        subtitle=_subtitle(runs, models),
        parts=claims_part(models),
        sections=sections,
        generator=GENERATOR,
        version=__version__,
        command=command,
        color=color_of,
        css=read_template("style.css"),
        raw=raw,
        raw_name=f"{_slug(name)}.zip",
        raw_size=numbers.memory(len(raw)),
        num_files=sum(len(run.files) for run in runs),
    )
    return Page(html, pictures)


def check_out(out: Path, *, overwrite: bool = False) -> None:
    """Refuse to replace what this command did not write.

    Raises:
        FileExistsError: `out` is a directory, or a file that this did not write or that was
            changed since; or its pictures would replace a directory with such files.
    """
    check_output_dir(pictures_directory(out), overwrite=True, argument="--out")
    if not overwrite or out.is_dir():
        check_output_file(out, "--out", "allow it to be replaced with --overwrite")


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
        with save_directory(pictures, overwrite=True, argument="--out") as staging:
            for name, picture in page.pictures.items():
                (staging / f"{name}.png").write_bytes(picture.png)
    elif pictures.exists():
        shutil.rmtree(pictures)
    save_ours(out, page.html)


def check_markdown(path: Path) -> None:
    """Refuse to replace a page, or pictures beside it, that no sweep wrote or that were changed.

    Raises:
        FileExistsError: They are named.
    """
    check_output_file(path, "page")
    check_output_dir(path.with_suffix(""), overwrite=True, argument="page")


def write_markdown(
    path: Path,
    runs: Sequence[Run],
    *,
    title: str,
    description: str,
    command: str,
    remarks: str = "",
    continuations: bool = False,
    peers: Peers = NO_PEERS,
) -> None:
    """Write a page about the runs of a sweep in Markdown, made again by `command`.

    Its pictures lie in the directory of its name. It shows what the models write only if asked.
    `peers` are what other codes give, and `remarks` stand at its end.
    """
    models = find_models(runs)
    parts = {m: brief_parts_of(m, peers, continuations=continuations) for m in models}
    finished = [run.finished for run in runs if run.finished]
    seeds = len({found.trial.seed for found in finished} - {None})
    spread = f"mean ± standard deviation over {seeds} calibration sets; " if seeds > 1 else ""
    facts = (
        f"{' / '.join(dict.fromkeys(found.machine for found in finished))}. "
        f"Perplexity @ the context in tokens; {spread}"
        "relative loss is the mean over layers of ‖δx‖² / ‖wx‖²; seconds are those of the pruning."
    )
    check_markdown(path)
    directory, files = path.with_suffix(""), {}
    with save_directory(directory, overwrite=True, argument="page") as staging:
        for name, picture in _named(parts, always=True).items():
            files[id(picture)] = quote(f"{directory.name}/{name}.svg")
            paper = f'\\1<rect width="100%" height="100%" fill="{PAPER}"/>'
            drawn = re.sub("(<svg[^>]*>)", paper, picture.svg.decode(), count=1)
            (staging / f"{name}.svg").write_text(drawn, encoding="utf-8")
    text = render(
        "page.md",
        title=title,
        head=[*([description.strip()] if description else []), f"```\n{command}\n```", facts],
        parts=claims_part(models),
        sections=[{"title": model.name, "parts": found} for model, found in parts.items()],
        remarks=remarks.strip(),
        source=lambda picture: files[id(picture)],
    )
    save_ours(path, text)


def _named(found: Mapping[Model, Sequence[Part]], *, always: bool = False) -> dict[str, Picture]:
    """Pictures by the names of their files, which begin with the model where there are several."""
    several = always or len(found) > 1
    pictures = [
        (f"{model.name}-{picture.name}" if several else picture.name, picture)
        for model, parts in found.items()
        for part in parts
        for picture in part.all_pictures
    ]
    names = _unique([name for name, _ in pictures])
    return dict(zip(names, (picture for _, picture in pictures), strict=True))


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
