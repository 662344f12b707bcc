"""The speed of vLLM with sparse weights on a CPU, beside dense and rounded ones, and llama.cpp.

    python lab/benchmarks/serving.py --threads 1 2 --out lab/results/serving.md
    python lab/benchmarks/serving.py --model MODEL.gguf --sparse PRUNED --out PAGE

The model is a LLaMA with random weights, since speed does not depend on what they mean, or a dense
one. Each contestant's file is written to `runs/serving`, once: int4 and int8 by rounding to the
nearest, sparse weights packed as they are, and llama.cpp's types by its own quantiser. All
contestants are loaded in one process. Each measurement goes through all of them in turn, and the
medians are taken. Decoding is timed as the difference between 1 and 1 + N new tokens, so that the
prompt does not count. Times are wall times: nothing else may run. The page is written from all
measurements that were made, and keeps what follows its `<!-- end -->`.
"""

import argparse
import functools
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from contestants import GROUP, RUNS, name_of, read_config, write_all

NAMES = {
    "dense": "dense, bfloat16",
    "int4": "int4, W4A16",
    "int8": "int8, W8A8",
    "bitmask": "50% sparse",
    "bitmask4": "50% sparse, 4 bits",
    "integers": "50% sparse, 4 bits, integers",
    "head": "50% sparse, 4 bits, integers, head of 8 bits",
    "bf16": "llama.cpp, bfloat16",
    "q8_0": "llama.cpp, Q8_0",
    "q4_0": "llama.cpp, Q4_0",
    "q3_k": "llama.cpp, Q3_K_M",
}
"""The contestants; the first one is what the others are compared with."""
DECODING = (1, 8, 16, 32)
"""Sequences that are decoded at once; llama.cpp decodes one."""
PROMPT, PREFILL = 4, 256
CASES = {f"decode {sequences}": (sequences, PROMPT) for sequences in DECODING}
CASES[f"prefill {PREFILL}"] = 1, PREFILL
"""The number and the length of the prompts of each measurement."""
END = "<!-- end -->"
Engine = Callable[[int, int, int, int], float]
"""The time in which prompts are continued: of their number, their length, new tokens, a seed."""


def environment(threads: int) -> dict[str, str]:
    """Return the variables with which vLLM runs on the first cores, in this process."""
    return {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0" if threads == 1 else f"0-{threads - 1}",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }


def start(directory: Path, *, compiled: bool = False) -> Any:
    """Load a model into vLLM, in this process; vLLM compiles it by default."""
    from vllm import LLM

    return LLM(
        str(directory),
        dtype="bfloat16",
        enable_prefix_caching=False,
        enforce_eager=not compiled,
        max_model_len=512,
        max_num_seqs=max(DECODING),
        num_gpu_blocks_override=128,
        skip_tokenizer_init=True,
    )


def prompts(sequences: int, length: int, seed: int, vocabulary: int) -> list[list[int]]:
    """Return random tokens."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(5, vocabulary, (sequences, length), generator=random).tolist()


def seconds(llm: Any, sequences: int, length: int, new: int, seed: int, vocabulary: int) -> float:
    """Return the time in which random prompts of this length are continued by `new` tokens each."""
    from vllm import SamplingParams

    rows = prompts(sequences, length, seed, vocabulary)
    options = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, detokenize=False)
    begin = time.perf_counter()
    llm.generate([{"prompt_token_ids": row} for row in rows], options, use_tqdm=False)
    return time.perf_counter() - begin


def seconds_in_llamacpp(
    llm: Any, sequences: int, length: int, new: int, seed: int, vocabulary: int
) -> float:
    """Return the time in which llama.cpp continues random prompts, one after another."""
    rows = prompts(sequences, length, seed, vocabulary)
    begin = time.perf_counter()
    for row in rows:
        llm.reset()
        # The range comes first: after its end no further token is computed.
        for _ in zip(range(new), llm.generate(row, temp=0.0), strict=False):
            pass
    return time.perf_counter() - begin


def start_all(paths: Mapping[str, Path], threads: int, *, compiled: bool) -> dict[str, Engine]:
    """Load all contestants in this process."""
    vocabulary = int(read_config(paths["dense"])["vocab_size"])
    # llama.cpp comes first: vLLM binds this thread to one core, and later threads with it.
    forms = sorted(paths, key=lambda form: paths[form].suffix != ".gguf")
    engines: dict[str, Engine] = {}
    for form in forms:
        path = paths[form]
        if path.suffix == ".gguf":
            llm, timed = start_llamacpp(path, threads), seconds_in_llamacpp
        else:
            llm, timed = start(path, compiled=compiled), seconds
        engines[form] = functools.partial(timed, llm, vocabulary=vocabulary)
        engines[form](1, PREFILL, 2, 0)  # warms up
    return engines


def start_llamacpp(file: Path, threads: int) -> Any:
    """Load a GGUF file into llama.cpp, in this process."""
    import llama_cpp

    return llama_cpp.Llama(
        str(file), n_ctx=512, n_threads=threads, n_threads_batch=threads, verbose=False
    )


def rate(engine: Engine, case: str, new: int, seed: int) -> float:
    """Return the tokens a second of a case."""
    sequences, length = CASES[case]
    begin = engine(sequences, length, 1, seed)
    if length == PREFILL:
        return length / begin
    return sequences * new / (engine(sequences, length, 1 + new, seed) - begin)


def measure(
    paths: Mapping[str, Path], threads: int, rounds: int, new: int, *, compiled: bool
) -> Iterator[dict[str, dict[str, float]]]:
    """Yield after each round the median tokens a second so far, by form and case."""
    engines = start_all(paths, threads, compiled=compiled)
    rates: dict[str, dict[str, list[float]]] = {form: {} for form in paths}
    for seed in range(rounds + 1):
        tokens = new if seed else 1
        for case, (sequences, _) in CASES.items():
            for form, engine in engines.items():
                if sequences == 1 or paths[form].suffix != ".gguf":
                    rates[form].setdefault(case, []).append(rate(engine, case, tokens, seed))
        if seed:  # the first round warms up
            yield {
                form: {case: statistics.median(values[1:]) for case, values in row.items()}
                for form, row in rates.items()
            }


def machine() -> dict[str, str]:
    """Return the processor and the versions of what was measured."""
    import llama_cpp
    import vllm

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    processor = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    modes = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "processor": processor,
        "vllm": vllm.__version__,
        "llamacpp": llama_cpp.__version__,
        "compiled_for": ", ".join(
            re.findall(r"(\w*(?:AVX|AMX)\w*) = 1", llama_cpp.llama_print_system_info().decode())
        ),
        "torch": torch.__version__,
        # The chosen one of several stands in brackets.
        "huge_pages": re.findall(r"\[(\w+)\]", modes.read_text())[0] if modes.exists() else "never",
    }


def page(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of the page."""
    latest = results[-1]["machine"]
    yield "# Sparse weights in vLLM"
    yield ""
    yield "Written by `make vllm`, which runs the tests of serving (`tests/serving`) first:"
    yield ""
    yield "```"
    yield from (f"python lab/benchmarks/serving.py {result['command']}" for result in results)
    yield "```"
    yield ""
    yield (
        f"vLLM {latest['vllm']}, torch {latest['torch']}, {latest['processor']}; eager "
        "(`enforce_eager`) unless a title says compiled. int4 and int8 are compressed-tensors, in "
        f"groups of {GROUP} and by rows; int8 and integers round activations to 8 bits. Sparse "
        "weights are `bitmask` and `bitmask4`. Heads are bfloat16 unless a row says otherwise. "
        "llama.cpp is that of llama-cpp-python "
        f"{latest['llamacpp']}, compiled for {latest['compiled_for']}; its own quantiser gives "
        "heads 6 or 8 bits. Tokens a second, medians of interleaved rounds on an idle machine. "
        f"Prompts have {PROMPT} tokens. Decoding one sequence is bound by the bandwidth of memory, "
        "which a virtual machine shares, so that its speeds and ratios vary from run to run. "
        "Packed weights lie in huge pages, for which the plug-in asks; other memory gets them "
        f"where `transparent_hugepage/enabled` is `always`. Here it is `{latest['huge_pages']}`."
    )
    for result in results:
        rates, megabytes, cases = result["rates"], result["megabytes"], list(CASES)
        threads = f"{result['threads']} core{'s' * (result['threads'] > 1)}"
        yield from ("", f"## {result['title']}, {threads}", "", result["note"], "")
        line = f"|---|{'---|' * (1 + len(cases))}"
        yield from (f"| tokens a second | file, MB | {' | '.join(cases)} |", line)
        for form in rates:
            cells = (f"{rates[form][x]:.1f}" if x in rates[form] else "–" for x in cases)
            yield f"| {NAMES[form]} | {megabytes[form]:.0f} | {' | '.join(cells)} |"
        first, *others = rates
        yield from (
            "",
            f"| ratio | file | {' | '.join(cases)} |",
            f"|---|{'---|' * (1 + len(cases))}",
        )
        for form in others:
            own, base = rates[form], rates[first]
            cells = (f"{own[x] / base[x]:.2f}" if x in own else "–" for x in cases)
            size = megabytes[form] / megabytes[first]
            yield f"| {NAMES[form]} over {first} | {size:.2f} | {' | '.join(cells)} |"


def write_page(out: Path) -> None:
    """Write the page from all measurements in `runs/serving`, but for what follows its end mark."""
    results = [json.loads(file.read_text("utf-8")) for file in sorted(RUNS.glob("*.json"))]
    kept = out.read_text("utf-8").partition(END)[2] if out.exists() else "\n"
    out.write_text("\n".join([*page(results), "", END]) + kept, encoding="utf-8")


def measure_here(options: argparse.Namespace) -> None:
    """Measure in this process, which has its number of threads, and write the numbers."""
    paths = write_all(options.model, options.sparse, options.contestants)
    (threads,) = options.threads
    name = name_of(options.model)
    command = f"--threads {threads} --model {options.model} --rounds {options.rounds}"
    note = "Half of the weights are removed by magnitude: speed does not depend on which they are."
    command += " --compiled" * options.compiled
    if len(options.contestants) < len(NAMES):
        command += f" --contestants {' '.join(options.contestants)}"
    if options.sparse is not None:
        command += f" --sparse {options.sparse.name}"
        note = f"The sparse weights are those of {options.sparse.name}."
    columns, x, layers = name.partition("x")
    if x and f"{columns}{layers}".isdigit():
        name, note = f"{columns} columns", f"{layers} layers with random weights. {note}"
    content = {
        "command": command,
        "threads": threads,
        "title": name + ", compiled" * options.compiled,
        "note": note,
        "machine": machine(),
        "megabytes": {form: size_of(path) / 1e6 for form, path in paths.items()},
    }
    compiled = options.compiled
    file = RUNS / f"{name_of(options.model)}-{threads}{'-compiled' * compiled}.json"
    measured = measure(paths, threads, options.rounds, options.tokens, compiled=compiled)
    for count, rates in enumerate(measured, 1):
        file.write_text(json.dumps(content | {"rounds": count, "rates": rates}, indent=1))


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of the weights in a directory."""
    files = [path] if path.is_file() else path.glob("*.safetensors")
    return sum(file.stat().st_size for file in files)


def main() -> None:
    """Measure with each number of threads, in a process of its own, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--threads", type=int, nargs="+", default=[1, 2])
    text = "directory or GGUF file of a LLaMA or Qwen2, or columns and layers of a random LLaMA"
    option("--model", default="2048x4", help=text)
    text = "the model, half of it pruned and the rest in 4 bits (default: pruned by magnitude)"
    option("--sparse", type=Path, metavar="DIR", help=text)
    option("--rounds", type=int, default=5)
    option("--tokens", type=int, default=16, help="new tokens of each sequence")
    option("--compiled", action="store_true", help="let vLLM compile the models, as it does alone")
    text = "those to load beside the dense model (default: all)"
    option("--contestants", nargs="+", choices=NAMES, default=list(NAMES), help=text)
    option("--out", type=Path, help="page to write, such as lab/results/serving.md")
    option("--prepare", action="store_true", help="only write the models")
    option("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.prepare:
        write_all(options.model, options.sparse, options.contestants)
    elif options.here:
        measure_here(options)
    else:
        command = [sys.executable, *sys.argv]
        subprocess.run([*command, "--prepare"], check=True)
        for threads in options.threads:
            # Of repeated options the last one counts.
            here = [*command, "--here", "--threads", str(threads)]
            subprocess.run(here, env=os.environ | environment(threads), check=True)
    if options.out is not None and not (options.here or options.prepare):
        write_page(options.out)


if __name__ == "__main__":
    main()
