r"""The time of the commands that a new user gives first, on the embedded model.

    python lab/benchmarks/first_hour.py                                   # in a quiet machine
    python lab/benchmarks/first_hour.py --only "prune --text" --busy 2 \
        --environments "" GOMP_SPINCOUNT=300000                           # beside other work

Each command runs in a process of its own, one after the other, and with all of its threads. CPU
time is that of the process and its children, compilers included. `generate` stops after one token,
so that its time is that of the first word. Busy loops, in processes of their own, stand for other
work.
"""

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from mrp_lightning.devices import machine
from mrp_lightning.embedded import STDLIB_LLAMA

_PRUNE = f"prune {STDLIB_LLAMA} --sparsity 0.5"
_COMMANDS = {
    "import": None,
    "prune --help": "prune --help",
    "generate --help": "generate --help",
    "predict --help": "predict --help",
    "prune": f"{_PRUNE} --out half",
    "export": "export half --overwrite",
    "generate": "generate half-bitmask --prompt def --max-new-tokens 1",
    "prune --text": f"{_PRUNE} --text {os.__file__} --num-samples 32 --sequence-length 256 "
    "--eval-samples 16 --overwrite --out text",
}
"""The arguments of `mrp-lightning` by the name of the row, in the order in which they run."""


@contextmanager
def _busy(processes: int) -> Iterator[None]:
    """Run loops in other processes meanwhile."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def _measure(arguments: str | None, environment: str, directory: str) -> tuple[float, float]:
    """Return the CPU seconds and the seconds of a command; its output is shown if it fails."""
    import_alone = ["-c", "import mrp_lightning"]
    command = (
        import_alone if arguments is None else ["-m", "mrp_lightning", *shlex.split(arguments)]
    )
    settings = dict(each.split("=") for each in environment.split())
    variables = {"XDG_CACHE_HOME": f"{directory}/cache", "PYTHONPATH": str(Path.cwd())}
    before, start = os.times(), time.perf_counter()
    ended = subprocess.run(
        [sys.executable, *command],
        cwd=directory,
        env=os.environ | variables | settings,
        capture_output=True,
        text=True,
        check=False,
    )
    seconds, after = time.perf_counter() - start, os.times()
    if ended.returncode:
        raise SystemExit(f"{arguments}: {ended.stdout}{ended.stderr}")
    cpu = sum(after[2:4]) - sum(before[2:4])  # of children that have ended
    return cpu, seconds


def main(args: Sequence[str] | None = None) -> None:
    """Print a table of all commands, or of some."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=_COMMANDS, default=list(_COMMANDS))
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="busy loops beside them")
    text = "variables such as A=1, an environment each; empty for that of the user"
    parser.add_argument("--environments", nargs="+", default=[""], metavar="VARIABLES", help=text)
    options = parser.parse_args(args)
    print(f"{machine(torch.device('cpu'))}, beside {options.busy} busy loops\n")
    print(
        "| command | environment | CPU seconds | seconds |\n| --- | --- | --- | --- |", flush=True
    )
    with TemporaryDirectory() as directory, _busy(options.busy):
        for name in options.only:
            for environment in options.environments:
                cpu, seconds = _measure(_COMMANDS[name], environment, directory)
                print(f"| {name} | {environment} | {cpu:.1f} | {seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
