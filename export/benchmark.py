"""How fast a pruned model is: the same weights packed and stored dense, on a CUDA device.

    python -m export.benchmark --shape llama3-8b llama2-7b opt-6.7b --out docs/benchmarks/export

A shape is filled with random 2:4 weights: speed does not depend on what the weights mean. What is
measured is written as it comes; what fails is listed with its reason.
"""

import argparse
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

from export.backends.apply import BACKENDS, TARGETS, apply, why_not_here
from export.kernels import cusparselt
from export.kernels.dispatch import measured_table, use_table
from export.kernels.table import Failure, Measurement, cache_path
from export.packed.layer import Sparse24Linear
from export.speed.model_timing import time_models
from export.speed.random_models import SHAPES, prunable, random_model
from export.speed.tables import Result, tables
from export.speed.timing import microseconds, take_turns
from export.speed.tuning import measure
from export.speed.twins import dense_copy, packed_copy, storage_bytes
from mrp_lightning.errors import OptionError

log = logging.getLogger(__name__)
LAYER_TOKENS = (1, 4, 8, 16, 64, 256, 1024, 4096, 16384)


@torch.no_grad()
def measure_layers(
    model: PreTrainedModel, tokens: Sequence[int], *, remember: bool = True
) -> Iterator[tuple[list[Measurement], list[Failure]]]:
    """Time each shape of the model's packed layers once, by all kernels.

    Args:
        model: On a CUDA device, with `Sparse24Linear` layers.
        tokens: Numbers of tokens.
        remember: Choose kernels by these times from now on, in later processes too.

    Yields:
        What was measured for each shape and number of tokens, and what could not be.
    """
    _require_cuda(model)
    layers = [m for m in model.modules() if isinstance(m, Sparse24Linear)]
    shapes = dict.fromkeys((m.out_features, m.in_features, m.weight.dtype) for m in layers)
    for shape in shapes:
        for found, failures in measure(*shape, model.device, tokens):
            if remember:
                table = measured_table(model.device).merged(found)
                table.save(cache_path(table.environment))
                use_table(table, model.device)
            yield found, failures


def _require_cuda(model: PreTrainedModel) -> None:
    if model.device.type != "cuda":
        raise OptionError(f"Speed is measured on CUDA devices; the model is on {model.device}.")


def bandwidth(device: torch.device) -> float:
    """Bytes a second that the device reads and writes in a large copy."""
    source = torch.empty(2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    once = {"copy": lambda: microseconds(lambda: target.copy_(source))}
    return 2 * source.nbytes / (take_turns(once, 10)["copy"].median * 1e-6)


def benchmark(
    sparse: PreTrainedModel,
    *,
    backend: str = "auto",
    target: str = "both",
    compile_mode: str | None = "default",
    batch_sizes: Sequence[int] = (1,),
    prompt_tokens: int = 2048,
    new_tokens: int = 128,
    layer_tokens: Sequence[int] = LAYER_TOKENS,
    progress: Callable[[Result], object] = lambda _: None,
) -> Result:
    """Measure the layers, put the model on a back-end, and time it against its dense twin.

    Args:
        sparse: On a CUDA device, with packed layers; it is left on the back-end.
        backend: One of `BACKENDS`.
        target: `decode`, `prefill` or `both`.
        compile_mode: For `torch.compile`, on both sides; `None` times eager code alone.
        batch_sizes: Sequences at a time.
        prompt_tokens: Length of each prompt.
        new_tokens: Decode steps of a repeat.
        layer_tokens: For the table by layer shape; empty leaves it out.
        progress: Called with what there is whenever there is more.

    Raises:
        OptionError: The model is not on a CUDA device, or the back-end cannot run there.
    """
    _require_cuda(sparse)
    device = sparse.device
    if reason := why_not_here(backend, device):
        raise OptionError(f"`--backend {backend}` cannot run here: {reason}.")
    result = Result(
        environment={**measured_table(device).environment, **_versions()},
        backend=backend,
        target=target,
        bandwidth=bandwidth(device),
    )
    if result.environment.get("cusparselt") == cusparselt.SLOW_ON_HOPPER:
        note = "cuSPARSELt 0.8.0 is slower on Hopper than 0.8.1, which torch 2.12 brings."
        result.notes.append(note)
    if layer_tokens:
        for found, failures in measure_layers(sparse, layer_tokens):
            result.layers += found
            result.failures += failures
            progress(result)
    dense = dense_copy(sparse)
    result.stayed_dense = apply(sparse, backend, target).dense
    result.dense_bytes, result.sparse_bytes = storage_bytes(dense), storage_bytes(sparse)
    phases = ("prefill", "decode") if target == "both" else (target,)
    for times in time_models(
        dense,
        sparse,
        batch_sizes=batch_sizes,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        compile_mode=compile_mode,
        phases=phases,
    ):
        result.models += times
        progress(result)
    return result


def _versions() -> dict[str, str]:
    """What the table does not depend on, and a reader wants to know."""
    found = {"transformers": transformers.__version__}
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("nvidia-smi does not tell the driver's version: %s", error)
        return found
    driver, clock = answer.stdout.splitlines()[0].split(", ")
    return found | {"driver": driver, "highest clock": clock}


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line. Status 1: a shape could not be measured to its end."""
    parser = argparse.ArgumentParser(
        prog="python -m export.benchmark",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", choices=SHAPES, nargs="+", required=True)
    parser.add_argument("--backend", choices=BACKENDS, default="auto")
    parser.add_argument("--target", choices=TARGETS, default="both")
    parser.add_argument("--compile", default="default", metavar="MODE", help="none: eager alone")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1])
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--layer-tokens", type=int, nargs="*", default=LAYER_TOKENS)
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write SHAPE-BACKEND.md and .json there as it runs"
    )
    options = parser.parse_args(args)
    if not torch.cuda.is_available():
        parser.error("speed is measured on a CUDA device, and this machine has none")
    device = torch.device("cuda", torch.cuda.current_device())
    if reason := why_not_here(options.backend, device):
        parser.error(f"--backend {options.backend} cannot run here: {reason}")
    failed = [shape for shape in options.shape if not _run(shape, options, device)]
    if failed:
        raise SystemExit(f"not measured to the end: {', '.join(failed)}")


def _run(shape: str, options: argparse.Namespace, device: torch.device) -> bool:
    """Measure one shape; whether it came to its end."""

    def write(result: Result) -> None:
        if options.out is not None:
            save(result, options.out / f"{shape}-{options.backend}")

    sys.stdout.write(f"## {shape}, {options.backend}\n\n")
    try:
        model = random_model(shape, getattr(torch, options.dtype), device)
        sparse = packed_copy(model, prunable(model))
        del model
        result = benchmark(
            sparse,
            backend=options.backend,
            target=options.target,
            compile_mode=None if options.compile == "none" else options.compile,
            batch_sizes=options.batch_sizes,
            prompt_tokens=options.prompt_tokens,
            new_tokens=options.new_tokens,
            layer_tokens=options.layer_tokens,
            progress=write,
        )
    except Exception:  # the shapes that follow may fit where this one did not
        log.exception("%s was not measured to its end.", shape)
        return False
    write(result)
    sys.stdout.write(f"{tables(result)}\n")
    sys.stdout.flush()
    return True


def save(result: Result, path: Path) -> None:
    """Write `path`.json and `path`.md."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{path}.json").write_text(json.dumps(asdict(result), indent=1), encoding="utf-8")
    Path(f"{path}.md").write_text(tables(result), encoding="utf-8")


if __name__ == "__main__":
    main()
