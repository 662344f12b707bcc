r"""Whether llama.cpp computes from a GGUF file what transformers computes from the checkpoint.

    python -m export.to_gguf RUN --like SOURCE.gguf
    python lab/benchmarks/llamacpp.py RUN RUN-bf16.gguf --llamacpp BUILD/bin --text FILE.txt
    python lab/benchmarks/llamacpp.py RUN RUN-bf16.gguf --llamacpp BUILD/bin --speed

Perplexity as `llama-perplexity` has it: windows of 512 tokens, of which the second half counts.
llama.cpp rounds activations in its own way, so the two agree to some thousandths, not to the bit.
With `--speed`, what `llama-bench` says of decoding, in tokens a second on one thread.
"""

import argparse
import json
import math
import re
import subprocess
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

CONTEXT = 512


def by_llamacpp(binaries: Path, file: Path, text: Path, chunks: int) -> float:
    """Return the perplexity that `llama-perplexity` finds."""
    command = [binaries / "llama-perplexity", "-m", file, "-f", text, "-c", CONTEXT, "-t", 1]
    command += ["-b", CONTEXT, "--chunks", chunks]
    for _ in range(10):  # its log is not always written to the end before it ends
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
        found = re.search(rf"\[{chunks}\]([\d.]+),", done.stdout)
        if found is not None:
            return float(found[1])
    raise SystemExit(f"llama-perplexity failed ({done.returncode}):\n{done.stderr[-2000:]}")


def by_transformers(directory: Path, text: Path, chunks: int) -> float:
    """Return the same of the checkpoint, in float32."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = torch.tensor(tokenizer(text.read_text("utf-8"), add_special_tokens=False).input_ids)
    losses = []
    with torch.no_grad():
        for window in ids[: chunks * CONTEXT].view(chunks, 1, CONTEXT):
            logits = model(window).logits[0, CONTEXT // 2 : -1]
            losses.append(cross_entropy(logits, window[0, CONTEXT // 2 + 1 :]))
    return math.exp(float(torch.stack(losses).mean()))


def speed(binaries: Path, file: Path) -> str:
    """Tokens a second of decoding, mean and spread."""
    command = [binaries / "llama-bench", "-m", file, "-p", 0, "-n", 128, "-r", 5, "-t", 1]
    done = subprocess.run([*map(str, command), "-o", "json"], capture_output=True, check=True)
    (found,) = json.loads(done.stdout)
    return f"{found['avg_ts']:.1f} ± {found['stddev_ts']:.1f} tokens/s"


def main() -> None:
    """Print one line for the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--llamacpp", type=Path, required=True, help="where its binaries lie")
    parser.add_argument("--text", type=Path, help="text to compare perplexities on")
    parser.add_argument("--chunks", type=int, default=8, help="windows of the text")
    parser.add_argument("--speed", action="store_true", help="time decoding on a quiet machine")
    options = parser.parse_args()
    torch.set_num_threads(1)
    size = options.file.stat().st_size / 2**20
    line = f"{options.file.name}: {size:.1f} MiB"
    if options.text is not None:
        ours = by_transformers(options.checkpoint, options.text, options.chunks)
        theirs = by_llamacpp(options.llamacpp, options.file, options.text, options.chunks)
        line += f", perplexity {ours:.4f} in transformers, {theirs:.4f} in llama.cpp"
    if options.speed:
        line += f", {speed(options.llamacpp, options.file)}"
    print(line)


if __name__ == "__main__":
    main()
