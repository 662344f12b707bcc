r"""Layers with weights of few bits on a CPU, ours and PyTorch's; and what few bits cost.

    mrp-lightning sweep --config lab/sweeps/bits.yaml
    python lab/benchmarks/quantised.py --llama LLAMA.CPP/build/bin \
        --out lab/results/quantised.md \
        --sweep lab/sweeps/bits.yaml --sweep-model SmolLM2-WikiText2

METHOD. Weights and the positions of zeros are random, since speed does not depend on their values;
2:4 follows its pattern. All contestants run with one thread, once a round. A time is CPU time of
the process: the least of the rounds, and their median. The copies of a layer are larger than any
cache and are read in turn. A model is a shape, of which bytes are counted; its head is bfloat16
unless a row says otherwise. PyTorch's int4 is its own kernel with a bfloat16 scale and zero point
for every 64 columns.

With `--sweep`, the perplexities of a sweep's runs are listed with those of PyTorch's int4,
llama.cpp's types, with and without an importance matrix of the calibration text, and, with
`--gptq`, of a checkout of IST-DASLab/gptq, all on the same windows.
"""

import argparse
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import few_bits
import random_layers
import torch
from torch import Tensor, nn

from export import Bitmask4Linear
from export.loading import storage_bytes
from mrp_lightning.devices import machine
from mrp_sparse.eight_bit_head import round_head
from mrp_sparse.kernels import library
from mrp_sparse.packed_linear import PackedLinear

SHAPES = ("4096x4096", "5632x2048", "1536x576")
MODELS = ("SmolLM2-135M",)
DENSE, INT4, ROUNDED = "dense bf16", "PyTorch int4", ", activations 8 bits"
HEAD = ", head 8 bits"
OURS = ("50%", "2:4", "70%", "50% 4 bits", "2:4 4 bits", "70% 4 bits")
OURS += (f"50% 4 bits{ROUNDED}", f"70% 4 bits{ROUNDED}")
HEADS = tuple(f"{side}{HEAD}" for side in ("50% 4 bits", "70% 4 bits", f"50% 4 bits{ROUNDED}"))
SIDES = (DENSE, *OURS, *HEADS)
TYPES = ("Q8_0", "Q4_K_M", "Q4_0", "Q3_K_M")
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
        return random_layers.FourBit(linear)
    sparsity = side.split()[0]
    if "4 bits" not in side:
        return random_layers.packed(linear, sparsity)
    linear.weight.data = on_grid(
        random_layers.pruned(
            linear.out_features, linear.in_features, random_layers.SPARSITIES[sparsity]
        )
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
        sides[side] = random_layers.Copies(layer_of(linear, side), options.cold_mib * 2**20)
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


# ---- Whole models ----


def model_sizes(name: str, sides: Sequence[str]) -> Iterator[list[str]]:
    """Rows of the table of a model's shape: bits of its blocks, and bytes that a token reads."""
    for side in sides:
        torch.manual_seed(0)
        model = random_layers.model_of(name).requires_grad_(False)
        head = model.get_output_embeddings()
        for path, linear in list(model.named_modules()):
            if isinstance(linear, nn.Linear) and linear is not head:
                model.set_submodule(path, layer_of(linear, side))
        if HEAD in side:
            round_head(model)
            head = model.get_output_embeddings()
        others: list[Any] = [m for m in model.modules() if m is not head]
        blocks = [m for m in others if isinstance(m, PackedLinear)]
        blocks = blocks or [m for m in others if isinstance(m, nn.Linear)]
        weights = sum(m.in_features * m.out_features for m in blocks)
        bits = 8 * sum(map(storage_bytes, blocks)) / weights
        yield [name, side, f"{bits:.2f}", f"{random_layers.bytes_of_step(model) / 2**20:.0f}"]


def write_costs(options: argparse.Namespace, write: Callable[[str], None]) -> None:
    """The table of perplexities over bits."""
    dense = 0.0

    def rows() -> Iterator[list[str]]:
        nonlocal dense
        for cost in few_bits.costs(options.sweep_model, options):
            dense = cost.perplexity if cost.weights == few_bits.DENSE else dense
            ratio = f"{cost.perplexity / dense:.3f}" if dense else ""
            yield [cost.weights, cost.way, f"{cost.bits:.2f}", f"{cost.perplexity:.2f}", ratio]

    header = ("weights", "by", "bits a weight", "perplexity", "× dense")
    random_layers.table(f"Perplexity, {options.sweep_model}", header, rows(), write)


def main() -> None:
    """Run the command line."""
    options = _parser().parse_args()
    torch.set_num_threads(1)
    if not library.load():
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
        random_layers.table(shape, header, time_layer(shape, options), write)
    for name in options.models:
        header = ("model", "weights", "bits a weight of the blocks", "MiB a token reads")
        random_layers.table(name, header, model_sizes(name, options.sides), write)
    if options.sweep:
        torch.set_num_threads(os.cpu_count() or 1)  # nothing is timed any more
        write_costs(options, write)
    if page:
        page.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--llama", type=Path, metavar="DIR", help="where llama-quantize is")
    option("--layers", nargs="*", default=SHAPES, metavar="ROWSxCOLUMNS")
    option("--models", nargs="*", choices=MODELS, default=MODELS)
    option("--sides", nargs="*", default=SIDES, choices=SIDES)
    option("--types", nargs="*", default=TYPES, metavar="TYPE", help="of llama.cpp")
    option("--rounds", type=int, default=5)
    option("--cold-mib", type=int, default=512, help="MiB of copies of a layer")
    option("--sweep", metavar="YAML", help="whose perplexities are compared with others'")
    option("--sweep-model", default="SmolLM2-WikiText2", metavar="NAME", help="of the sweep")
    option("--gptq", type=Path, metavar="DIR", help="a checkout of IST-DASLab/gptq")
    what = "of llama.cpp, with an importance matrix"
    option("--imatrix", nargs="*", default=IMATRIX, metavar="TYPE", help=what)
    what = "batches of windows, if fewer than the sweep's: to try out the command"
    option("--batches", type=int, metavar="N", help=what)
    option("--out", type=Path, metavar="FILE", help="write the tables there, too")
    return parser


if __name__ == "__main__":
    main()
