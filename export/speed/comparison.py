"""A packed model against its dense twin: every kernel on its layers, then the whole models."""

import copy
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from export.backends.apply import apply, check_backend
from export.speed.model_timing import time_models
from export.speed.options import SpeedOptions
from export.speed.random_models import prunable, random_model
from export.speed.tables import SpeedReport, tables
from export.speed.timing import measure, microseconds, take_turns
from mrp_lightning.errors import OptionError
from mrp_sparse.arguments import checked
from mrp_sparse.decoding import storage_bytes
from mrp_sparse.kernels import cusparselt
from mrp_sparse.kernels.dispatch import Failure, Measurement, cache_path, known_times, use_times
from mrp_sparse.packed_linear import Sparse24Linear


def packed_copy(model: PreTrainedModel, names: Iterable[str]) -> PreTrainedModel:
    """The model with these layers packed; all other tensors are shared with the original."""
    shared: dict[int, Any] = {id(p): p for p in (*model.parameters(), *model.buffers())}
    sparse = copy.deepcopy(model, shared)
    for name in names:
        sparse.set_submodule(name, Sparse24Linear.from_linear(model.get_submodule(name)))
    return sparse


def dense_copy(model: PreTrainedModel) -> PreTrainedModel:
    """The model with its packed layers dense; all other tensors are shared with the original."""
    shared: dict[int, Any] = {id(p): p for p in (*model.parameters(), *model.buffers())}
    dense = copy.deepcopy(model, shared)
    for name, module in model.named_modules():
        if isinstance(module, Sparse24Linear):
            dense.set_submodule(name, module.to_linear())
    return dense


log = logging.getLogger(__name__)


@checked
def compare(
    sparse: PreTrainedModel,
    options: SpeedOptions,
    report_on: Callable[[SpeedReport], object] = lambda _: None,
) -> SpeedReport:
    """Measure the layers, put the model on a back-end, and time it against its dense twin.

    `report_on` is called with the report whenever there is more in it. The model, with its packed
    layers, is left on the back-end.

    Raises:
        OptionError: The model is not on a CUDA device, or the back-end cannot run there.
    """
    device = sparse.device
    if device.type != "cuda":
        raise OptionError(f"Speed is measured on CUDA devices; the model is on {device}.")
    check_backend(options.backend, device)
    report = SpeedReport(
        environment={**known_times(device).environment, **_versions()},
        backend=options.backend,
        target=options.target,
        bandwidth=bandwidth(device),
    )
    if report.environment.get("cusparselt") == cusparselt.SLOW_ON_HOPPER:
        note = "cuSPARSELt 0.8.0 is slower on Hopper than 0.8.1, which torch 2.12 brings."
        report.notes.append(note)
    for found, failures in measure_layers(sparse, options.layer_tokens):
        report.layers += found
        report.failures += failures
        report_on(report)
    dense = dense_copy(sparse)
    report.stayed_dense = apply(sparse, options.backend, options.target)
    report.dense_bytes, report.sparse_bytes = storage_bytes(dense), storage_bytes(sparse)
    for times in time_models(dense, sparse, options):
        report.models += times
        report_on(report)
    return report


@torch.no_grad()
def measure_layers(
    model: PreTrainedModel, tokens: Sequence[int]
) -> Iterator[tuple[list[Measurement], list[Failure]]]:
    """Time each shape of the packed layers of a model on a CUDA device once, by all kernels.

    Kernels are chosen by these times from now on, in later processes too. For each shape and number
    of tokens it gives what was measured, and what could not be.
    """
    layers = [m for m in model.modules() if isinstance(m, Sparse24Linear)]
    for shape in dict.fromkeys((m.out_features, m.in_features, m.weight.dtype) for m in layers):
        if not tokens:
            return
        for found, failures in measure(*shape, model.device, tokens):
            times = known_times(model.device).merged(found)
            times.save(cache_path(times.environment))
            use_times(times, model.device)
            yield found, failures


def bandwidth(device: torch.device) -> float:
    """Bytes a second of a large copy on a device, reads and writes together."""
    source = torch.empty(2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    once = {"copy": lambda: microseconds(lambda: target.copy_(source))}
    return 2 * source.nbytes / (take_turns(once, 10)["copy"].median * 1e-6)


def _versions() -> dict[str, str]:
    """Versions on which the times of kernels do not depend, and that a reader wants to know."""
    found = {"transformers": transformers.__version__}
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("nvidia-smi does not tell the driver's version: %s", error)
        return found
    driver, clock = answer.stdout.splitlines()[0].split(", ")
    return found | {"driver": driver, "highest clock": clock}


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
