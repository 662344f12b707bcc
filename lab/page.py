"""The pages of lab/results/ about sweeps, made from the runs that a sweep has made.

    python lab/page.py --config lab/pages/results.yaml
    python lab/page.py --sweep '[configs/paper/mamba.yaml]' --out runs/mamba.md

A page has parts that a report lacks: the paper's values and claims, the results of other codes, the
perplexities of models on texts other than their calibration text, and continuations of texts.
"""

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

sys.path.insert(0, str(Path(__file__).parent))

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from pages.claims import claims_part
from pages.parts import continuations_part, results_part, zero_shot_part
from pages.peers import NO_PEERS, Peers, read_peers
from pages.texts import texts_part
from pages.weights import weights_part

from mrp_lightning.commands.parser import Parser
from mrp_lightning.experiments import page as report
from mrp_lightning.experiments.groups import ModelRuns, find_models
from mrp_lightning.experiments.layers import Layers
from mrp_lightning.experiments.pictures import PAPER, Part, Picture
from mrp_lightning.experiments.running import comparable_runs
from mrp_lightning.experiments.runs import RunDirectory
from mrp_lightning.experiments.scores import ScoreFrame, Table, markdown
from mrp_lightning.experiments.sweep_command import read_sweep
from mrp_lightning.storage.files import check_output_file, save_ours
from mrp_lightning.storage.outputs import check_output_dir, save_directory
from mrp_lightning.terminal import Console


@dataclass(kw_only=True)
class DocsPage:
    """A page in Markdown about the runs of a sweep, with its pictures in a directory of its name.

    Args:
        sweep: Configurations of the sweep, as `mrp-lightning sweep --config` takes them.
        out: The Markdown file.
        title: Its title.
        description: The text at its beginning.
        remarks: The text after the results, with headings of its own.
        peers: A Markdown file with a table of the results of other codes, with the columns `model`,
            `sparsity`, `code` and `perplexity`: lines in the pictures.
        continuations: Whether to show the models' continuations of the first words of each text.
        weights: Whether to show a histogram of the kept weights, for models on disk.
    """

    sweep: list[str]
    out: str
    title: str = "Results"
    description: str = ""
    remarks: str = ""
    peers: str | None = None
    continuations: bool = False
    weights: bool = False
    command: str = field(init=False)

    def __post_init__(self) -> None:
        configs = [f"--config {shlex.quote(path)}" for path in self.sweep]
        self.command = " ".join(["python -m mrp_lightning sweep", *configs])


def main(args: Sequence[str]) -> None:
    """Write the page of a configuration."""
    parser = Parser(prog="python lab/page.py", description=str(__doc__))
    parser.add_argument("--config", action="config", help="YAML of a page; may be repeated.")
    parser.add_class_arguments(DocsPage)
    options = vars(parser.instantiate(parser.parse_args(list(args))))
    page = DocsPage(**{key: value for key, value in options.items() if key != "config"})
    check_markdown(Path(page.out))
    sweep = read_sweep([f"--config={path}" for path in page.sweep])
    runs = comparable_runs(sweep, Console())
    if not runs:
        raise SystemExit(f"error: `sweep`: {sweep.out} holds no finished runs. Run: {page.command}")
    write_markdown(page, runs)
    print(f"{len(runs)} of {len(sweep.trials)} runs: {page.out}")


def check_markdown(path: Path) -> None:
    """Raise if a page or pictures would be replaced that are not ours or were changed."""
    check_output_file(path, "--out")
    check_output_dir(path.with_suffix(""), overwrite=True, argument="--out")


def write_markdown(page: DocsPage, runs: Sequence[RunDirectory]) -> None:
    """Write a page about runs, with its pictures in the directory of its name."""
    models = find_models(runs)
    peers = read_peers(Path(page.peers)) if page.peers else NO_PEERS
    parts = {model: parts_of(model, page, peers) for model in models}
    path, files = Path(page.out), {}
    with save_directory(path.with_suffix(""), overwrite=True, argument="--out") as staging:
        for name, picture in report.named_pictures(parts, by_model=True).items():
            files[id(picture)] = quote(f"{path.stem}/{name}.svg")
            (staging / f"{name}.svg").write_text(on_paper(picture), encoding="utf-8")
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("pages")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["markdown"] = in_markdown
    text = environment.get_template("page.md").render(
        title=page.title,
        head=[*filter(None, [page.description.strip()]), f"```\n{page.command}\n```", facts(runs)],
        parts=claims_part(models),
        sections=[{"title": model.name, "parts": of} for model, of in parts.items()],
        remarks=page.remarks.strip(),
        source=lambda picture: files[id(picture)],
    )
    save_ours(path, text)


def parts_of(model: ModelRuns, page: DocsPage, peers: Peers) -> list[Part]:
    """Return the parts about one model that have something to show."""
    frame = ScoreFrame(model)
    parts = [results_part(frame, peers), texts_part(frame)]
    parts += [zero_shot_part(frame, report.zero_shot_part(frame))]
    parts += [Layers(model).block_part()] if model.groups else []
    parts += [continuations_part(model)] if page.continuations else []
    parts += [weights_part(model)] if page.weights else []
    return [part for part in parts if part]


def facts(runs: Sequence[RunDirectory]) -> str:
    """Return the machines, and how numbers are to be read."""
    finished = [run.finished for run in runs if run.finished]
    seeds = len({of.trial.seed for of in finished} - {None})
    spread = f"mean ± standard deviation over {seeds} calibration sets; " if seeds > 1 else ""
    return (
        f"{' / '.join(dict.fromkeys(of.machine for of in finished))}. "
        f"Perplexity @ the context in tokens; {spread}"
        "relative loss is the mean over layers of ‖δx‖² / ‖wx‖²; "
        "CPU seconds are those of the pruning."
    )


def on_paper(picture: Picture) -> str:
    """Return the SVG of a picture with a background."""
    paper = f'\\1<rect width="100%" height="100%" fill="{PAPER}"/>'
    return re.sub("(<svg[^>]*>)", paper, picture.svg.decode(), count=1)


def in_markdown(table: Table) -> str:
    """Return a table in Markdown; one of prose is a block of code, which may hold anything."""
    if table.kind != "prose":
        return markdown(table)
    texts = "\n".join(
        f"{f'{group} {name}'.strip()}:\n" + _indented(cells[0][0].strip("\n"))
        for group, rows in table.groups()
        for name, cells in rows
    )
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", texts)), default=0))
    return f"{fence}text\n{texts}\n{fence}\n"


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" if line else "" for line in text.split("\n"))


if __name__ == "__main__":
    main(sys.argv[1:])
