"""Pruning a checkpoint that is larger than the memory that the process may take.

    python lab/benchmarks/streaming.py --directory /tmp/streaming --gigabytes 4 --limit 2.5

It writes a random LLaMA-shaped checkpoint, never holding more of it than one file, and prunes it
three times, each in a process of its own: in memory and streamed under the limit (`ulimit -d`,
which counts all memory that is the process's own, and mapped files only if they may be written),
and in memory without. They run side by side, and every bit of the two results is compared. What
larger models take follows from a formula, whose constants for the solver are measured on small
layers; for the streamed run it stands beside what was taken. The directory is removed at the end.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from memory_formula import GB, VOCABULARY, Shape, print_formula
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

FILE_BYTES = 400_000_000


def write_checkpoint(directory: Path, shape: Shape) -> None:
    """Write random weights as a sharded checkpoint of transformers."""
    from transformers import LlamaConfig

    directory.mkdir(parents=True)
    LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.blocks,
        num_attention_heads=shape.hidden // 128,
        num_key_value_heads=shape.key_values // 128,
        tie_word_embeddings=False,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(directory)
    places, held, files = {}, dict[str, Tensor](), 0
    for name, size in [*_tensors(shape), ("", (0,))]:
        if held and (not name or sum(t.nbytes for t in held.values()) > FILE_BYTES):
            files += 1
            file = f"model-{files:05}.safetensors"
            save_file(held, directory / file, {"format": "pt"})
            places |= dict.fromkeys(held, file)
            held = {}
        if name:
            one = len(size) == 1
            held[name] = torch.ones(size) if one else torch.randn(size) / size[1] ** 0.5
            held[name] = held[name].bfloat16()
    index = {"metadata": {"total_size": shape.model_bytes}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def _tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    h, i, kv = shape.hidden, shape.intermediate, shape.key_values
    yield "model.embed_tokens.weight", (VOCABULARY, h)
    for k in range(shape.blocks):
        for name, size in {
            "self_attn.q_proj": (h, h),
            "self_attn.k_proj": (kv, h),
            "self_attn.v_proj": (kv, h),
            "self_attn.o_proj": (h, h),
            "mlp.gate_proj": (i, h),
            "mlp.up_proj": (i, h),
            "mlp.down_proj": (h, i),
            "input_layernorm": (h,),
            "post_attention_layernorm": (h,),
        }.items():
            yield f"model.layers.{k}.{name}.weight", size
    yield "model.norm.weight", (h,)
    yield "lm_head.weight", (VOCABULARY, h)


def own_memory() -> int:
    """Return the bytes that `ulimit -d` counts."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))


@contextmanager
def watched() -> Iterator[dict[str, int]]:
    """The peak memory of the process, sampled every 5 ms."""
    found, done = {"peak": own_memory()}, threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            found["peak"] = max(found["peak"], own_memory())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


def prune(directory: str, out: str, method: str, streaming: str, tokens: str) -> None:
    """Prune a checkpoint: what a child process does. Its peak is the last line that it prints."""
    from torch.utils.data import DataLoader

    from callbacks import PruningCallback
    from mrp_lightning import CausalLM, Trainer
    from mrp_lightning.embedded import STDLIB_LLAMA

    windows, length = map(int, tokens.split("x"))
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(0, VOCABULARY, (windows, length), generator=generator)

    def run(model: Any, save_dir: str | None, windows: Tensor, **options: Any) -> None:
        callback = PruningCallback(method=method, pattern="2:4", save_dir=save_dir)
        trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
        loader = DataLoader(windows, batch_size=1)
        trainer.predict(CausalLM(model, **options), loader, callbacks=[callback])

    run(STDLIB_LLAMA, None, data[:1, :16] % 100)  # a tiny model, to load all that is needed
    libraries = own_memory()
    with watched() as found:
        run(directory, out, data, streaming=streaming == "True")
    print(json.dumps(found | {"libraries": libraries}))


def solve(method: str, rows: str, columns: str) -> None:
    """Prune one layer: what a child process does. What it took is the last line that it prints."""
    from mrp_lightning import prune_weight

    inputs = torch.randn(2 * int(columns), int(columns))
    hessian = inputs.T @ inputs / int(columns)
    del inputs
    weight = torch.randn(int(rows), int(columns), dtype=torch.bfloat16)
    before = own_memory()
    with watched() as found:
        prune_weight(weight, hessian, pattern="2:4", method=method)
    print(json.dumps({"peak": found["peak"] - before}))


def child(*args: object, limit: float | None = None) -> dict[str, int] | str:
    """Call a function of this file in a process of its own.

    Returns:
        What it printed last, or the error that ended it.
    """
    bytes_ = resource.RLIM_INFINITY if limit is None else int(limit * GB)
    command = [sys.executable, __file__, "--child", str(bytes_), *map(str, args)]
    here = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": here, "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if ended.returncode:
        print(ended.stderr, file=sys.stderr)
        return ended.stderr.strip().splitlines()[-1].partition(" from ")[0]
    found: dict[str, int] = json.loads(ended.stdout.strip().splitlines()[-1])
    return found


def solver_constants(method: str) -> tuple[float, float]:
    """Return how many float32 numbers one layer takes a weight, and a number of its Hessian."""
    shapes = [(1024, 1024), (2816, 1024), (1024, 2816)]
    taken = []
    for rows, columns in shapes:
        found = child("solve", method, rows, columns)
        assert not isinstance(found, str), found
        taken.append(found["peak"] / 4)
    sizes = torch.tensor([[rows * columns, columns**2] for rows, columns in shapes]).double()
    fitted = torch.linalg.lstsq(sizes, torch.tensor(taken).double()[:, None]).solution
    return max(0.0, float(fitted[0])), max(0.0, float(fitted[1]))


def differences(one: Path, other: Path) -> tuple[int, list[str]]:
    """Return how many tensors two checkpoints hold, and which differ in any bit."""
    mine, theirs = (dict(_places(d)) for d in (one, other))
    differ = sorted(mine.keys() ^ theirs.keys())
    for name in mine.keys() & theirs.keys():
        with safe_open(mine[name], "pt") as a, safe_open(theirs[name], "pt") as b:
            bits = [opened.get_tensor(name).view(torch.int16) for opened in (a, b)]
            if not torch.equal(*bits):
                differ.append(name)
    return len(mine), differ


def _places(directory: Path) -> Iterator[tuple[str, Path]]:
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            yield from ((name, file) for name in opened.keys())  # noqa: SIM118


def main() -> None:
    """Measure, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, required=True, help="must not exist")
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--limit", type=float, default=2.5, help="GB")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=5632)
    parser.add_argument("--tokens", default="8x128", help="WINDOWSxLENGTH")
    parser.add_argument("--method", default="magnitude")
    args = parser.parse_args()
    windows, length = map(int, args.tokens.split("x"))
    shape = Shape(args.hidden, args.intermediate, 1, args.hidden, windows, length)
    blocks = -(-(args.gigabytes * GB - shape.rest_bytes) // shape.block_bytes)
    shape = replace(shape, blocks=int(blocks))
    print(f"`python {' '.join(sys.argv)}`\n")

    source, outs = args.directory / "source", dict[bool, Path]()
    taken: Any = None
    write_checkpoint(source, shape)
    try:
        runs = [(False, args.limit), (True, args.limit), (False, None)]
        with ThreadPoolExecutor() as pool:
            started = []
            for streaming, limit in runs:
                out = outs[streaming] = args.directory / f"{streaming}-{limit}"
                prune_it = partial(child, "prune", source, out, args.method, streaming, args.tokens)
                started.append(pool.submit(prune_it, limit=limit))
            fitted = {name: pool.submit(solver_constants, name) for name in (args.method, "SM")}
        print("| blocks are | limit | peak of own memory | result |")
        print("| --- | --- | --- | --- |")
        for (streaming, limit), run in zip(runs, started, strict=True):
            found = run.result()
            bounds = "none" if limit is None else f"{limit:g} GB"
            where = "streamed" if streaming else "in memory"
            if isinstance(found, str):
                print(f"| {where} | {bounds} | | {found} |")
                continue
            taken = found if streaming else taken
            result = f"pruned, {shape.model_bytes / GB:.2f} GB"
            print(f"| {where} | {bounds} | {found['peak'] / GB:.2f} GB | {result} |")
        count, differ = differences(*outs.values())
        print(f"\nOf {count} tensors of the two results, {len(differ)} differ in any bit.\n")
        constants = {name: future.result() for name, future in fitted.items()}
        print_formula(args.method, shape, taken, constants)
    finally:
        shutil.rmtree(args.directory)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[2]),) * 2)
        work: Any = {"prune": prune, "solve": solve}[sys.argv[3]]
        work(*sys.argv[4:])
    else:
        main()
