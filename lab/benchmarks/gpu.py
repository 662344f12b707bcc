"""All measurements that wait for a GPU, in parts: `make gpu`.

    python lab/benchmarks/gpu.py                         # all parts, the most important first
    python lab/benchmarks/gpu.py backends walk-SM        # some of them
    python lab/benchmarks/gpu.py solver --limit 1200 --sparsegpt DIR

A part takes at most `--limit` seconds. Options that are unknown here go to the commands of the one
part that is named. The parts need torch, transformers, lightning and pydantic (the tests pytest,
too), install nothing and need no network. The output of each is written into FILE.md of `runs/gpu`
as it comes. Nothing is kept from one part to the next, so that each may run on a machine of its
own.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
OUT = Path("runs/gpu")
LIMIT = 480.0
"""Seconds that a part may take, by default."""
SHAPES = ("llama3-8b", "llama2-7b", "opt-6.7b")
BACKENDS = ("torch", "torchao", "torchao-fp8")
WALKS = {"SM": ["SM"], "SS": ["SS"], "JM": ["JM"], "bits": ["JM", "--bits", "4"]}
"""Methods of whole runs, each a part of its own, so that a slow one cuts off no other."""

Command = list[str]


def tests() -> list[Command]:
    """Return the tests that need a GPU, and those that run on a stand-in for one elsewhere."""
    marked = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "mark.gpu" in path.read_text(encoding="utf-8")
    ]
    pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    everywhere = ["tests/export/test_triton.py", "tests/device"]
    return [[*pytest, "-m", "gpu", *marked], [*pytest, "-m", "not gpu", *everywhere]]


_SPEED = """\
import sys, torch
sys.path.insert(0, "lab/benchmarks")
from export.backends import why_not_here
from shapes import SpeedOptions, measure_shapes
device, options = torch.device("cuda"), SpeedOptions(**{options})
if options.backend != "auto" and (reason := why_not_here(options.backend, device)):
    print("Skipped:", reason)
else:
    measure_shapes([{shape!r}], options, out={out!r})
"""


def speed(shape: str, directory: str, **options: object) -> Command:
    """Return the command that times packed layers and models of a shape against dense ones.

    It is `shapes.py`, without the package that reads command lines. A back-end
    that this device lacks is skipped, with the reason.
    """
    return ["-c", _SPEED.format(shape=shape, options=options, out=f"{OUT}/{directory}")]


def phase(target: str, tokens: list[int], **options: int) -> list[Command]:
    """Return the commands of one phase by our kernels and cuSPARSELt: layers, and whole models."""
    return [speed(shape, target, target=target, layer_tokens=tokens, **options) for shape in SHAPES]


def backends() -> list[Command]:
    """Return the commands of whole models on the tensors of torch and torchao, in both phases."""
    options: dict[str, object] = {"target": "both", "layer_tokens": [], "compile_mode": None}
    return [
        speed(shape, "backends", backend=backend, **options)
        for shape in SHAPES[:2]
        for backend in BACKENDS
    ]


def compiled() -> list[Command]:
    """Return the commands of whole models that `torch.compile` compiles, which takes minutes."""
    options: dict[str, object] = {"target": "decode", "layer_tokens": [], "prompt_tokens": 128}
    return [
        speed("llama2-7b", "compiled", backend=backend, **options)
        for backend in ("auto", "torchao")
    ]


def solver() -> list[Command]:
    """Return the commands that time the solver against the column sweep."""
    sizes = ("4096", "4096x11008")
    command = ["lab/benchmarks/solver.py", "--device", "cuda", "--rounds", "3", "--skip-cholesky"]
    return [[*command, "--sizes", size] for size in sizes]


def walk(methods: list[str]) -> list[Command]:
    """Return the command of a whole run on a model of 7 billion random weights."""
    calibration = ["--samples", "128", "--length", "2048"]
    command = ["lab/benchmarks/whole_run.py", "--shape", "llama2-7b", "--device", "cuda"]
    return [[*command, *calibration, "--methods", *methods]]


PARTS: dict[str, Callable[[], list[Command]]] = {
    "tests": tests,
    "backends": backends,
    "decode": partial(phase, "decode", [1, 4, 16], prompt_tokens=128),
    "compiled": compiled,
    "solver": solver,
    **{f"walk-{name}": partial(walk, methods) for name, methods in WALKS.items()},
    "prefill": partial(phase, "prefill", [256, 2048, 8192]),
}
"""The commands of each part, the most important part first."""


def run(part: str, more: list[str], limit: float = LIMIT) -> bool:
    """Run a part, print its output and write it to its file; return whether all of it was well."""
    path = OUT / f"{part}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    well = True
    with path.open("w", encoding="utf-8") as page:

        def write(text: str) -> None:
            for file in (sys.stdout, page):
                file.write(text)
                file.flush()

        for command in PARTS[part]():
            command += more
            left = limit - (time.monotonic() - start)
            write(f"\n```\npython {shlex.join(command)}\n```\n\n")
            if left <= 0:
                write(f"Not run: the part had used up its {limit:.0f} s.\n")
                well = False
                continue
            status = _run([sys.executable, *command], left, write)
            write(f"\n{status}, {time.monotonic() - start:.0f} s of the part.\n")
            well &= status == "Status 0"
    return well


def _run(command: Command, seconds: float, write: Callable[[str], None]) -> str:
    """Run a command and its children for so many seconds at most, and return how it ended."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
        start_new_session=True,
    )
    assert process.stdout is not None
    timer = threading.Timer(seconds, os.killpg, (process.pid, signal.SIGKILL))
    timer.start()
    for line in process.stdout:
        write(line)
    status = process.wait()
    timer.cancel()
    return f"Stopped after {seconds:.0f} s" if status == -signal.SIGKILL else f"Status {status}"


def main() -> None:
    """Run the parts. Status 1: one was not run to its end, or failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    text = f"default: all of {', '.join(PARTS)}"
    parser.add_argument("parts", nargs="*", metavar="PART", help=text)
    text = "seconds that a part may take (default: %(default).0f)"
    parser.add_argument("--limit", type=float, default=LIMIT, metavar="SECONDS", help=text)
    options, more = parser.parse_known_args()
    parts = options.parts or list(PARTS)
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"{', '.join(unknown)}: expected {', '.join(PARTS)}")
    if more and len(parts) != 1:
        parser.error(f"options of commands need the name of one part: {' '.join(more)}")
    if more and PARTS[parts[0]]()[-1][0] == "-c":
        parser.error(f"`{parts[0]}` takes no options: {' '.join(more)}")
    if not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA device here, and all of this needs one.")
    if "tests" in parts and not find_spec("pytest"):
        raise SystemExit("The part `tests` needs pytest; name another one: PART=decode.")
    os.chdir(ROOT)
    results = {part: run(part, more, options.limit) for part in parts}
    if failed := [part for part, well in results.items() if not well]:
        raise SystemExit(f"Not run to the end, or failed: {', '.join(failed)}.")


if __name__ == "__main__":
    main()
