"""Models of published shapes, measured one after the other."""

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from export.backends.apply import check_backend
from export.speed.comparison import compare
from export.speed.options import SpeedOptions
from export.speed.random_models import prunable, random_model
from export.speed.tables import SpeedReport, tables
from export.speed.twins import packed_copy
from mrp_lightning.errors import OptionError

log = logging.getLogger(__name__)


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
