"""All that waits for a GPU, in parts of at most 8 minutes each: `make gpu PYTHON=python3`.

    python lab/benchmarks/gpu.py                      # all parts, the most important first
    python lab/benchmarks/gpu.py walk --methods SM    # one of them; options go to its last command

It takes torch, transformers and lightning (the tests pytest, too), installs nothing and needs no
network. What each part prints is written into FILE.md of `runs/gpu` as it comes. Nothing is kept
from one part to the next, so that each may run on a machine of its own.
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
from importlib.util import find_spec
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
OUT = Path("runs/gpu")
LIMIT = 480.0
"""Seconds that a part may take."""
SHAPES = ("llama3-8b", "llama2-7b", "opt-6.7b")

Command = list[str]


def tests() -> list[Command]:
    """The tests that need a GPU, and those of kernels, which are interpreted elsewhere."""
    marked = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "mark.gpu" in path.read_text(encoding="utf-8")
    ]
    pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    return [[*pytest, "-m", "gpu", *marked], [*pytest, "tests/export/test_triton.py"]]


def speed(phase: str, tokens: list[int], **more: int) -> list[Command]:
    """Packed against dense: layers of all tokens, and whole models, in one phase.

    It is `python -m export.benchmark`, without the package that reads command lines.
    """
    options = {"target": phase, "layer_tokens": tokens, **more}
    code = (
        "from export.comparison import SpeedOptions, measure_shapes; "
        "measure_shapes([{shape!r}], SpeedOptions(**{options}), out={out!r})"
    )
    out = f"{OUT}/{phase}"
    return [["-c", code.format(shape=shape, options=options, out=out)] for shape in SHAPES]


def solver() -> list[Command]:
    """The solver against the column sweep."""
    sizes = ("4096", "4096x11008")
    command = ["lab/benchmarks/solver.py", "--device", "cuda", "--rounds", "3", "--skip-cholesky"]
    return [[*command, "--sizes", size] for size in sizes]


def walk() -> list[Command]:
    """A whole run on a model of 7 billion random weights."""
    calibration = ["--samples", "128", "--length", "2048"]
    command = ["lab/benchmarks/whole_run.py", "--shape", "llama2-7b", "--device", "cuda"]
    return [[*command, *calibration, "--methods", "SM", "SS", "JM"]]


PARTS = {
    "tests": tests,
    "decode": lambda: speed("decode", [1, 4, 16], prompt_tokens=128),
    "solver": solver,
    "walk": walk,
    "prefill": lambda: speed("prefill", [256, 2048, 8192]),
}
"""The commands of each part, the most important part first."""


def run(part: str, more: list[str]) -> bool:
    """Run a part, print what it prints and write it to its file: whether all of it was well."""
    path = OUT / f"{part}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    commands = PARTS[part]()
    commands[-1] += more
    well = True
    with path.open("w", encoding="utf-8") as page:

        def write(text: str) -> None:
            for file in (sys.stdout, page):
                file.write(text)
                file.flush()

        for command in commands:
            left = LIMIT - (time.monotonic() - start)
            write(f"\n```\npython {shlex.join(command)}\n```\n\n")
            if left <= 0:
                write(f"Not run: the part had used up its {LIMIT:.0f} s.\n")
                well = False
                continue
            status = _run([sys.executable, *command], left, write)
            write(f"\n{status}, {time.monotonic() - start:.0f} s of the part.\n")
            well &= status == "Status 0"
    return well


def _run(command: Command, seconds: float, write: Callable[[str], None]) -> str:
    """Run one command with all that it starts, for so many seconds at most: how it ended."""
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
    parser.add_argument("part", nargs="?", choices=PARTS, help="default: all")
    options, more = parser.parse_known_args()
    if more and not options.part:
        parser.error(f"options of a command need the name of a part: {' '.join(more)}")
    if more and PARTS[options.part]()[-1][0] == "-c":
        parser.error(f"`{options.part}` takes no options: {' '.join(more)}")
    if not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA device here, and all of this needs one.")
    if not find_spec("pytest") and options.part in (None, "tests"):
        raise SystemExit("The part `tests` needs pytest; name another one: PART=decode.")
    os.chdir(ROOT)
    results = {part: run(part, more) for part in ([options.part] if options.part else PARTS)}
    if failed := [part for part, well in results.items() if not well]:
        raise SystemExit(f"Not run to the end, or failed: {', '.join(failed)}.")


if __name__ == "__main__":
    main()
