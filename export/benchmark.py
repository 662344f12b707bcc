"""How fast a pruned model is: the same weights packed and stored dense, on a CUDA device.

    python -m export.benchmark --shape llama3-8b llama2-7b opt-6.7b --out docs/benchmarks/export

A shape is filled with random 2:4 weights: speed does not depend on what the weights mean. What is
measured is written as it comes; what fails is listed with its reason.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from export.backends.apply import why_not_here
from export.speed.comparison import compare
from export.speed.options import LAYER_TOKENS, SpeedOptions, add_arguments, positive
from export.speed.random_models import SHAPES, prunable, random_model
from export.speed.tables import SpeedReport, tables
from export.speed.twins import packed_copy

log = logging.getLogger(__name__)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line. Status 1: a shape could not be measured to its end."""
    parser = _parser()
    parsed = parser.parse_args(args)
    if not torch.cuda.is_available():
        parser.error("speed is measured on a CUDA device, and this machine has none")
    device = torch.device("cuda", torch.cuda.current_device())
    if reason := why_not_here(parsed.backend, device):
        parser.error(f"--backend {parsed.backend} cannot run here: {reason}")
    options = SpeedOptions.of(parsed, layer_tokens=parsed.layer_tokens)
    dtype = getattr(torch, parsed.dtype)
    failed = []
    for shape in parsed.shape:
        path = parsed.out and parsed.out / f"{shape}-{options.backend}"
        sys.stdout.write(f"## {shape}, {options.backend}\n\n")
        try:
            report = measure_shape(shape, dtype, device, options, path)
        except Exception:  # the shapes that follow may fit where this one did not
            log.exception("%s was not measured to its end.", shape)
            failed.append(shape)
        else:
            sys.stdout.write(f"{tables(report)}\n")
        sys.stdout.flush()
    if failed:
        raise SystemExit(f"not measured to the end: {', '.join(failed)}")


def measure_shape(
    shape: str, dtype: torch.dtype, device: torch.device, options: SpeedOptions, path: Path | None
) -> SpeedReport:
    """Fill a published shape with random weights, and measure it.

    Args:
        shape: A key of `SHAPES`.
        dtype: Dtype of the weights.
        device: A CUDA device.
        options: What to measure.
        path: Where to write the report as it grows, without suffix; `None` writes none.
    """

    def save(report: SpeedReport) -> None:
        if path is not None:
            report.save(path)

    model = random_model(shape, dtype, device)
    sparse = packed_copy(model, prunable(model))
    del model
    report = compare(sparse, options, report_on=save)
    save(report)
    return report


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m export.benchmark",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", choices=SHAPES, nargs="+", required=True)
    add_arguments(parser, batch_sizes=[1])
    parser.add_argument(
        "--layer-tokens",
        type=positive,
        nargs="*",
        default=LAYER_TOKENS,
        metavar="N",
        help="time every kernel on each layer shape at so many tokens; no number: only the models",
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write SHAPE-BACKEND.md and .json there as it runs"
    )
    return parser


if __name__ == "__main__":
    main()
