"""All measurements that wait for a GPU, in parts: `make gpu`.

    python lab/benchmarks/gpu.py                         # all parts, the most important first
    python lab/benchmarks/gpu.py speed walk-SM           # some of them
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
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
OUT = Path("runs/gpu")
LIMIT = 480.0
"""Seconds that a part may take, by default."""
SHAPES = ("llama3-8b", "llama2-7b", "opt-6.7b")
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


def speed(part: str, *options: str, shapes: Sequence[str] = SHAPES) -> list[Command]:
    """Return the commands that time packed models of some shapes against dense ones."""
    command = ["lab/benchmarks/shapes.py", "--out", f"{OUT}/{part}", *options, "--shape"]
    return [[*command, shape] for shape in shapes]


_BATCHES = ("--batch-sizes", "1", "8", "32")
_LAYERS = ("--layer-tokens", "1", "16", "2048")


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
    "speed": partial(speed, "speed", *_BATCHES, *_LAYERS),
    "torchao": partial(speed, "torchao", "--format", "torchao", shapes=SHAPES[:2]),
    "compiled": partial(speed, "compiled", "--compile", shapes=SHAPES[1:2]),
    "solver": solver,
    **{f"walk-{name}": partial(walk, methods) for name, methods in WALKS.items()},
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
    if not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA device here, and all of this needs one.")
    if "tests" in parts and not find_spec("pytest"):
        raise SystemExit("The part `tests` needs pytest; name another one: PART=speed.")
    os.chdir(ROOT)
    results = {part: run(part, more, options.limit) for part in parts}
    if failed := [part for part, well in results.items() if not well]:
        raise SystemExit(f"Not run to the end, or failed: {', '.join(failed)}.")


if __name__ == "__main__":
    main()
