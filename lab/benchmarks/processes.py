"""The cost of each part of a pruning in one process and in several, extrapolated to many.

    python lab/benchmarks/processes.py --out lab/results/processes.md

Each process has one thread and a core of its own, as it would have a GPU of its own. There must not
be more processes than cores. Windows are drawn from the embedded text. Times are those of process
0, the least of some runs, and do not overlap:

* calibration: running blocks and summing up Hessians, over this process's share of the windows;
* factors: factorising H + λI, which every process does for itself;
* solve: masks and weights, for this process's share of the rows;
* tuning: forwards, backwards and steps, over this process's share of the windows;
* sums, gathers: all_reduce of Hessians and gradients; all_gather of scores, masks, weights and
  numbers. They include waiting for the slower process.

If a part takes a + b/N in N processes, by the two measurements, it takes a + b/8 in eight. The
shapes give the bytes that eight GPUs exchange: over each GPU's link, all_reduce moves 2·7/8 of the
bytes of a Hessian, and all_gather 7/8 of the bytes of weights, masks and, for unstructured
sparsity, float32 scores.
"""

import argparse
import functools
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from mrp_lightning.calibration.walks import DenseStream, Walk
from mrp_lightning.devices import machine
from mrp_lightning.embedded import STDLIB_LLAMA
from mrp_lightning.processes import Processes
from mrp_lightning.pruning import prune_layers
from mrp_lightning.pruning.block import WalkedBlock
from mrp_lightning.pruning.block_tuner import BlockTuner
from mrp_lightning.pruning.job import Job
from mrp_lightning.pruning.sequential import prune_model
from mrp_lightning.pruning.settings import BlockTuning, Settings
from mrp_lightning.solver.conjugate_gradients import LowRankModel
from mrp_lightning.solver.hessian import InputHessian
from mrp_lightning.targets.plan import make_plan

PARTS = ("calibration", "factors", "solve", "tuning", "sums", "gathers")
SHARED = ("calibration", "factors", "solve", "tuning")
"""Parts that are work, and not communication."""
SHAPES = {
    "LLaMA-7B": (32, {4096: 4 * 4096 + 2 * 11008, 11008: 4096}),
    "LLaMA-70B": (80, {8192: 2 * 8192 + 2 * 1024 + 2 * 28672, 28672: 8192}),
}
"""Blocks, and the rows of a block's layers by their columns."""
INPUTS = {"LLaMA-7B": [4096] * 3 + [11008], "LLaMA-70B": [8192] * 3 + [28672]}
"""The columns of the Hessians of a block: q, k and v share one, gate and up another."""


class Clock:
    """Seconds by part; what runs inside another part counts only there."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._inside: list[float] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time of the context."""
        begin = time.perf_counter()
        self._inside.append(0.0)
        try:
            yield
        finally:
            whole = time.perf_counter() - begin
            self.seconds[name] += whole - self._inside.pop()
            if self._inside:
                self._inside[-1] += whole

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, whose time counts."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return function(*args, **kwargs)

        return call


def watch(clock: Clock) -> None:
    """Time the parts of all prunings of this process."""
    for owner, method, part in (
        (Walk, "step", "calibration"),
        (WalkedBlock, "calibrate", "calibration"),
        (DenseStream, "output", "calibration"),
        (InputHessian, "_settle", "factors"),
        (LowRankModel, "of", "factors"),
        (prune_layers, "prune_together", "solve"),
        (BlockTuner, "tune", "tuning"),
        (Processes, "sum_", "sums"),
        (Processes, "gather_rows", "gathers"),
        (Processes, "numbers", "gathers"),
    ):
        for kind in [owner, *getattr(owner, "__subclasses__", list)()]:
            if method in vars(kind):
                setattr(kind, method, clock.timed(part, getattr(kind, method)))


def work(options: argparse.Namespace) -> None:
    """Prune in one of the processes; the first one prints the seconds as JSON."""
    from mrp_lightning import CausalLM, TextDataModule

    torch.set_num_threads(1)
    if options.size > 1:
        distributed.init_process_group(
            "gloo",
            init_method=f"file://{options.group}",
            rank=options.rank,
            world_size=options.size,
        )
    processes = Processes(options.rank, options.size)
    data = TextDataModule(num_samples=options.samples, sequence_length=options.length, bos="text")
    loaded = CausalLM(options.model, dtype="float32")
    data.tokenizer = loaded.tokenizer
    windows = data.calibration_windows()[options.rank :: options.size]
    tuning = BlockTuning(epochs=options.epochs) if options.epochs else False
    settings = Settings(method=options.method, sparsity=options.sparsity, tuning=tuning)
    clock = Clock()
    watch(clock)
    job = Job(
        model=loaded.model,
        forward=lambda ids: loaded.model(input_ids=ids, use_cache=False),
        batches=windows.split(options.batch),
        plan=make_plan(loaded.model, settings.recipe.pattern),
        settings=settings,
        processes=processes,
    )
    prune_model(job)
    if options.rank == 0:
        print(json.dumps(clock.seconds))


def measure(size: int, arguments: list[str]) -> dict[str, float]:
    """Seconds of each part, in so many processes."""
    with tempfile.TemporaryDirectory() as directory:
        common = [sys.executable, __file__, *arguments, f"--size={size}", f"--group={directory}/g"]
        started = [
            subprocess.Popen([*common, f"--rank={rank}"], stdout=subprocess.PIPE, text=True)
            for rank in range(size)
        ]
        outputs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit("a process failed; its message is above")
    found: dict[str, float] = json.loads(outputs[0].splitlines()[-1])
    return found


def measured_rows(times: dict[int, dict[str, float]]) -> Iterator[list[str]]:
    """The rows of the table: a part each, then all of them."""
    one, several = sorted(times)
    totals = Counter[str]()
    for part in PARTS:
        before, after = (times[size].get(part, 0.0) for size in (one, several))
        row = [part, f"{before:.2f}", f"{after:.2f}"]
        totals["before"] += before
        totals["after"] += after
        if part in SHARED and before:
            shared = min(max(0.0, (before - after) / (1 - 1 / several)), before)
            eight = before - shared + shared / 8
            totals["eight"] += eight
            row += [f"{shared / before:.0%}", f"{before / eight:.1f}"]
        else:
            row += ["", ""]
        yield row
    before, after, eight = (totals[key] for key in ("before", "after", "eight"))
    yield ["all", f"{before:.2f}", f"{after:.2f}", "", f"{before / eight:.1f} and the exchange"]


@dataclass(frozen=True)
class Exchange:
    """Return the bytes that one of eight GPUs sends for a model."""

    hessians: float
    rows: float


def exchange(model: str, *, unstructured: bool) -> Exchange:
    """By the formula of the module's description; weights in 16 bits."""
    blocks, layers = SHAPES[model]
    weights = sum(columns * rows for columns, rows in layers.items())
    hessians = sum(4 * columns**2 for columns in INPUTS[model])
    each = 2 + 1 + (4 if unstructured else 0)
    return Exchange(blocks * hessians * 2 * 7 / 8, blocks * weights * each * 7 / 8)


def main() -> None:
    """Run the command line."""
    options = _parser().parse_args()
    if options.size:
        work(options)
        return
    arguments = [a for a in sys.argv[1:] if not a.startswith("--out")]
    arguments = [a for a in arguments if a != str(options.out)]
    times: dict[int, dict[str, float]] = {}
    for _ in range(options.rounds):
        for size in (1, options.processes):
            found = measure(size, arguments)
            best = times.setdefault(size, found)
            if sum(found.values()) < sum(best.values()):
                times[size] = found
    page = ["# Several processes", "", (__doc__ or "").split("\n\n", 2)[2].rstrip(), ""]
    page += ["```", " ".join(["python lab/benchmarks/processes.py", *sys.argv[1:]]), "```", ""]
    torch.set_num_threads(1)
    page += [f"Machine: {machine(torch.device('cpu'))}; {Path(options.model).name},"]
    page += [f"{options.samples} windows of {options.length} tokens.", ""]
    header = ["part", "s in 1", f"s in {options.processes}", "shared out", "× faster in 8"]
    page += _table(header, list(measured_rows(times)))
    page += ["", f"What each of 8 GPUs sends, at {options.gigabytes:g} GB/s a GPU:", ""]
    rows = []
    for model in SHAPES:
        for name, unstructured in (("2:4", False), ("unstructured", True)):
            sent = exchange(model, unstructured=unstructured)
            seconds = (sent.hessians + sent.rows) / options.gigabytes / 1e9
            gb = [f"{value / 1e9:.0f}" for value in (sent.hessians, sent.rows)]
            rows.append([model, name, *gb, f"{seconds:.1f}"])
    page += _table(["model", "sparsity", "GB of Hessians", "GB of rows", "s"], rows)
    text = "\n".join(page) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = [" | ".join(row) for row in (header, ["---"] * len(header), *rows)]
    return [f"| {line} |" for line in lines]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(STDLIB_LLAMA), metavar="DIR")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=32, help="calibration windows")
    parser.add_argument("--length", type=int, default=512, help="tokens a window")
    parser.add_argument("--batch", type=int, default=4, help="windows a batch")
    parser.add_argument("--method", default="SM")
    parser.add_argument("--sparsity", type=float, default=0.5)
    parser.add_argument("--epochs", type=int, default=2, help="of tuning, 0 for none")
    parser.add_argument("--gigabytes", type=float, default=300, help="a second, between GPUs")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the page there, too")
    for hidden in ("--rank", "--size"):
        parser.add_argument(hidden, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--group", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
