"""`mrp-lightning report RUN_DIR …`: one HTML page about runs, or all runs in directories."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mrp_lightning.commands.command import CommandParser
from mrp_lightning.environment import require_extra
from mrp_lightning.errors import counted
from mrp_lightning.storage.files import check_output_file, save_ours


def main(args: Sequence[str]) -> None:
    """Write the page, and print its path.

    Raises:
        FileExistsError: `--out` is a directory, or a file that this package did not write or that
            was changed, and `--overwrite` is not given. `find_runs` raises more.
    """
    options = _parser().parse_args(args)
    require_extra("report", "`report`")
    # Imported late, since help and mistakes need not wait for torch.
    from mrp_lightning.experiments.runs import common_parent, find_runs

    runs = find_runs(*options.run_dir)
    root = common_parent(options.run_dir)
    out = options.out or root / "report.html"
    from mrp_lightning.experiments.page import make_page

    if not options.overwrite or out.is_dir():
        check_output_file(out, "--out", "allow it to be replaced with --overwrite")
    command = shlex.join(["mrp-lightning", "report", *args])
    save_ours(out, make_page(runs, root.resolve().name, options.title, command=command))
    sys.stdout.write(f"{counted(len(runs), 'run')}: {out}\n")


def _parser() -> Any:
    parser = CommandParser(
        "mrp-lightning report",
        "Write one HTML page, which needs no other file, about the runs in a directory "
        "and beneath it: pruning_report.json, evaluation.json.",
    )
    parser.add_argument(
        "run_dir",
        metavar="RUN_DIR",
        type=Path,
        nargs="+",
        help="a run, or a directory of many",
    )
    text = "the page (default: report.html in RUN_DIR, or in the directory that holds all of them)"
    parser.add_argument("--out", type=Path, help=text)
    parser.add_argument("--title", help="its heading")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace --out even if it is no report"
    )
    return parser
