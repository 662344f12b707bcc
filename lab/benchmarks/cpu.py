"""Decoding on a CPU: packed weights of any sparsity against dense ones, in layers and whole models.

    python lab/benchmarks/cpu.py --threads 1 2 --model SMOLLM2_DIR --out lab/results/cpu.md

Weights and the places of zeros are random, since speed does not depend on their values. Dense
is the fastest of eager and compiled code in bfloat16 and float32; packed is the fastest of eager
and compiled code in bfloat16. The copies of a layer are larger than any cache and are read in turn;
more than 128 of them are not compiled, which would take minutes. A step of decoding is one token
after a prompt, at batch 1. A model's head stays dense. `runs/SmolLM2-135M` is a link to any
directory that `make real` has written, such as `runs/real/SmolLM2-stdlib/2of4-best-seed0`. For
comparison, dense weights of 4 bits run by PyTorch's own kernel, with a bfloat16 scale and zero for
each 64 columns.
"""

import argparse
import copy
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from export import BitmaskLinear, Sparse24Linear
from export.loading import storage_bytes
from export.speed import Decoder
from mrp_lightning.devices import machine
from mrp_sparse.kernels import library
from mrp_sparse.packed_linear import PackedLinear

LAYERS = ("576x576", "1536x576", "2048x2048", "5632x2048", "4096x4096", "11008x4096", "4096x11008")
LLAMA = {"model_type": "llama", "hidden_size": 2048, "num_attention_heads": 32}
MODELS: dict[str, dict[str, Any]] = {
    "TinyLlama-1.1B": LLAMA
    | {"vocab_size": 32000, "intermediate_size": 5632, "num_hidden_layers": 22}
    | {"num_key_value_heads": 4},
    "LLaMA-3.2-1B": LLAMA
    | {"vocab_size": 128256, "intermediate_size": 8192, "num_hidden_layers": 16}
    | {"num_key_value_heads": 8, "tie_word_embeddings": True},
}
SPARSITIES = {"50%": 0.5, "2:4": None, "70%": 0.7, "80%": 0.8}
FOUR_BITS, GROUP = "4-bit", 64
MOST_COMPILED = 128
PROMPT = 128
"""Tokens before those that are decoded."""


class Copies(nn.Module):
    """More copies of a layer than any cache holds, to be multiplied one after the other."""

    def __init__(self, layer: nn.Module, num_bytes: int) -> None:
        super().__init__()
        count = max(2, -(-num_bytes // storage_bytes(layer)))
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(count))

    def forward(self, x: Tensor) -> list[Tensor]:
        """Multiply with one copy after the other."""
        return [layer(x) for layer in self.layers]


class FourBit(nn.Module):
    """A layer with weights of 4 bits, and a scale and a zero for each `GROUP` of columns."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, rows = linear.in_features, linear.out_features
        weight = torch.randint(16, (rows, self.in_features), dtype=torch.int32)
        tiled = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight, 1)
        self.weight = nn.Parameter(tiled, requires_grad=False)
        scales = torch.rand(self.in_features // GROUP, rows, 2) * self.in_features**-0.5
        self.register_buffer("scales", scales.bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        """Multiply tokens (..., columns)."""
        multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
        y = multiply(x.reshape(-1, self.in_features), self.weight, GROUP, self.scales)
        return y.view(*x.shape[:-1], -1)


def pruned(rows: int, columns: int, sparsity: float | None) -> Tensor:
    """Return random weights in bfloat16 with a sparsity, or 2:4 for `None`."""
    weight = torch.empty(rows, columns, dtype=torch.bfloat16).uniform_(-1, 1)
    if sparsity is None:
        pairs = list(itertools.combinations(range(4), 2))
        of_four = torch.tensor([[place in pair for place in range(4)] for pair in pairs])
        kept = of_four[torch.randint(len(pairs), (rows, columns // 4))].view(rows, columns)
    else:
        kept = torch.rand(rows, columns) >= sparsity
    return weight * kept


def packed(linear: nn.Linear, name: str) -> PackedLinear | FourBit:
    """Return the layer with weights of a key of `SPARSITIES`, packed; or of four bits."""
    if name == FOUR_BITS:
        return FourBit(linear)
    with torch.no_grad():
        weight = pruned(linear.out_features, linear.in_features, SPARSITIES[name])
        linear.weight.copy_(weight * linear.in_features**-0.5)
    kind = Sparse24Linear if name == "2:4" else BitmaskLinear
    return kind.from_linear(linear)


def median_seconds(call: Callable[[], object], repeats: int) -> float:
    """Return the CPU time of a call, after one call to warm up."""
    call()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def ways(module: nn.Module, compile_too: bool) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Return the module itself, and compiled for constant weights."""
    yield "eager", module
    if compile_too:
        torch._dynamo.reset()
        yield "compiled", torch.compile(module, options={"freezing": True})


def bandwidth() -> float:
    """Bytes a second at which these threads read memory: the best of some sums."""
    words = torch.ones(2**28, dtype=torch.float32)  # 1 GiB
    return words.nbytes / min(median_seconds(words.sum, 3) for _ in range(3))


def time_layer(shape: str, options: argparse.Namespace, peak: float) -> Iterator[list[str]]:
    """Rows of the table: dense, each sparsity, four bits."""
    rows, columns = map(int, shape.split("x"))
    linear = nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    sides: dict[str, list[nn.Module]] = {
        "dense": [linear, copy.deepcopy(linear).float()],
        **{name: [packed(copy.deepcopy(linear), name)] for name in (*SPARSITIES, FOUR_BITS)},
    }
    dense = 0.0
    for name, layers in sides.items():
        found = []
        for layer in layers:
            copies = Copies(layer, options.cold_mib * 2**20)
            dtype = torch.float32 if layer.weight.dtype == torch.float32 else torch.bfloat16
            x = torch.randn(1, columns, dtype=dtype)
            few = len(copies.layers) <= MOST_COMPILED
            for way, run in ways(copies, options.compile and few):
                seconds = median_seconds(lambda run=run, x=x: run(x), options.repeats)
                seconds /= len(copies.layers)
                kind = f"{way}, {str(dtype).removeprefix('torch.')}"
                found.append((seconds, kind, storage_bytes(layer)))
            del copies, run
            gc.collect()
        seconds, way, num_bytes = min(found)
        dense = dense or seconds
        yield [
            shape,
            name,
            way,
            f"{seconds * 1e6:.0f}",
            f"{num_bytes / 2**20:.2f}",
            f"{num_bytes / seconds / peak:.0%}",
            f"{dense / seconds:.2f}",
        ]


def model_of(name: str) -> Any:
    """Return a key of `MODELS` with random weights, or what a directory holds, in bfloat16."""
    if name in MODELS:
        settings = dict(MODELS[name])
        config = AutoConfig.for_model(settings.pop("model_type"), **settings)
        with no_init_weights():  # a normal distribution takes half a minute
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        for parameter in model.parameters():
            parameter.data.uniform_(-0.02, 0.02)
        return model.eval()
    return AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16).eval()


def pack_blocks(model: Any, sparsity: str) -> None:
    """Pack all linear layers but the head, or give them four bits, one by one, in place."""
    head = model.get_output_embeddings()
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}
    for name, linear in linears.items():
        model.set_submodule(name, packed(linear, sparsity))


def bytes_of_step(model: Any) -> int:
    """Return the bytes of weights that one token reads: only one row of separate embeddings."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    return storage_bytes(model) - (0 if head.weight is table.weight else storage_bytes(table))


def time_model(name: str, options: argparse.Namespace, peak: float) -> Iterator[list[str]]:
    """Rows of the table: dense, each sparsity, four bits. One model at a time is in memory."""
    dense = 0.0
    for side in ("dense", *SPARSITIES, FOUR_BITS):
        found = []
        for dtype in (torch.bfloat16, torch.float32) if side == "dense" else (torch.bfloat16,):
            model = model_of(name)
            if side != "dense":
                pack_blocks(model, side)
            model.to(dtype)
            prompt = torch.randint(model.config.vocab_size, (1, PROMPT))
            with torch.inference_mode():
                first = median_seconds(lambda m=model, p=prompt: m(p, logits_to_keep=1), 3)
                for way, run in ways(model, options.compile):
                    step = decode_seconds(model, run, prompt, options)
                    kind = f"{way}, {str(dtype).removeprefix('torch.')}"
                    found.append((step, kind, first, storage_bytes(model), bytes_of_step(model)))
            del model, run
            gc.collect()
        step, kind, first, num_bytes, num_read = min(found)
        dense = dense or step
        yield [
            Path(name).name,
            side,
            kind,
            f"{1 / step:.1f}",
            f"{first:.2f}",
            f"{num_bytes / 2**20:.0f}",
            f"{num_read / step / peak:.0%}",
            f"{dense / step:.2f}",
        ]


def decode_seconds(
    model: Any, run: Callable[..., Any], prompt: Tensor, options: argparse.Namespace
) -> float:
    """Return the seconds a token."""
    decoder = Decoder(model, prompt, options.new_tokens, run)

    def some() -> None:
        decoder.rewind()
        for _ in range(options.new_tokens):
            decoder.step()

    return median_seconds(some, options.repeats) / options.new_tokens


def table(title: str, header: Sequence[str], rows: Iterator[list[str]], write: Any) -> None:
    """Write a table row by row, as they come."""
    write(f"\n### {title}\n\n| {' | '.join(header)} |\n|{'---|' * len(header)}\n")
    for row in rows:
        write(f"| {' | '.join(row)} |\n")


def main() -> None:
    """Run the command line."""
    options = _parser().parse_args()
    if not library.load():
        raise SystemExit("The kernels for packed weights are missing; the warning above says why.")
    page = options.out and options.out.open("w", encoding="utf-8")

    def write(text: str) -> None:
        for file in filter(None, (sys.stdout, page)):
            file.write(text)
            file.flush()

    description = (__doc__ or "").split("\n\n")[-1]
    command = " ".join(["python lab/benchmarks/cpu.py", *sys.argv[1:]])
    write(f"# Packed weights on a CPU\n\n{description}\n```\n{command}\n```\n\n")
    write(f"Machine: {machine(torch.device('cpu'))}.\n")
    names = [*options.models, *options.model]
    for threads in options.threads:
        torch.set_num_threads(threads)
        peak = bandwidth()
        write(f"\n## Threads: {threads}\n\nMemory is read at {peak / 1e9:.1f} GB/s.\n")
        header = ("rows×columns", "weights", "way", "µs", "MiB", "of the bandwidth", "× dense")
        with torch.inference_mode():
            for shape in options.layers:
                table(shape, header, time_layer(shape, options, peak), write)
        header = ("model", "weights", "way", "tokens/s", "s to the first", "MiB", *header[-2:])
        for name in names:
            table(Path(name).name, header, time_model(name, options, peak), write)
    if page:
        page.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", nargs="*", default=LAYERS, metavar="ROWSxCOLUMNS")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--model", nargs="*", default=[], metavar="DIR", help="further models")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--new-tokens", type=int, default=32, help="steps of decoding a repeat")
    parser.add_argument("--cold-mib", type=int, default=1024, help="MiB of copies of a layer")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the tables there, too")
    return parser


if __name__ == "__main__":
    main()
