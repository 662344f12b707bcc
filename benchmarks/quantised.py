"""Decoding on a CPU with weights of few bits: ours, PyTorch's and llama.cpp's, taking turns.

    python benchmarks/quantised.py --llama LLAMA.CPP/build/bin --out docs/benchmarks/quantised.md

METHOD. Speed does not depend on what weights mean: they are random, and so are the places of the
zeros, but for those of 2:4. All run with one thread, in rounds, each contestant once a round; a
time is CPU time of the process, the least of the rounds and their median. A layer's copies are
more than any cache holds, and are read in turn. A model is a shape: a step of decoding is compiled
ahead of time (`export.compiled_step`), for dense bfloat16 just as for packed weights, with a
static cache of 256 places that the attention looks at whole; each contestant is a process of its
own that waits while others run. llama.cpp's time is that of `llama-bench -p 0 -n LONG` less that
of `-n SHORT`, each with `-t 1 -r 1`, so that loading is left out. Our head and PyTorch's are
bfloat16, llama.cpp's is quantised by its own rules: the bytes that a token reads tell. PyTorch's
int4 is its kernel with a bfloat16 scale and zero for each 64 columns. The rest is a step less its
products: our operators, called one after the other for the same weights, less what such a call
takes for 64 rows of 64.
"""

import argparse
import gc
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cpu
import torch
from torch import Tensor, nn

from export import Bitmask4Linear
from export.compiled_step import CompiledStep
from export.speed.twins import storage_bytes
from mrp_lightning.environment import machine
from mrp_lightning.kernels import compiled
from mrp_lightning.packed.packed_linear import PackedLinear

SHAPES = ("4096x4096", "5632x2048", "1536x576")
SMOLLM2 = {"model_type": "llama", "hidden_size": 576, "num_attention_heads": 9}
SMOLLM2 |= {"num_key_value_heads": 3, "intermediate_size": 1536, "num_hidden_layers": 30}
SMOLLM2 |= {"vocab_size": 49152, "tie_word_embeddings": True}
cpu.MODELS["SmolLM2-135M"] = SMOLLM2
MODELS = ("SmolLM2-135M", "TinyLlama-1.1B", "LLaMA-3.2-1B")
DENSE, INT4, ROUNDED = "dense bf16", "PyTorch int4", ", activations 8 bits"
OURS = ("50%", "2:4", "70%", "50% 4 bits", "2:4 4 bits", "70% 4 bits")
OURS += (f"50% 4 bits{ROUNDED}", f"70% 4 bits{ROUNDED}")
TYPES = ("BF16", "Q8_0", "Q4_K_M", "Q4_0", "Q3_K_M")
LONG, SHORT = 48, 16


def on_grid(weight: Tensor) -> Tensor:
    """A weight whose values are random codes times one scale, with the zeros that it has."""
    codes = torch.randint(1, 9, weight.shape) * (2 * torch.randint(2, weight.shape) - 1)
    return (codes * 2.0**-10 * (weight != 0)).to(weight.dtype)


def layer_of(linear: nn.Linear, side: str) -> nn.Module:
    """The layer as a contestant has it, with random weights."""
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
    torch.manual_seed(0)  # the places decide how long codes are, and so whether a step is compiled
    compiled.load()
    model = cpu.model_of(name).requires_grad_(False)
    head = model.get_output_embeddings()
    for path, linear in list(model.named_modules()):
        if isinstance(linear, nn.Linear) and linear is not head:
            model.set_submodule(path, layer_of(linear, side))
    gc.collect()
    blocks = [m for m in model.modules() if isinstance(m, PackedLinear | cpu.FourBit)]
    blocks = blocks or [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    weights = sum(m.in_features * _rows(m) for m in blocks)
    bits = 8 * sum(map(storage_bytes, blocks)) / weights
    step = CompiledStep(model, tokens + 2)
    pipe.send((bits, cpu.bytes_of_step(model)))
    token = torch.ones(1, 1, dtype=torch.int64)

    def some() -> None:
        for _ in range(tokens):
            step(token)

    while pipe.recv():
        step.read(token)
        step(token)
        pipe.send((cpu_seconds(some) / tokens, products(blocks, head, side)))


def _rows(layer: Any) -> int:
    scales = getattr(layer, "scales", None)  # of PyTorch's int4
    return int(layer.out_features if scales is None else scales.shape[1])


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
        worker = context.Process(target=serve, args=(there, name, side, LONG), daemon=True)
        worker.start()
        workers.append(worker)
        pipes[side] = here
        facts[side] = here.recv()  # built before the next, so that nothing runs beside it
    with tempfile.TemporaryDirectory() as place:
        files = gguf_files(name, Path(place), options) if options.llama else {}
        found, rests = [], []
        for _ in range(options.rounds):
            times, rest = {}, {}
            for side, pipe in pipes.items():
                pipe.send(True)
                times[side], of_products = pipe.recv()
                rest[side] = 1 - of_products / times[side]
            for kind, file in files.items():
                times[f"llama.cpp {kind}"] = of_llama_bench(file, options.llama)
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


def of_llama_bench(file: Path, binaries: Path) -> float:
    """Seconds of CPU a token of llama.cpp."""
    spent = []
    for tokens in (SHORT, LONG):
        arguments = ["-m", file, "-p", 0, "-n", tokens, "-r", 1, "-t", 1, "-o", "json"]
        command = [str(part) for part in (binaries / "llama-bench", *arguments)]
        ended = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        _, status, used = os.wait4(ended.pid, 0)
        if status:
            raise SystemExit(f"{' '.join(command)} failed: {ended.stderr.read().decode()[-300:]}")
        spent.append(used.ru_utime + used.ru_stime)
    return (spent[1] - spent[0]) / (LONG - SHORT)


def gguf_files(name: str, place: Path, options: argparse.Namespace) -> dict[str, Path]:
    """A model of the shape as llama.cpp reads it, in each of its types."""
    whole = place / "BF16.gguf"
    write_gguf(name, whole)
    files = {"BF16": whole}
    for kind in options.types:
        if kind != "BF16":
            files[kind] = place / f"{kind}.gguf"
            command = [options.llama / "llama-quantize", whole, files[kind], kind, "1"]
            subprocess.run(list(map(str, command)), check=True, capture_output=True)
    return files


def write_gguf(name: str, file: Path) -> None:
    """Random weights of a LLaMA's shape, in bfloat16."""
    import gguf

    settings = cpu.MODELS[name]
    hidden, heads = settings["hidden_size"], settings["num_attention_heads"]
    keys = hidden // heads * settings["num_key_value_heads"]
    wide, words = settings["intermediate_size"], settings["vocab_size"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(2048)
    writer.add_embedding_length(hidden)
    writer.add_block_count(settings["num_hidden_layers"])
    writer.add_feed_forward_length(wide)
    writer.add_head_count(heads)
    writer.add_head_count_kv(settings["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(words)
    writer.add_tokenizer_model("no_vocab")

    def add(tensor: str, *shape: int) -> None:
        values = (torch.randn(shape) * 0.02).bfloat16().view(torch.uint16).numpy().view("uint8")
        writer.add_tensor(f"{tensor}.weight", values, raw_dtype=gguf.GGMLQuantizationType.BF16)

    def norm(tensor: str) -> None:
        writer.add_tensor(f"{tensor}.weight", torch.ones(hidden).numpy())

    add("token_embd", words, hidden)
    norm("output_norm")
    if not settings.get("tie_word_embeddings"):
        add("output", words, hidden)
    shapes = {"attn_q": (hidden, hidden), "attn_k": (keys, hidden), "attn_v": (keys, hidden)}
    shapes |= {"attn_output": (hidden, hidden), "ffn_gate": (wide, hidden)}
    shapes |= {"ffn_up": (wide, hidden), "ffn_down": (hidden, wide)}
    for block in range(settings["num_hidden_layers"]):
        for tensor, shape in shapes.items():
            add(f"blk.{block}.{tensor}", *shape)
        norm(f"blk.{block}.attn_norm")
        norm(f"blk.{block}.ffn_norm")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
    command = " ".join(["python benchmarks/quantised.py", *sys.argv[1:]])
    write(f"# Sparse and four bits on a CPU\n\n{method}\n```\n{command}\n```\n\n")
    write(f"Machine: {machine(torch.device('cpu'))}.\n")
    times = ("µs", "median", "× dense", "× int4")
    for shape in options.layers:
        header = ("rows×columns", "weights", "bits a weight", *times)
        cpu.table(shape, header, time_layer(shape, options), write)
    for name in options.models:
        header = ("model", "weights", "bits a weight of the blocks", "MiB a token reads")
        header += ("ms a token", "median", "tokens/s", "no product")
        cpu.table(name, header, time_model(name, options), write)
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
    option("--sides", nargs="*", default=(DENSE, *OURS, INT4), choices=(DENSE, *OURS, INT4))
    option("--types", nargs="*", default=TYPES, metavar="TYPE", help="of llama.cpp, after BF16")
    option("--rounds", type=int, default=5)
    option("--cold-mib", type=int, default=512, help="MiB of copies of a layer")
    option("--out", type=Path, metavar="FILE", help="write the tables there, too")
    return parser


if __name__ == "__main__":
    main()
