"""How fast a pruned model is: the same weights packed and stored dense, on a CUDA device.

    python -m export.benchmark --shape llama3-8b llama2-7b opt-6.7b --out docs/benchmarks/export

A shape is filled with random 2:4 weights: speed does not depend on what the weights mean. What is
measured is written as it comes; what fails is listed with its reason.
"""

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from export.backends.apply import check_backend
from export.speed.comparison import compare
from export.speed.options import LAYER_TOKENS, SpeedOptions, add_arguments
from export.speed.random_models import SHAPES, prunable, random_model
from export.speed.tables import SpeedReport, tables
from export.speed.twins import packed_copy
from mrp_lightning.cli.command import make_parser, number_from, told
from mrp_lightning.errors import OptionError

log = logging.getLogger(__name__)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line. Status 1: a shape could not be measured to its end."""
    with told():
        parsed = _parser().parse_args(args)
        measure_shapes(parsed.shape, SpeedOptions.of(parsed), parsed.dtype, parsed.out)


def measure_shapes(
    shapes: Sequence[str],
    options: SpeedOptions,
    dtype: str = "bfloat16",
    out: str | os.PathLike[str] | None = None,
) -> None:
    """Measure shapes one after the other, and print what was found.

    Args:
        shapes: Keys of `SHAPES`.
        options: What to measure.
        dtype: Dtype of the weights, `bfloat16` or `float16`.
        out: Directory for SHAPE-BACKEND.md and .json, which grow as it runs; `None` writes none.

    Raises:
        OptionError: There is no CUDA device, or the back-end cannot run on it.
        SystemExit: With status 1 and their names if shapes could not be measured to their end.
    """
    if not torch.cuda.is_available():
        raise OptionError("speed is measured on a CUDA device, and this machine has none.")
    device = torch.device("cuda", torch.cuda.current_device())
    check_backend(options.backend, device)
    failed = []
    for shape in shapes:
        sys.stdout.write(f"## {shape}, {options.backend}\n\n")
        path = None if out is None else Path(out, f"{shape}-{options.backend}")
        try:
            report = _measure(shape, getattr(torch, dtype), device, options, path)
        except Exception:  # the shapes that follow may fit where this one did not
            log.exception("%s was not measured to its end.", shape)
            failed.append(shape)
        else:
            sys.stdout.write(f"{tables(report)}\n")
        sys.stdout.flush()
    if failed:
        raise SystemExit(f"not measured to the end: {', '.join(failed)}")


def _measure(
    shape: str, dtype: torch.dtype, device: torch.device, options: SpeedOptions, path: Path | None
) -> SpeedReport:
    """Measure one shape, and save the report as it grows."""

    def save(report: SpeedReport) -> None:
        if path is not None:
            report.save(path)

    model = random_model(shape, dtype, device)
    sparse = packed_copy(model, prunable(model))
    del model
    report = compare(sparse, options, report_on=save)
    save(report)
    return report


def _parser() -> Any:
    parser = make_parser("python -m export.benchmark", str(__doc__))
    option = parser.add_argument
    option("--shape", choices=SHAPES, nargs="+", required=True)
    add_arguments(parser, batch_sizes=[1])
    what = "time every kernel on each layer shape at so many tokens; no number: only the models"
    tokens = {"type": number_from(1), "nargs": "*", "default": [*LAYER_TOKENS]}
    option("--layer-tokens", **tokens, metavar="N", help=what)
    option("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    option("--out", metavar="DIR", help="write SHAPE-BACKEND.md and .json there as it runs")
    return parser


if __name__ == "__main__":
    main()
