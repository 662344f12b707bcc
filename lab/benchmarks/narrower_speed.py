r"""Decoding with narrower models in llama.cpp and in transformers, beside the dense one.

    python lab/benchmarks/narrower_speed.py RUN RUN... --like SOURCE.gguf --llamacpp BUILD/bin

A run is a directory that pruning wrote, of the model in SOURCE.gguf. Each is a file for llama.cpp
by `export.to_gguf`, and so is the dense model, in each of `--types`. All run with one thread, in
rounds, each contestant once a round; a time is CPU time, the least of the rounds. llama.cpp's is
that of `llama-bench -p 0 -n LONG` less that of `-n SHORT`, so that loading is left out;
transformers' that of greedy steps in bfloat16, uncompiled, after a prompt of as many tokens.
`bytes` and `time` are over the dense model's: where reading weights takes the time, they are one.
"""

import argparse
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import llama_bench
import random_layers
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from export import to_gguf
from mrp_lightning.devices import machine
from mrp_lightning.models.loading import load_model, load_tokenizer
from mrp_lightning.models.saving import save_pretrained

DENSE, TRANSFORMERS = "dense", "transformers"


def save_dense(source: Path, place: Path) -> Path:
    """Return the dense model as a directory."""
    directory = place / DENSE
    directory.mkdir()
    model, tokenizer = load_model(str(source), torch.bfloat16), load_tokenizer(source)
    save_pretrained(model, directory, tokenizer=tokenizer)
    return directory


def converted(run: Path, kind: str, source: Path, place: Path) -> Path:
    """Return a run as a file for llama.cpp."""
    out = place / f"{run.name}-{kind}.gguf"
    to_gguf.main([str(run), "--like", str(source), "--type", kind, "--out", str(out)])
    return out


def seconds_a_step(model: PreTrainedModel) -> float:
    """Return the CPU seconds of a token in transformers, uncompiled."""
    tokens, cache = torch.ones(1, llama_bench.LONG, dtype=torch.int64), None
    with torch.inference_mode():
        for step in range(llama_bench.LONG + 1):
            if step == 1:
                begin = time.thread_time()
            found = model(tokens, past_key_values=cache, use_cache=True)
            tokens, cache = found.logits[:, -1:].argmax(-1), found.past_key_values
    return (time.thread_time() - begin) / llama_bench.LONG


def measure(options: argparse.Namespace, place: Path) -> list[list[str]]:
    """Rows of the table."""
    runs = {DENSE: save_dense(options.like, place)} | {run.name: run for run in options.runs}
    files = {
        (name, kind): converted(run, kind, options.like, place)
        for name, run in runs.items()
        for kind in options.types
    }
    models = {
        name: AutoModelForCausalLM.from_pretrained(run, dtype=torch.bfloat16)
        for name, run in runs.items()
    }
    sizes = {key: file.stat().st_size for key, file in files.items()}
    for name, model in models.items():
        sizes[name, TRANSFORMERS] = sum(p.nbytes for p in model.parameters())
    times: dict[tuple[str, str], list[float]] = {key: [] for key in sizes}
    for _ in range(options.rounds):
        for key, file in files.items():
            times[key].append(llama_bench.seconds_a_token(file, options.llamacpp))
        for name, model in models.items():
            times[name, TRANSFORMERS].append(seconds_a_step(model))
    rows = []
    for kind in (*options.types, TRANSFORMERS):
        for name in runs:
            least, most = min(times[name, kind]), max(times[name, kind])
            by_bytes = sizes[name, kind] / sizes[DENSE, kind]
            by_time = least / min(times[DENSE, kind])
            cells = [f"{1 / least:.1f}", f"{1 / most:.1f}", f"{by_bytes:.3f}", f"{by_time:.3f}"]
            rows.append([kind, name, f"{sizes[name, kind] / 2**20:.1f}", *cells])
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--like", type=Path, required=True, help="the GGUF file of the model")
    parser.add_argument("--llamacpp", type=Path, required=True, help="where its binaries lie")
    parser.add_argument("--types", nargs="*", default=["bf16", "q8_0", "q4_0"])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    header = ("by", "model", "MiB", "tokens/s", "least", "bytes", "time")
    print(f"{machine(torch.device('cpu'))}.")
    with TemporaryDirectory() as place:
        random_layers.table(
            "Decoding", header, iter(measure(options, Path(place))), sys.stdout.write
        )


if __name__ == "__main__":
    main()
