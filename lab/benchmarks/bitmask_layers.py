"""Time bitmask layers on a CUDA device against the same weight stored dense.

    python lab/benchmarks/bitmask_layers.py --shapes 4096x4096 14336x4096 4096x14336
    python lab/benchmarks/bitmask_layers.py --shapes 4096x4096 --sparsity 0.7 --tokens 1 16
    python lab/benchmarks/bitmask_layers.py --search --tokens 1 16 64

A layer is pruned at random to the sparsity in each row; with four bits, its kept weights lie on
the grid of `bitmask4`. Calls are replayed from a CUDA graph and rotate over weights of 512 MiB
dense, so that none stays in the cache; the contestants take turns. Each result is compared with a
product in float32 first. `--search` compares sizes of the programs instead, of which the fastest
belong into `triton_bitmask`.
"""

import argparse
import functools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from shapes import copies, why_wrong
from torch import Tensor

from export.speed import graphed, microseconds, take_turns
from mrp_ground.environment import machine
from mrp_sparse.formats import bitmask, bitmask4
from mrp_sparse.kernels import triton_bitmask
from mrp_sparse.kernels.bitmask_dispatch import multiply, multiply_coded
from mrp_sparse.kernels.triton_bitmask import Sizes

DTYPE = torch.bfloat16
ONE_TOKEN = [
    Sizes(rows=4, parts=4, warps=4, unroll=4),
    Sizes(rows=4, parts=4, warps=4, unroll=8),
    Sizes(rows=2, parts=4, warps=4, unroll=8),
    Sizes(rows=4, parts=8, warps=4, unroll=2),
    Sizes(rows=8, parts=4, warps=4, unroll=2),
    Sizes(rows=4, parts=8, warps=8, unroll=4),
]
SOME_TOKENS = [
    Sizes(rows=16, parts=4, warps=4, tokens=16),
    Sizes(rows=16, parts=8, warps=4, tokens=16),
    Sizes(rows=16, parts=8, warps=8, tokens=16),
    Sizes(rows=16, parts=16, warps=8, tokens=16),
]
MORE_TOKENS = [
    Sizes(rows=16, parts=4, warps=4, tokens=64),
    Sizes(rows=16, parts=8, warps=8, tokens=64),
    Sizes(rows=32, parts=4, warps=8, tokens=64),
]
UNPACK = [
    Sizes(rows=4, parts=4, warps=4, unroll=4),
    Sizes(rows=4, parts=4, warps=4, unroll=8),
    Sizes(rows=4, parts=8, warps=8, unroll=2),
]
"""Candidates of `--search`."""
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


def searched(
    rows: int, columns: int, sparsity: float, tokens: list[int], device: torch.device
) -> Iterator[str]:
    """Yield the sizes of programs with their times, the fastest of a case first."""
    number = copies(rows * columns * DTYPE.itemsize)
    dense = [random_weight(rows, columns, sparsity, device) for _ in range(number)]
    both = [packed(weight) for weight in dense]
    stored = {
        "bitmask": [(values, bits, None, offsets) for (values, bits, offsets), _ in both],
        "bitmask4": [coded for _, coded in both],
    }
    for name, weights in stored.items():
        for count in tokens:
            x = torch.randn(count, columns, dtype=DTYPE, device=device)
            runs = {"dense": graphed([functools.partial(F.linear, x, w) for w in dense])}
            for label, product in _candidates(count, columns):
                if fault := why_wrong(product(x, *weights[0]), x, dense[0]):
                    raise SystemExit(f"{name}, {rows}x{columns}, {count} tokens, {label}: {fault}")
                runs[label] = graphed([functools.partial(product, x, *w) for w in weights])
            timings = take_turns(runs, 10)
            for label in sorted(timings, key=lambda label: timings[label].median):
                median = timings[label].median
                yield f"{rows}×{columns} {name}, {count} tokens: {median:.1f} µs, {label}"


def _candidates(tokens: int, columns: int) -> Iterator[tuple[str, Callable[..., Tensor]]]:
    """Yield the ways to multiply so many tokens: products, and for many also unpacked weights."""
    for sizes in ONE_TOKEN if tokens == 1 else SOME_TOKENS if tokens <= 16 else MORE_TOKENS:
        yield (
            str(sizes),
            lambda x, *w, sizes=sizes: triton_bitmask.product(x, *w, None, sizes),
        )
    for sizes in UNPACK if tokens > 16 else []:
        yield (
            f"unpacked by {sizes}",
            lambda x, *w, sizes=sizes: F.linear(x, triton_bitmask.unpack(*w, columns, sizes)),
        )


def bandwidth(device: torch.device) -> float:
    """Return the bytes a second of a large copy on a device, reads and writes together."""
    source = torch.empty(2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    once = {"copy": lambda: microseconds(lambda: target.copy_(source))}
    return 2 * source.nbytes / (take_turns(once, 10)["copy"].median * 1e-6)


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
    parser.add_argument("--search", action="store_true", help="compare sizes of the programs")
    options = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    print(f"{machine(device)}, {DTYPE}, {options.sparsity:.0%} zeros;")
    print(f"a large copy moves {bandwidth(device) / 1e9:.0f} GB/s, reads and writes together.\n")
    if options.search:
        for rows, columns in options.shapes:
            for line in searched(rows, columns, options.sparsity, options.tokens, device):
                print(line, flush=True)
        return
    print("| out × in | tokens | weight | µs | 20–80% | × dense | MiB | GB/s |")
    print("|---|---|---|---|---|---|---|---|")
    for rows, columns in options.shapes:
        for line in measure(rows, columns, options.sparsity, options.tokens, device):
            print(line, flush=True)


if __name__ == "__main__":
    main()
