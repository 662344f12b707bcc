r"""Tokens a second of a run of the evidence in vLLM and llama.cpp, as rows of its table.

    RUN=Qwen2.5-Coder-0.5B-WikiText2/50-SM-s128-seed0
    python -m mrp_lightning sweep --config configs/sweeps/evidence.yaml \
        --config configs/sweeps/evidence_kept.yaml --only $RUN
    .venv-vllm/bin/python lab/engines.py runs/kept/$RUN

The first command makes the run again with its checkpoint, which `make evidence` does not keep, and
evaluates it on a zero-shot task. The second one packs it, and decodes one sequence in vLLM with its
weights dense and packed, in turns, and in llama.cpp with the type of its grid, or in bfloat16. Each
engine gives a row: a copy of the run's, or of the dense model's, with `engine` and
`tokens_per_second`. Stored zeros cost as much as other weights, so that the unpacked run has the
speed of the dense model. `make vllm` makes the environment. Times are wall times: nothing else may
run.
"""

import argparse
import csv
import os
import shlex
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))

from contestants import mrp_lightning, read_config
from serving import PROMPT, environment, seconds, start

Row = dict[str, str]
KEY = ("model", "format", "method", "seed", "text", "engine")


def main() -> None:
    """Measure a run, and write its rows into the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("run", type=Path, help="directory of a sweep's run with its checkpoint")
    option("--table", type=Path, default=Path("lab/results/evidence.csv"))
    option("--threads", type=int, default=1, help="cores")
    option("--rounds", type=int, default=3)
    option("--tokens", type=int, default=32, help="new tokens of the sequence")
    options = parser.parse_args()
    rows = read_rows(options.table)
    own, dense = row_of(rows, options.run), row_of(rows, options.run.with_name("dense"))
    restart_with_cores(options.threads)
    cores = f"{options.threads} core{'s' * (options.threads > 1)}"
    made = []
    for row, engine, rate in measured(options.run, own, dense, options):
        command = shlex.join(["python", "lab/engines.py", *sys.argv[1:]])
        made.append(row | {"tokens_per_second": f"{rate:.2f}", "engine": f"{engine}, {cores}",
                           "command": command})  # fmt: skip
        print(f"{row['format']} {row['method']} in {engine}, {cores}: {rate:.2f} tokens a second")
    write_rows(options.table, with_rows(rows, made))


def read_rows(table: Path) -> list[Row]:
    """Return the rows of the table."""
    with table.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write_rows(table: Path, rows: list[Row]) -> None:
    """Write the rows of the table."""
    with table.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def row_of(rows: list[Row], run: Path) -> Row:
    """Return the row without `engine` whose command ends with the last two directories of a run.

    Raises:
        SystemExit: There is none, or more than one.
    """
    name = "/".join(run.resolve().parts[-2:])
    found = [row for row in rows if not row["engine"] and row["command"].endswith(f" {name}")]
    if len(found) != 1:
        raise SystemExit(f"error: the table has {len(found)} rows of {name}. Make its run first.")
    return found[0]


def with_rows(rows: list[Row], made: list[Row]) -> list[Row]:
    """Return the rows with new ones, each after the last of its run; equal keys are replaced."""
    keys = [tuple(row[key] for key in KEY) for row in made]
    rows = [row for row in rows if tuple(row[key] for key in KEY) not in keys]
    for row, key in zip(made, keys, strict=True):
        same_run = [
            i for i, each in enumerate(rows) if tuple(each[k] for k in KEY)[:-1] == key[:-1]
        ]
        rows.insert(same_run[-1] + 1, row)
    return rows


def restart_with_cores(threads: int) -> None:
    """Start this command again in the environment that vLLM and OpenMP read when they load."""
    wanted = environment(threads)
    if any(os.environ.get(key) != value for key, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | wanted)


def measured(
    run: Path, own: Row, dense: Row, options: argparse.Namespace
) -> list[tuple[Row, str, float]]:
    """Return the row, the engine and the tokens a second of each measurement."""
    import vllm
    import xllamacpp

    packed, file = run.with_name(f"{run.name}-packed"), run.with_name(f"{run.name}.gguf")
    form = (
        "packed" if own["format"] == "2:4" else "bitmask4" if "bit" in own["format"] else "bitmask"
    )
    # Only a run with bits lies on a grid that llama.cpp has; the values of others are bfloat16.
    kind = "auto" if "bit" in own["format"] else "bf16"
    mrp_lightning("export", run, "--format", form, "--out", packed)
    mrp_lightning("gguf", run, "--type", kind, "--out", file)
    rates = in_vllm({"dense": run, "packed": packed}, options.rounds, options.tokens)
    version, build = (
        f"vLLM {vllm.__version__}",
        f"llama.cpp b{xllamacpp.__version__.split('.')[-1]}",
    )
    return [
        (dense, version, rates["dense"]),
        (own, version, rates["packed"]),
        (own if kind == "auto" else dense, build, in_llamacpp(file, options)),
    ]


def in_vllm(directories: Mapping[str, Path], rounds: int, tokens: int) -> dict[str, float]:
    """Return the median tokens a second of decoding one sequence with each model, in turns."""
    engines = {name: start(path) for name, path in directories.items()}
    (size,) = {read_config(path)["vocab_size"] for path in directories.values()}
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for seed in range(rounds + 1):
        for name, llm in engines.items():
            begin = seconds(llm, 1, PROMPT, 1, seed, size)  # the prompt does not count
            rates[name].append(tokens / (seconds(llm, 1, PROMPT, 1 + tokens, seed, size) - begin))
    return {name: statistics.median(values[1:]) for name, values in rates.items()}  # first: warm-up


def in_llamacpp(file: Path, options: argparse.Namespace) -> float:
    """Return the median tokens a second of decoding one sequence in llama.cpp."""
    import xllamacpp

    settings: Any = xllamacpp.CommonParams()
    settings.model.path, settings.n_ctx, settings.n_parallel = str(file), 512, 1
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = options.threads
    server = xllamacpp.Server(settings)  # warms up
    request = {"prompt": list(range(5, 5 + PROMPT)), "max_tokens": options.tokens,
               "temperature": 0.0, "ignore_eos": True}  # fmt: skip
    answers = [server.handle_completions(request) for _ in range(options.rounds)]
    return statistics.median(answer["timings"]["predicted_per_second"] for answer in answers)


if __name__ == "__main__":
    main()
