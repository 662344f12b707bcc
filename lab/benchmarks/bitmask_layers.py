"""Time bitmask layers on a CUDA device against the same weight stored dense.

    python lab/benchmarks/bitmask_layers.py --shapes 4096x4096 14336x4096 4096x14336
    python lab/benchmarks/bitmask_layers.py --shapes 4096x4096 --sparsity 0.7 --tokens 1 16

A layer is pruned at random to the sparsity in each row; with four bits, its kept weights lie on
the grid of `bitmask4`. Calls are replayed from a CUDA graph and rotate over weights of 512 MiB
dense, so that none stays in the cache; the contestants take turns. Each result is compared with a
product in float32 first.
"""

import argparse
import functools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from export.comparison import bandwidth
from export.timing import copies, graphed, take_turns, why_wrong
from mrp_ground.environment import machine
from mrp_sparse.formats import bitmask, bitmask4
from mrp_sparse.kernels.bitmask_dispatch import multiply, multiply_coded

DTYPE = torch.bfloat16
Packed = tuple[Tensor, ...]


def random_weight(rows: int, columns: int, sparsity: float, device: torch.device) -> Tensor:
    """Return a weight on the grid of four bits, with the same number of zeros in each row."""
    codes = torch.randint(1, 8, (rows, columns), device=device, dtype=DTYPE)
    signs = torch.randint(0, 2, (rows, columns), device=device, dtype=DTYPE) * 2 - 1
    removed = torch.rand(rows, columns, device=device).argsort(1) < round(sparsity * columns)
    return (codes * signs).masked_fill_(removed, 0.0) / 64


def packed(weight: Tensor) -> tuple[Packed, Packed]:
    """Return the operands of both formats, without input and bias."""
    values, bits = bitmask.pack(weight)
    nibbles, coded_bits, scales = bitmask4.pack(weight)
    return (
        (values, bits, bitmask.row_offsets(bits)),
        (nibbles, coded_bits, scales, bitmask4.row_offsets(coded_bits)),
    )


def measure(
    rows: int, columns: int, sparsity: float, tokens: list[int], device: torch.device
) -> Iterator[str]:
    """Yield the rows of the table for one shape."""
    number = copies(rows * columns * DTYPE.itemsize)
    dense = [random_weight(rows, columns, sparsity, device) for _ in range(number)]
    both = [packed(weight) for weight in dense]
    sides: dict[str, tuple[list[Packed], Callable[..., Tensor]]] = {
        "dense": ([(weight,) for weight in dense], F.linear),
        "bitmask": ([one for one, _ in both], lambda x, *w: multiply(x, *w, None)),
        "bitmask4": ([other for _, other in both], lambda x, *w: multiply_coded(x, *w, None)),
    }
    for count in tokens:
        x = torch.randn(count, columns, dtype=DTYPE, device=device)
        runs = {}
        for name, (weights, product) in sides.items():
            if fault := why_wrong(product(x, *weights[0]), x, dense[0]):
                raise SystemExit(f"{name}, {rows}x{columns}, {count} tokens: {fault}")
            runs[name] = graphed([functools.partial(product, x, *w) for w in weights])
        timings = take_turns(runs, 20)
        for name, (weights, _) in sides.items():
            time = timings[name]
            size = sum(part.nbytes for part in weights[0])
            yield (
                f"| {rows}×{columns} | {count} | {name} | {time.median:.1f} "
                f"| {time.low:.1f}–{time.high:.1f} "
                f"| {timings['dense'].median / time.median:.2f} | {size / 2**20:.1f} "
                f"| {size / time.median / 1e3:.0f} |"
            )


def size(text: str) -> tuple[int, int]:
    """Read 4096x14336."""
    rows, _, columns = text.partition("x")
    return int(rows), int(columns or rows)


@torch.no_grad()
def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", type=size, default=[(4096, 4096), (14336, 4096)])
    parser.add_argument("--sparsity", type=float, default=0.5)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 16, 64, 256])
    options = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    print(f"{machine(device)}, {DTYPE}, {options.sparsity:.0%} zeros;")
    print(f"a large copy moves {bandwidth(device) / 1e9:.0f} GB/s, reads and writes together.\n")
    print("| out × in | tokens | weight | µs | 20–80% | × dense | MiB | GB/s |")
    print("|---|---|---|---|---|---|---|---|")
    for rows, columns in options.shapes:
        for line in measure(rows, columns, options.sparsity, options.tokens, device):
            print(line, flush=True)


if __name__ == "__main__":
    main()
