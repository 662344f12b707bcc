"""`mrp-lightning report RUN_DIR …`: one HTML page about runs, or all runs in directories."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mrp_lightning.commands.command import CommandParser
from mrp_lightning.environment import extra


def main(args: Sequence[str]) -> None:
    """Write the page, and print its path; errors are those of `find_runs` and `check_page`."""
    options = _parser().parse_args(args)
    # Imported late, since help and mistakes need not wait for torch.
    from mrp_lightning.experiments.runs import common_parent, find_runs

    runs = find_runs(*options.run_dir)
    root = common_parent(options.run_dir)
    directory = runs[0].directory if runs[0].unfinished else root
    out = options.out or directory / "report.html"
    with extra("report", "`report`"):
        from mrp_lightning.experiments import page as pages
    pages.check_page(out, overwrite=options.overwrite)
    command = shlex.join(["mrp-lightning", "report", *args])
    page = pages.make_page(runs, root.resolve().name, options.title, command=command)
    pages.write_page(page, out, overwrite=options.overwrite)
    where = f", pictures in {pages.pictures_directory(out)}" if page.pictures else ""
    num = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    sys.stdout.write(f"{num}: {out}{where}\n")


def _parser() -> Any:
    parser = CommandParser(
        "mrp-lightning report",
        "Write one HTML page, which needs no other file, about the runs in a directory "
        "and beneath it: pruning_report.json, evaluation.json. The pictures are written as PNG "
        "files beside it.",
    )
    parser.add_argument(
        "run_dir",
        metavar="RUN_DIR",
        type=Path,
        nargs="+",
        help="a run, or a directory of many; an unfinished one by where it will be",
    )
    text = "the page (default: report.html in RUN_DIR, or in the directory that holds all of them)"
    parser.add_argument("--out", type=Path, help=text)
    parser.add_argument("--title", help="its heading")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace --out even if it is no report"
    )
    return parser
