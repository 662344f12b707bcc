"""Packed products of one to hundreds of tokens on a CPU, beside those of dense weights.

    python lab/benchmarks/many_tokens.py --threads 1 2 [--dtype float32] >> lab/results/cpu.md

Dense is `torch.nn.functional.linear`; packed are weights with 50% zeros, the same with four bits,
and these times activations that are rounded to 8 bits. Weights are random. Each contestant has
copies that are larger than any cache, which are read in turn; contestants take turns, round after
round. A time is the median of the rounds; above 1 is a product that is faster than the dense one.
`--way` names the kernels of packed weights: a run for each compares tiles (AMX) with the others.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import quantised
import random_layers
import torch
from torch import Tensor, nn

from export import Bitmask4Linear
from mrp_lightning.devices import machine
from mrp_sparse.kernels import library
from mrp_sparse.packed_linear import PackedLinear

SHAPES = ("2048x2048", "8192x2048", "2048x8192", "896x4864")
TOKENS = (1, 2, 3, 4, 8, 9, 16, 32, 64, 256)
SIDES = (quantised.DENSE, "50%", "50% 4 bits", f"50% 4 bits{quantised.ROUNDED}")
WAYS = {"best": 0, "vectors": 1, "portable": 2, "tiles": 3}
"""`Way` in `mrp_sparse/kernels/cpu/operators.cpp`."""


class OneWay(nn.Module):
    """A packed layer of bits, without a bias, whose products are computed in a key of `WAYS`."""

    def __init__(self, layer: PackedLinear, way: str) -> None:
        super().__init__()
        self.layer, self.way = layer, WAYS[way]

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., columns) to (..., rows)."""
        layer = self.layer
        rounds = [layer.eight_bit_activations] if isinstance(layer, Bitmask4Linear) else []
        operator = getattr(torch.ops.mrp_lightning_cpu, layer.FORMAT.operator)
        return operator(x, *layer.packed(), layer.offsets, None, *rounds, self.way)


def time_layer(shape: str, options: argparse.Namespace) -> Iterator[list[str]]:
    """Rows of the table of a shape: a number of tokens each."""
    rows, columns = map(int, shape.split("x"))
    contestants = []
    for side in SIDES:
        linear = nn.Linear(columns, rows, bias=False, dtype=options.dtype).requires_grad_(False)
        layer = quantised.layer_of(linear, side).to(options.dtype)
        layer = layer if side == quantised.DENSE else OneWay(layer, options.way)
        contestants.append(random_layers.Copies(layer, options.cold_mib * 2**20))
    for tokens in options.tokens:
        x = torch.randn(tokens, columns).to(options.dtype)
        times: list[list[float]] = [[] for _ in contestants]
        for _ in range(1 + options.rounds):
            for copies, measured in zip(contestants, times, strict=True):
                begin = time.perf_counter()
                copies(x)
                measured.append((time.perf_counter() - begin) / len(copies.layers))
        dense, *packed = (statistics.median(measured[1:]) for measured in times)  # the first warms
        ratios = (f"{seconds * 1e6:.0f} | {dense / seconds:.2f}" for seconds in packed)
        yield [str(tokens), f"{dense * 1e6:.0f}", *ratios]


def main() -> None:
    """Run the command line."""
    options = _parser().parse_args()
    # Linux would kill the process at the first instruction.
    if options.way == "tiles" and "amx_int8" not in Path("/proc/cpuinfo").read_text():
        raise SystemExit("--way tiles needs a CPU with AMX, and /proc/cpuinfo names no amx_int8.")
    if not library.load():
        raise SystemExit("The kernels for packed weights are missing; the warning above says why.")
    write = sys.stdout.write
    write("\n## Many tokens\n\n")
    write(f"`python {' '.join(sys.argv)}`, {machine(torch.device('cpu'))}.\n")
    sides = ("50%, µs", "4 bits, µs", "integers, µs")
    header = ("tokens", "dense, µs", *(cell for side in sides for cell in (side, "× dense")))
    with torch.inference_mode():
        for threads in options.threads:
            torch.set_num_threads(threads)
            for shape in options.layers:
                title = f"{shape}, threads: {threads}"
                random_layers.table(title, header, time_layer(shape, options), write)
                sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", nargs="*", default=SHAPES, metavar="ROWSxCOLUMNS")
    parser.add_argument("--tokens", nargs="*", type=int, default=TOKENS)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    dtype = {"type": lambda name: getattr(torch, name), "default": torch.bfloat16}
    parser.add_argument("--dtype", **dtype, help="bfloat16 (default) or float32")
    parser.add_argument("--way", choices=WAYS, default="best", help="kernels of packed weights")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold-mib", type=int, default=128, help="MiB of copies of a layer")
    return parser


if __name__ == "__main__":
    main()
