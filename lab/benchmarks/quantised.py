r"""Decoding on a CPU with weights of few bits: ours, PyTorch's and llama.cpp's, taking turns.

    mrp-lightning sweep --config configs/sweeps/bits.yaml
    python lab/benchmarks/quantised.py --llama LLAMA.CPP/build/bin \
        --out lab/results/quantised.md \
        --sweep configs/sweeps/bits.yaml --sweep-model SmolLM2-WikiText2

METHOD. Weights and the positions of zeros are random, since speed does not depend on their values;
2:4 follows its pattern. All contestants run with one thread, once a round. A time is CPU time of
the process: the least of the rounds, and their median. The copies of a layer are larger than any
cache and are read in turn. A model is a shape: a decoding step is compiled ahead of time
(`mrp_sparse.compiled_step`), for dense bfloat16 as for packed weights, with a static cache of 256
positions, all of which the attention reads. Each contestant is a process of its own, which waits
while others run. llama.cpp's time is that of `llama-bench -p 0 -n LONG` less that of `-n SHORT`,
each with `-t 1 -r 1`, which excludes loading. Our head is bfloat16 unless a row says otherwise;
llama.cpp quantises its head by its own rules, as the bytes that a token reads show. PyTorch's int4
is its own kernel with a bfloat16 scale and zero point for every 64 columns, measured in single
layers only: AOTInductor keeps its group size in constants that are no part of the model. "no
product" is the part of a step that is not spent in products: a step, less our operators called one
after the other on the same weights, whose call overhead (64 rows of 64) is subtracted first.

With `--sweep`, the perplexities of a sweep's runs are listed with those of PyTorch's int4,
llama.cpp's types, with and without an importance matrix of the calibration text, and, with
`--gptq`, of a checkout of IST-DASLab/gptq, all on the same windows; two pictures are drawn beside
`--out`. Times are those of the same shape with random weights.
"""

import argparse
import ctypes
import gc
import multiprocessing
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cpu
import few_bits
import llama_bench
import torch
from few_bits_pictures import drawings
from torch import Tensor, nn

from export import Bitmask4Linear
from mrp_ground.environment import machine
from mrp_sparse.compiled_step import CompiledStep
from mrp_sparse.decoding import storage_bytes
from mrp_sparse.eight_bit_head import round_head
from mrp_sparse.kernels import compiled
from mrp_sparse.packed_linear import PackedLinear

SHAPES = ("4096x4096", "5632x2048", "1536x576")
SMOLLM2 = {"model_type": "llama", "hidden_size": 576, "num_attention_heads": 9}
SMOLLM2 |= {"num_key_value_heads": 3, "intermediate_size": 1536, "num_hidden_layers": 30}
SMOLLM2 |= {"vocab_size": 49152, "tie_word_embeddings": True}
cpu.MODELS["SmolLM2-135M"] = SMOLLM2
MODELS = ("SmolLM2-135M", "TinyLlama-1.1B", "LLaMA-3.2-1B")
DENSE, INT4, ROUNDED = "dense bf16", "PyTorch int4", ", activations 8 bits"
HEAD = ", head 8 bits"
OURS = ("50%", "2:4", "70%", "50% 4 bits", "2:4 4 bits", "70% 4 bits")
OURS += (f"50% 4 bits{ROUNDED}", f"70% 4 bits{ROUNDED}")
HEADS = tuple(f"{side}{HEAD}" for side in ("50% 4 bits", "70% 4 bits", f"50% 4 bits{ROUNDED}"))
SIDES = (DENSE, *OURS, *HEADS)
TYPES = ("BF16", "Q8_0", "Q4_K_M", "Q4_0", "Q3_K_M")
IMATRIX = ("Q4_0", "Q3_K_M", "IQ2_XS")


def on_grid(weight: Tensor) -> Tensor:
    """Return a weight whose values are random codes times one scale, with the zeros that it has."""
    codes = torch.randint(1, 9, weight.shape) * (2 * torch.randint(2, weight.shape) - 1)
    return (codes * 2.0**-10 * (weight != 0)).to(weight.dtype)


def layer_of(linear: nn.Linear, side: str) -> nn.Module:
    """Return the layer as a contestant has it, with random weights."""
    if side == DENSE:
        return linear
    if side == INT4:
        return cpu.FourBit(linear)
    sparsity = side.split()[0]
    if "4 bits" not in side:
        return cpu.packed(linear, sparsity)
    linear.weight.data = on_grid(
        cpu.pruned(linear.out_features, linear.in_features, cpu.SPARSITIES[sparsity])
    )
    layer = Bitmask4Linear.from_linear(linear)
    layer.eight_bit_activations = ROUNDED in side
    return layer


def least_and_median(rounds: Sequence[Mapping[str, float]]) -> dict[str, tuple[float, float]]:
    """By contestant, what its rounds give."""
    return {
        side: (min(times), statistics.median(times))
        for side in rounds[0]
        for times in [[found[side] for found in rounds]]
    }


def cpu_seconds(call: Callable[[], object]) -> float:
    """CPU time of this thread in a call."""
    begin = time.thread_time()
    call()
    return time.thread_time() - begin


def time_layer(shape: str, options: argparse.Namespace) -> Iterator[list[str]]:
    """Rows of the table of a layer."""
    rows, columns = map(int, shape.split("x"))
    sides = {}
    for side in (DENSE, *OURS, INT4):
        linear = nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        sides[side] = cpu.Copies(layer_of(linear, side), options.cold_mib * 2**20)
    x = torch.randn(1, columns).bfloat16()
    found = []
    with torch.inference_mode():
        for copies in sides.values():
            copies(x)
        for _ in range(options.rounds):
            found.append({
                side: cpu_seconds(lambda c=copies: c(x)) / len(copies.layers)
                for side, copies in sides.items()
            })  # fmt: skip
    times = least_and_median(found)
    for side, (least, median) in times.items():
        bits = 8 * storage_bytes(sides[side].layers[0]) / (rows * columns)
        row = (shape, side, f"{bits:.2f}", f"{least * 1e6:.0f}", f"{median * 1e6:.0f}")
        yield [*row, *(f"{times[other][0] / least:.2f}" for other in (DENSE, INT4))]


# ---- Whole models, each in a process of its own ----


def serve(pipe: Connection, name: str, side: str, tokens: int) -> None:
    """Build a model and its step, then measure it each time that something is received."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    compiled.load()
    model = cpu.model_of(name).requires_grad_(False)
    head = model.get_output_embeddings()
    for path, linear in list(model.named_modules()):
        if isinstance(linear, nn.Linear) and linear is not head:
            model.set_submodule(path, layer_of(linear, side))
    if HEAD in side:
        round_head(model)
        head = model.get_output_embeddings()
    gc.collect()
    blocks: list[Any] = [m for m in model.modules() if isinstance(m, PackedLinear)]
    blocks = blocks or [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    weights = sum(m.in_features * m.out_features for m in blocks)
    bits = 8 * sum(map(storage_bytes, blocks)) / weights
    step = CompiledStep(model, tokens + 2)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # gigabytes of compiling, of each contestant, would stay
    pipe.send((bits, cpu.bytes_of_step(model)))
    token = torch.ones(1, 1, dtype=torch.int64)

    def some() -> None:
        for _ in range(tokens):
            step(token)

    while pipe.recv():
        step.read(token)
        step(token)
        pipe.send((cpu_seconds(some) / tokens, products(blocks, head, side)))


def products(blocks: Sequence[nn.Module], head: nn.Module, side: str) -> float:
    """Seconds of CPU of all products of a step, without what Python takes to call them."""
    tiny = layer_of(nn.Linear(64, 64, bias=False, dtype=torch.bfloat16).requires_grad_(False), side)
    x = torch.randn(1, 64).bfloat16()
    calls = [(m, torch.randn(1, m.in_features).bfloat16()) for m in (*blocks, head)]
    with torch.inference_mode():
        whole = cpu_seconds(lambda: [module(given) for module, given in calls])
        tiny(x)
        calling = cpu_seconds(lambda: [tiny(x) for _ in range(400)]) / 400
    return whole - calling * len(calls)


def time_model(name: str, options: argparse.Namespace) -> Iterator[list[str]]:
    """Rows of the table of a model: ours, PyTorch's, llama.cpp's."""
    context = multiprocessing.get_context("spawn")
    pipes, workers, facts = {}, [], {}
    for side in options.sides:
        here, there = context.Pipe()
        worker = context.Process(
            target=serve, args=(there, name, side, llama_bench.LONG), daemon=True
        )
        worker.start()
        workers.append(worker)
        pipes[side] = here
        facts[side] = here.recv()  # built before the next, so that nothing runs beside it
    with tempfile.TemporaryDirectory() as place:
        files = {}
        if options.llama:
            settings = cpu.MODELS[name]
            files = llama_bench.files_of(settings, Path(place), options.llama, options.types)
        found, rests = [], []
        for _ in range(options.rounds):
            times, rest = {}, {}
            for side, pipe in pipes.items():
                pipe.send(True)
                times[side], of_products = pipe.recv()
                rest[side] = 1 - of_products / times[side]
            for kind, file in files.items():
                times[f"llama.cpp {kind}"] = llama_bench.seconds_a_token(file, options.llama)
            found.append(times)
            rests.append(rest)
        sizes = {f"llama.cpp {kind}": file.stat().st_size for kind, file in files.items()}
    for pipe in pipes.values():
        pipe.send(False)
    for worker in workers:
        worker.join()
    median_rest = {side: statistics.median(r[side] for r in rests) for side in pipes}
    for side, (least, median) in least_and_median(found).items():
        bits, read = facts.get(side, (None, sizes.get(side, 0)))
        yield [
            name,
            side,
            "" if bits is None else f"{bits:.2f}",
            f"{read / 2**20:.0f}",
            f"{least * 1e3:.2f}",
            f"{median * 1e3:.2f}",
            f"{1 / least:.1f}",
            f"{median_rest[side]:.0%}" if side in median_rest else "",
        ]


def kept(rows: Iterator[list[str]], into: list[list[str]]) -> Iterator[list[str]]:
    """The rows, which are kept as they pass."""
    for row in rows:
        into.append(row)
        yield row


def write_costs(
    options: argparse.Namespace, times: Mapping[str, float], write: Callable[[str], None]
) -> None:
    """The table of perplexities beside the times of a model, and their pictures."""
    found: list[few_bits.Cost] = []
    by_weights: dict[str, float] = {}
    dense = 0.0

    def rows() -> Iterator[list[str]]:
        nonlocal dense
        for cost in few_bits.costs(options.sweep_model, options):
            found.append(cost)
            dense = cost.perplexity if cost.weights == few_bits.DENSE else dense
            side = DENSE if cost.weights == few_bits.DENSE else cost.weights
            time = times.get(side.removesuffix(" imatrix"))
            if time is not None:
                by_weights[cost.weights] = time
            ratio = f"{cost.perplexity / dense:.3f}" if dense else ""
            cells = [cost.weights, cost.way, f"{cost.bits:.2f}", f"{cost.perplexity:.2f}", ratio]
            yield [*cells, "" if time is None else f"{time:.2f}"]

    header = ("weights", "by", "bits a weight", "perplexity", "× dense", "ms a token")
    cpu.table(f"Perplexity, {options.sweep_model}", header, rows(), write)
    if options.out:
        for name, drawn in drawings(found, by_weights).items():
            file = options.out.with_name(f"{options.out.stem}-{name}.svg")
            file.write_bytes(drawn.svg)
            write(f"\n![{drawn.alt}]({file.name})\n")


def main() -> None:
    """Run the command line."""
    options = _parser().parse_args()
    torch.set_num_threads(1)
    if not compiled.load():
        raise SystemExit("The kernels for packed weights are missing; the warning above says why.")
    page = options.out and options.out.open("w", encoding="utf-8")

    def write(text: str) -> None:
        for stream in filter(None, (sys.stdout, page)):
            stream.write(text)
            stream.flush()

    method = (__doc__ or "").split("METHOD. ")[-1]
    command = f"python lab/benchmarks/quantised.py {shlex.join(sys.argv[1:])}"
    write(f"# Sparse and four bits on a CPU\n\n{method}\n```\n{command}\n```\n\n")
    write(f"Machine: {machine(torch.device('cpu'))}.\n")
    times = ("µs", "median", "× dense", "× int4")
    for shape in options.layers:
        header = ("rows×columns", "weights", "bits a weight", *times)
        cpu.table(shape, header, time_layer(shape, options), write)
    times: dict[str, dict[str, float]] = {}
    for name in options.models:
        header = ("model", "weights", "bits a weight of the blocks", "MiB a token reads")
        header += ("ms a token", "median", "tokens/s", "no product")
        rows: list[list[str]] = []
        cpu.table(name, header, kept(time_model(name, options), rows), write)
        times[name] = {row[1]: float(row[4]) for row in rows}
    if options.sweep:
        torch.set_num_threads(multiprocessing.cpu_count())  # nothing is timed any more
        write_costs(options, times.get(options.models[0], {}) if options.models else {}, write)
    if page:
        page.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--llama", type=Path, metavar="DIR", help="where llama-bench and llama-quantize are")
    option("--layers", nargs="*", default=SHAPES, metavar="ROWSxCOLUMNS")
    option("--models", nargs="*", choices=MODELS, default=MODELS)
    option("--sides", nargs="*", default=SIDES, choices=SIDES)
    option("--types", nargs="*", default=TYPES, metavar="TYPE", help="of llama.cpp, after BF16")
    option("--rounds", type=int, default=5)
    option("--cold-mib", type=int, default=512, help="MiB of copies of a layer")
    option("--sweep", metavar="YAML", help="whose perplexities are compared with others'")
    what = "a model of the sweep; the times beside it are those of the first of --models"
    option("--sweep-model", default="SmolLM2-WikiText2", metavar="NAME", help=what)
    option("--gptq", type=Path, metavar="DIR", help="a checkout of IST-DASLab/gptq")
    what = "of llama.cpp, with an importance matrix"
    option("--imatrix", nargs="*", default=IMATRIX, metavar="TYPE", help=what)
    what = "batches of windows, if fewer than the sweep's: to try out the command"
    option("--batches", type=int, metavar="N", help=what)
    option("--out", type=Path, metavar="FILE", help="write the tables there, too")
    return parser


if __name__ == "__main__":
    main()
