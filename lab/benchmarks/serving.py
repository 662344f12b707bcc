"""The speed of vLLM with sparse weights, against dense ones and against its own int4, on a CPU.

    python lab/benchmarks/serving.py --threads 1 2 --out lab/results/serving.md
    python lab/benchmarks/serving.py --threads 1 --width 4096 --layers 2 --rounds 2 --out PAGE

The model is a LLaMA of a given size with random weights, since speed does not depend on what they
mean; a directory for each form is written to `runs/serving`, once. All forms are loaded in one
process. Each measurement goes through all of them in turn, and the medians are taken. Decoding is
timed as the difference between 1 and 1 + N new tokens, so that the prompt does not count. Times are
wall times: nothing else may run. The page is written from all measurements that were made.
"""

import argparse
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

FORMS = ("dense", "int4", "bitmask", "bitmask4")
NAMES = {
    "dense": "dense, bfloat16",
    "int4": "int4, W4A16",
    "bitmask": "50% sparse",
    "bitmask4": "50% sparse, 4 bits",
}
DECODING = (1, 8, 16, 32)
"""Sequences that are decoded at once."""
PROMPT, PREFILL = 4, 256
GROUP, VOCABULARY = 64, 4096
RUNS = Path("runs/serving")
Directories = Mapping[str, Path]


def packed_forms(rows: int, columns: int, random: torch.Generator) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a random layer in each form, by their names within the layer."""
    from mrp_sparse.formats import bitmask
    from mrp_sparse.formats.bitmask4 import BITMASK4

    weight = torch.randn(rows, columns, generator=random) * 0.02
    kept = torch.rand(rows, columns, generator=random) < 0.5
    sparse = (weight * kept).bfloat16()
    yield "dense", {"weight": sparse}
    values, bits = bitmask.pack(sparse)
    yield "bitmask", {"weight": values, "weight_bits": bits}

    codes = torch.randint(1, 9, (rows, columns), generator=random) * weight.sign()
    on_grid = (codes * kept / 256).bfloat16()
    tensors = zip(("weight", *BITMASK4.companions), BITMASK4.pack(on_grid), strict=True)
    yield "bitmask4", dict(tensors)

    fields = (codes.clamp(-8, 7).long() + 8).unflatten(1, (-1, 8)) << 4 * torch.arange(8)
    words = fields.sum(2)
    yield (
        "int4",
        {
            "weight_packed": (words - (words >> 31 << 32)).to(torch.int32),
            "weight_scale": torch.full((rows, columns // GROUP), 1 / 256, dtype=torch.bfloat16),
            "weight_shape": torch.tensor([rows, columns]),
        },
    )


def settings(form: str, modules: Mapping[str, int]) -> dict[str, Any]:
    """Return the `quantization_config` of a form; `modules` are the values kept by layer."""
    if form == "int4":
        weights = {"num_bits": 4, "type": "int", "symmetric": True, "dynamic": False}
        weights |= {"strategy": "group", "group_size": GROUP}
        scheme = {"targets": ["Linear"], "weights": weights, "format": "pack-quantized"}
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": scheme},
            "ignore": ["lm_head"],
        }
    return {"quant_method": f"mrp_{form}", "format_version": 1, "modules": dict(modules)}


def write_models(width: int, layers: int) -> dict[str, Path]:
    """Write a random LLaMA of this size in all forms, unless it is there; return directories."""
    from transformers import LlamaConfig

    directories = {form: RUNS / f"{width}x{layers}-{form}" for form in FORMS}
    if all((path / "config.json").exists() for path in directories.values()):
        return directories
    random = torch.Generator().manual_seed(0)
    wide = 4 * width
    shapes = {f"self_attn.{x}_proj": (width, width) for x in "qkvo"}
    shapes |= {"mlp.gate_proj": (wide, width), "mlp.up_proj": (wide, width)}
    shapes |= {"mlp.down_proj": (width, wide)}
    common: dict[str, Tensor] = {"model.norm.weight": torch.ones(width)}
    for name in ("model.embed_tokens", "lm_head"):
        common[f"{name}.weight"] = 0.02 * torch.randn(VOCABULARY, width, generator=random)
    for layer in range(layers):
        for name in ("input_layernorm", "post_attention_layernorm"):
            common[f"model.layers.{layer}.{name}.weight"] = torch.ones(width)
    tensors = {form: {name: x.bfloat16() for name, x in common.items()} for form in FORMS}
    modules: dict[str, dict[str, int]] = {form: {} for form in FORMS}
    for name, (rows, columns) in shapes.items():
        for form, stored in packed_forms(rows, columns, random):
            for layer in range(layers):
                prefix = f"model.layers.{layer}.{name}"
                modules[form][prefix] = next(iter(stored.values())).numel()
                # Each layer has memory of its own, as in a model.
                tensors[form] |= {f"{prefix}.{key}": x.clone() for key, x in stored.items()}
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=wide,
        num_hidden_layers=layers,
        num_attention_heads=width // 128,
        num_key_value_heads=width // 128,
        vocab_size=VOCABULARY,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    ).to_dict()
    for form, directory in directories.items():
        directory.mkdir(parents=True, exist_ok=True)
        save_file(tensors[form], directory / "model.safetensors", {"format": "pt"})
        content = dict(config)
        if form != "dense":
            content["quantization_config"] = settings(form, modules[form])
        (directory / "config.json").write_text(json.dumps(content))
    return directories


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


def start(directory: Path) -> Any:
    """Load a model into vLLM, in this process."""
    from vllm import LLM

    return LLM(
        str(directory),
        dtype="bfloat16",
        enable_prefix_caching=False,
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=max(DECODING),
        num_gpu_blocks_override=128,
        skip_tokenizer_init=True,
    )


def seconds(
    llm: Any, sequences: int, length: int, new: int, seed: int, vocabulary: int = VOCABULARY
) -> float:
    """Return the time in which random prompts of this length are continued by `new` tokens each."""
    from vllm import SamplingParams

    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, vocabulary, (sequences, length), generator=random).tolist()
    options = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, detokenize=False)
    begin = time.perf_counter()
    llm.generate([{"prompt_token_ids": row} for row in ids], options, use_tqdm=False)
    return time.perf_counter() - begin


def cases(new: int) -> dict[str, Callable[[Any, int], float]]:
    """Return what is measured, each as a function of an engine and a seed, in tokens a second."""

    def decoding(sequences: int) -> Callable[[Any, int], float]:
        def rate(llm: Any, seed: int) -> float:
            begin = seconds(llm, sequences, PROMPT, 1, seed)
            return sequences * new / (seconds(llm, sequences, PROMPT, 1 + new, seed) - begin)

        return rate

    measured = {f"decode {sequences}": decoding(sequences) for sequences in DECODING}
    measured[f"prefill {PREFILL}"] = lambda llm, seed: PREFILL / seconds(llm, 1, PREFILL, 1, seed)
    return measured


def measure(
    directories: Directories, rounds: int, new: int
) -> Iterator[dict[str, dict[str, float]]]:
    """Yield after each round the median tokens a second so far, by form and case."""
    engines = {form: start(path) for form, path in directories.items()}
    measured = cases(new)
    rates: dict[str, dict[str, list[float]]] = {f: {case: [] for case in measured} for f in FORMS}
    for llm in engines.values():
        for case in cases(1).values():
            case(llm, 0)  # warms up
    for seed in range(1, rounds + 1):
        for name, case in measured.items():
            for form, llm in engines.items():
                rates[form][name].append(case(llm, seed))
        yield {
            form: {name: statistics.median(values) for name, values in row.items()}
            for form, row in rates.items()
        }


def machine() -> dict[str, str]:
    """Return the processor and the versions of what was measured."""
    import vllm

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    processor = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    modes = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "processor": processor,
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        # The chosen one of several stands in brackets.
        "huge_pages": re.findall(r"\[(\w+)\]", modes.read_text())[0] if modes.exists() else "never",
    }


def page(results: list[dict[str, Any]]) -> Iterator[str]:
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
        f"vLLM {latest['vllm']}, torch {latest['torch']}, {latest['processor']}. A LLaMA "
        "with random weights; eager. int4 is compressed-tensors in groups of "
        f"{GROUP}; sparse weights are `bitmask` and `bitmask4`. Tokens a second, medians of "
        "interleaved rounds on an idle machine. Prompts have "
        f"{PROMPT} tokens. Decoding one sequence is bound by the bandwidth of memory, which a "
        "virtual machine shares, so that its speeds and ratios vary from run to run. Packed "
        "weights lie in huge pages, for which the plug-in asks; other memory gets them where "
        f"`transparent_hugepage/enabled` is `always`. Here it is `{latest['huge_pages']}`."
    )
    for result in results:
        rates, columns = result["rates"], list(result["rates"]["dense"])
        threads = f"{result['threads']} core{'s' * (result['threads'] > 1)}"
        yield from ("", f"## {result['width']} columns, {threads}", "")
        yield from (f"{result['layers']} layers.", "")
        yield from (
            f"| tokens a second | file, MB | {' | '.join(columns)} |",
            f"|---|{'---|' * (1 + len(columns))}",
        )
        for form in FORMS:
            cells = " | ".join(f"{rates[form][case]:.1f}" for case in columns)
            yield f"| {NAMES[form]} | {result['megabytes'][form]:.0f} | {cells} |"
        yield from ("", f"| ratio | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}")
        for base, form in itertools.product(FORMS[:2], FORMS[2:]):
            ratios = " | ".join(f"{rates[form][case] / rates[base][case]:.2f}" for case in columns)
            yield f"| {NAMES[form]} over {base} | {ratios} |"


def write_page(out: Path) -> None:
    """Write the page from all measurements in `runs/serving`."""
    files = sorted(RUNS.glob("*.json"))
    out.write_text("\n".join(page([json.loads(file.read_text()) for file in files])) + "\n")


def measure_here(options: argparse.Namespace) -> None:
    """Measure in this process, which has its number of threads, and write the numbers."""
    directories = write_models(options.width, options.layers)
    content: dict[str, Any] = {
        "command": f"--threads {options.threads[0]} --width {options.width} "
        f"--layers {options.layers} --rounds {options.rounds}",
        "threads": options.threads[0],
        "width": options.width,
        "layers": options.layers,
        "machine": machine(),
        "megabytes": {
            form: (path / "model.safetensors").stat().st_size / 1e6
            for form, path in directories.items()
        },
    }
    file = RUNS / f"{options.width:05}-{options.threads[0]}.json"
    for count, rates in enumerate(measure(directories, options.rounds, options.tokens), 1):
        file.write_text(json.dumps(content | {"rounds": count, "rates": rates}, indent=1))


def main() -> None:
    """Measure with each number of threads, in a process of its own, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--threads", type=int, nargs="+", default=[1, 2])
    option("--width", type=int, default=2048, help="columns of the model, a multiple of 128")
    option("--layers", type=int, default=4)
    option("--rounds", type=int, default=5)
    option("--tokens", type=int, default=16, help="new tokens of each sequence")
    option("--out", type=Path, help="page to write, such as lab/results/serving.md")
    option("--prepare", action="store_true", help="only write the models")
    option("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.prepare:
        write_models(options.width, options.layers)
    elif options.here:
        measure_here(options)
    else:
        for threads in options.threads:
            command = [sys.executable, __file__, "--here", "--threads", str(threads)]
            command += ["--width", str(options.width), "--layers", str(options.layers)]
            command += ["--rounds", str(options.rounds), "--tokens", str(options.tokens)]
            subprocess.run(command, env=os.environ | environment(threads), check=True)
    if options.out is not None and not options.here:
        write_page(options.out)


if __name__ == "__main__":
    main()
