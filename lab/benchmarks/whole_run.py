r"""The time of a whole pruning run, part by part, next to the original codes.

    python lab/benchmarks/whole_run.py --model runs/smollm2 --text valid.txt --perplexity test.txt \
        --sparsegpt SPARSEGPT
    python lab/benchmarks/whole_run.py --shape llama2-7b --samples 128 --length 2048 --device cuda

Every method prunes the same model to 2:4, calibrated on the same windows of tokens, in a process of
its own. On a CPU it is CPU time that is counted, on a GPU elapsed time. Peak memory is that of the
process (on a GPU: of what torch has allocated) from when the model is loaded, with the model in it.
"""

import argparse
import logging
import multiprocessing
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import originals
import torch
from shapes import SHAPES
from stopwatch import PARTS, Stopwatch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from mrp_lightning.devices import machine
from mrp_lightning.loop.perplexity import Perplexity, token_losses
from mrp_lightning.models.loading import load_model, load_tokenizer
from mrp_lightning.pruning.job import Job
from mrp_lightning.pruning.sequential import prune_model
from mrp_lightning.pruning.settings import Settings
from mrp_lightning.solver.recipe import Recipe
from mrp_lightning.targets.plan import make_plan
from mrp_lightning.text.sources import standard_library
from mrp_lightning.text.windows import Draws, consecutive_windows, segments_of_text, tokenize

ORIGINALS = {
    "original SparseGPT": (originals.sparsegpt, "sparsegpt"),
    "original ALPS": (originals.alps, "alps"),
}
"""Their code, and the option that says where it is."""
COLUMNS = ("layers", *PARTS, "rest")


@dataclass(frozen=True)
class Comparison:
    """The options that all methods share.

    Attributes:
        options: The command line.
        windows: Calibration windows (windows, length).
        test: Windows of the text that perplexity is measured on.
    """

    options: argparse.Namespace
    windows: Tensor
    test: Tensor | None


@dataclass(frozen=True)
class Result:
    """The measurements of one method.

    Attributes:
        seconds: By part.
        peak: MiB.
        relative_loss: Mean over the layers of ‖δx‖² / ‖wx‖².
        perplexity: On the test text.
    """

    seconds: dict[str, float]
    peak: float
    relative_loss: float
    perplexity: float | None

    @property
    def total(self) -> float:
        """Seconds of the whole run."""
        return sum(self.seconds.values())


def load(options: argparse.Namespace) -> Any:
    """Return the model, cut after some blocks if that is asked for."""
    device, dtype = options.device, getattr(torch, options.dtype)
    if options.shape:
        values = dict(SHAPES[options.shape])
        if options.blocks:
            values["num_hidden_layers"] = options.blocks
        config = AutoConfig.for_model(values.pop("model_type"), **values)
        torch.manual_seed(0)
        with torch.device(device):
            return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model: Any = load_model(str(options.model), dtype).to(device)
    if options.blocks:
        first = make_plan(model, Recipe.of(method="SM", pattern="2:4").pattern).blocks[0].name
        name = first.rpartition(".")[0]
        blocks = model.get_submodule(name)
        model.set_submodule(name, nn.ModuleList(list(blocks)[: options.blocks]))
        model.config.num_hidden_layers = options.blocks
    return model


@torch.no_grad()
def run(method: str, given: Comparison) -> Result:
    """Prune by one method, in this process."""
    options, device = given.options, given.options.device
    torch.set_num_threads(options.threads)
    logging.disable(logging.INFO)
    transformers_logging.disable_progress_bar()
    model = load(options)
    batch_size = 1 if method in ORIGINALS else options.batch_size
    windows = list(given.windows.to(device).split(batch_size))
    _forget_peak(device)
    watch = Stopwatch(_clock(device))
    losses: list[float] = []
    if method in ORIGINALS:

        def seen(layer: nn.Linear, weight: Tensor, matrix: Tensor) -> None:
            losses.append(originals.relative_loss(layer, weight, matrix))

        of, repository = ORIGINALS[method]
        original = of(getattr(options, repository))
        plan = make_plan(model, Recipe.of(method="SM", pattern="2:4").pattern)
        originals.prune_model(original, model, windows, plan, watch.part, seen)
    else:
        watch.count_parts()
        settings = Settings(method=method, pattern="2:4", bits=options.bits)
        losses += _prune(model, windows, settings, watch)
    with watch.part("end"):
        pass
    seconds = {part: watch.seconds[part] for part in COLUMNS}
    peak = _peak(device)
    found = None if given.test is None else perplexity(model, given.test)
    return Result(seconds, peak, sum(losses) / len(losses), found)


def _prune(
    model: Any, windows: Sequence[Tensor], settings: Settings, watch: Stopwatch
) -> Iterator[float]:
    job = Job(
        model=model,
        forward=watch.counted("forwards", lambda ids: model(input_ids=ids, use_cache=False)),
        batches=windows,
        plan=make_plan(model, settings.recipe.pattern),
        settings=settings,
        device=model.device,
    )
    rows = [row for result in prune_model(job) for row in result.pruned_rows]
    return (row.relative_loss for row in rows if row.relative_loss is not None)


def perplexity(model: Any, windows: Tensor) -> float:
    """Return the perplexity of the model on windows of tokens."""
    metric = Perplexity()
    for ids in windows.to(model.device).split(1):
        losses, predicted = token_losses(model(input_ids=ids, use_cache=False).logits, ids, None)
        metric.update(losses.cpu(), predicted.cpu())
    return float(metric.compute())


def _clock(device: torch.device) -> Callable[[], float]:
    if device.type == "cpu":
        return time.process_time

    def clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock


def _forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5")


def _peak(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) / 2**10


def make_comparison(options: argparse.Namespace) -> Comparison:
    """Tokenize the texts, and draw the windows."""
    draws = Draws(count=options.samples, length=options.length, seed=0)
    if options.shape:
        generator = torch.Generator().manual_seed(0)
        vocabulary = SHAPES[options.shape]["vocab_size"]
        size = (options.samples, options.length)
        return Comparison(options, torch.randint(vocabulary, size, generator=generator), None)
    tokenizer = load_tokenizer(str(options.model))
    read = (path.read_text(encoding="utf-8") for path in options.text)
    text = "\n".join(read if options.text else standard_library("train"))
    windows = segments_of_text(tokenize(tokenizer, text), draws, "calibration")
    test = None
    if options.perplexity:
        tokens = tokenize(tokenizer, options.perplexity.read_text(encoding="utf-8"))
        test = consecutive_windows(tokens, options.length, "test")[: options.windows]
    return Comparison(options, windows, test)


def in_a_process(method: str, given: Comparison) -> Result:
    """Run one method in a fresh process, so that its peak memory is its own."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=spawn) as pool:
        return pool.submit(run, method, given).result()


def main() -> None:
    """Print the table, row by row as they come."""
    options = _parser().parse_args()
    start = time.process_time()
    given = make_comparison(options)
    tokenizing = time.process_time() - start
    unit = "CPU s" if options.device.type == "cpu" else "s"
    name = options.shape or options.model.name
    blocks = f", its first {options.blocks} blocks" if options.blocks else ""
    print(f"`python {' '.join(sys.argv)}`\n")
    print(f"{machine(options.device)}, {options.threads} threads; {name}{blocks}, {options.dtype};")
    print(f"{options.samples} windows of {options.length} tokens (tokenizing: {tokenizing:.1f} s);")
    print(f"2:4, blocks of {originals.BLOCK_SIZE} columns, damping {originals.DAMPING};")
    print(f"our methods take {options.batch_size} windows at a time, the original codes one.\n")
    header = (
        "method",
        f"all {unit}",
        "× original",
        *COLUMNS,
        "peak MiB",
        "rel. loss",
        "perplexity",
    )
    print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}", flush=True)
    base = None
    theirs = [m for m, (_, option) in ORIGINALS.items() if getattr(options, option)]
    for method in [*theirs, *options.methods]:
        result = in_a_process(method, given)
        base = base or (result.total if theirs else None)
        cells = [
            method,
            f"{result.total:.1f}",
            f"{result.total / base:.2f}" if base else "",
            *(f"{s:.1f}" if s else "" for s in result.seconds.values()),
            f"{result.peak:.0f}",
            f"{result.relative_loss:.4f}",
            f"{result.perplexity:.2f}" if result.perplexity else "",
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=Path("runs/smollm2"), metavar="DIR")
    parser.add_argument("--shape", choices=SHAPES, help="random weights and tokens, no --model")
    parser.add_argument("--methods", nargs="*", default=["SS", "SM", "JM"])
    parser.add_argument("--bits", type=int, help="put the kept weights on our grid, too")
    parser.add_argument("--sparsegpt", type=Path, help="a checkout of IST-DASLab/sparsegpt")
    parser.add_argument("--alps", type=Path, help="a checkout of mazumder-lab/ALPS")
    parser.add_argument("--blocks", type=int, help="only the first blocks of the model")
    parser.add_argument("--samples", type=int, default=64, help="calibration windows")
    parser.add_argument("--length", type=int, default=512, help="tokens a window")
    parser.add_argument("--batch-size", type=int, default=4, help="windows we take at once")
    parser.add_argument(
        "--text", type=Path, nargs="*", default=[], help="calibration (default: Python's library)"
    )
    parser.add_argument("--perplexity", type=Path, metavar="FILE", help="a text to measure it on")
    parser.add_argument("--windows", type=int, default=160, help="most windows of that text")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--threads", type=int, default=1)
    return parser


if __name__ == "__main__":
    main()
