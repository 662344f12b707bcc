r"""Smaller models as files for llama.cpp: bytes, whether it computes the same, and tokens a second.

    .venv-vllm/bin/python lab/benchmarks/smaller_files.py DENSE RUN RUN… --files DIR --text FILE.txt
    .venv-vllm/bin/python lab/benchmarks/smaller_files.py DENSE RUN RUN… --files DIR --speed

The first checkpoint is the dense model: bytes and times are fractions of its. Files that are not in
`--files` are written. With `--text`, 200 strings of the text are tokenized by llama.cpp and by the
checkpoint's tokenizer, and the log-probabilities of the 20 likeliest tokens after 64 tokens are
compared with those of transformers, in float32, from the weights of the file. llama.cpp rounds
activations to 8 bits, so that they agree to some hundredths. With `--speed`, the median of
`--rounds` times on one core of a token and of a prompt of 256, the files in turn; nothing else may
run. `make vllm` makes the environment.
"""

import argparse
import json
import statistics
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import xllamacpp
from transformers import AutoModelForCausalLM, AutoTokenizer

from export import to_gguf

STRINGS, LENGTH = 200, 100
"""Strings of the text, and characters of each."""
CONTEXT, PLACES = 64, 4
"""Tokens before those whose log-probabilities are compared, and the places in the text."""
PROMPT, TOKENS = 256, 64


def main() -> None:
    """Print a row for each file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("checkpoints", nargs="+", type=Path, help="the dense model, then smaller ones")
    option("--types", nargs="+", default=["q8_0", "q4_0"])
    option("--files", type=Path, required=True, help="directory of the GGUF files")
    option("--text", type=Path, help="text on which tokens and logits are compared")
    option("--speed", action="store_true", help="time llama.cpp on a quiet machine")
    option("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.files.mkdir(parents=True, exist_ok=True)
    columns = ["type", "model", "MB", "bytes"]
    columns += ["same tokens", "log-probabilities"] if options.text else []
    columns += ["tokens/s", "time", "prompt tokens/s", "prompt time"] if options.speed else []
    print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
    for kind in options.types:
        files = [converted(checkpoint, kind, options.files) for checkpoint in options.checkpoints]
        seconds = times(files, options.rounds) if options.speed else [()] * len(files)
        for checkpoint, file, spent in zip(options.checkpoints, files, seconds, strict=True):
            size, of_dense = file.stat().st_size, files[0].stat().st_size
            cells = [kind, checkpoint.name, f"{size / 1e6:.1f}", f"{size / of_dense:.3f}"]
            cells += [*compared(checkpoint, file, options.text)] if options.text else []
            for own, dense in zip(spent, seconds[0], strict=True):
                cells += [f"{1 / own:.1f}", f"{own / dense:.3f}"]
            print(f"| {' | '.join(cells)} |", flush=True)


def converted(checkpoint: Path, kind: str, files: Path) -> Path:
    """Return the GGUF file of a checkpoint."""
    file = files / f"{checkpoint.name}-{kind}.gguf"
    if not file.exists():
        to_gguf.main([str(checkpoint), "--type", kind, "--out", str(file)])
    return file


def started(file: Path) -> Any:
    """Return llama.cpp with a file, on one core."""
    settings: Any = xllamacpp.CommonParams()
    settings.model.path, settings.n_ctx, settings.n_parallel = str(file), 512, 1
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    return xllamacpp.Server(settings)


def compared(checkpoint: Path, file: Path, text_file: Path) -> Iterator[str]:
    """Yield the part of the strings with the same tokens, and the largest difference."""
    text, server = text_file.read_text("utf-8"), started(file)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    step = len(text) // STRINGS
    strings = [text[i * step : i * step + LENGTH] for i in range(STRINGS)]
    same = sum(tokens(server, s) == tokenizer(s).input_ids for s in strings)
    yield f"{same} of {STRINGS}"
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    ).eval()
    ids = tokenizer(text[: 20 * PLACES * CONTEXT]).input_ids
    largest = 0.0
    for place in range(PLACES):
        window = ids[place * CONTEXT : (place + 1) * CONTEXT]
        request = {"prompt": window, "max_tokens": 1, "temperature": 0.0, "logprobs": 20}
        (choice,) = server.handle_completions(request)["choices"]
        top = choice["logprobs"]["content"][0]["top_logprobs"]
        with torch.inference_mode():
            own = model(torch.tensor([window])).logits[0, -1].log_softmax(0)
        differences = torch.tensor([row["logprob"] for row in top]) - own[[r["id"] for r in top]]
        largest = max(largest, float(differences.abs().max()))
    yield f"± {largest:.3f}"


def tokens(server: Any, text: str) -> list[int]:
    """Return the tokens that llama.cpp makes of a text."""
    body = json.dumps({"content": text, "add_special": True}).encode()
    request = urllib.request.Request(f"{server.listening_address}/tokenize", body)
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request) as answer:
        return list(json.load(answer)["tokens"])


def times(files: Sequence[Path], rounds: int) -> list[tuple[float, ...]]:
    """Return the median seconds of a new token, and of a token of a prompt, of each file."""
    servers = [started(file) for file in files]
    spent: list[list[tuple[float, float]]] = [[] for _ in files]
    for number in range(rounds):
        # Another first token each time, since llama.cpp keeps a prompt that begins alike.
        request = {"prompt": [5 + number, *range(20, 19 + PROMPT)], "max_tokens": TOKENS,
                   "temperature": 0.0, "ignore_eos": True, "cache_prompt": False}  # fmt: skip
        # Files take turns, so that a machine that slows down slows all of them.
        for server, of_file in zip(servers, spent, strict=True):
            timings = server.handle_completions(request)["timings"]
            of_file.append((timings["predicted_per_token_ms"], timings["prompt_per_token_ms"]))
    return [
        tuple(statistics.median(each) / 1000 for each in zip(*of_file, strict=True))
        for of_file in spent
    ]


if __name__ == "__main__":
    main()
