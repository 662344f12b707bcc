r"""AutoRound's four bits and ours, on the same windows of text.

    pip install auto-round==0.16.1
    python lab/benchmarks/auto_round_peer.py MODEL DIR --calibration valid.txt \
        --evaluation test.txt --out lab/results/auto-round.md

METHOD. AutoRound (Intel) learns how to round by signed gradients, block by block: 200 steps by
default, 50 with a larger rate in its recipe "light", on 8 windows at a time. Ours is a pruning with
`grid` and nothing removed, with the layer's own target and with `target="dense"`, each as it is and
with `balance`. Both quantise the matrices of the blocks to the same grid from the same windows of
512 tokens on one thread, AutoRound a model in float32 and ours that of the checkpoint in bfloat16,
and both are measured in float32 on the same windows of the evaluation text, with the dense model's
embeddings. AutoRound's GGUF types are rounded without its steps, and left out. CPU seconds are
those of the process, with the loading of the model. Results in DIR are not made again.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from engine_types import LENGTH, Comparison, perplexity, quantise
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

SCHEMES = {"int4-g32": 32, "int4-g64": 64, "int4-g128": 128}
"""AutoRound's group size for each of our grids, whose scheme is W4A16."""
RECIPES: dict[str, dict[str, Any]] = {
    "200 steps": {"iters": 200},
    "50 steps (light)": {"iters": 50, "lr": 5e-3},
}
OURS: dict[str, dict[str, Any]] = {
    "own target": {},
    "dense target": {"target": "dense"},
    "balanced": {"balance": True},
    "balanced, dense target": {"balance": True, "target": "dense"},
}


def auto_round(dense: Path, out: Path, grid: str, recipe: str, calibration: Tensor) -> None:
    """Quantise by AutoRound, and save what it leaves."""
    from auto_round import AutoRound

    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    ones = torch.ones(1, LENGTH, dtype=torch.long)
    rounding = AutoRound(
        model,
        AutoTokenizer.from_pretrained(dense),
        scheme="W4A16",
        group_size=SCHEMES[grid],
        dataset=[{"input_ids": row[None], "attention_mask": ones} for row in calibration],
        nsamples=len(calibration),
        seqlen=LENGTH,
        batch_size=8,
        device_map="cpu",
        low_gpu_mem_usage=False,
        **RECIPES[recipe],
    )
    rounding.quantize_and_save(str(out), format="fake")


def measure(directory: Path, whole: nn.Module, evaluation: Tensor) -> float:
    """Return the perplexity of a quantised model with the embeddings of the dense one."""
    config = next(directory.rglob("config.json"))  # AutoRound adds a directory of its own
    model = AutoModelForCausalLM.from_pretrained(config.parent, dtype=torch.float32)
    model.set_input_embeddings(whole.get_input_embeddings())
    model.set_output_embeddings(whole.get_output_embeddings())
    return perplexity(model, evaluation)


def main() -> None:
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--grids", nargs="+", choices=SCHEMES, default=["int4-g32", "int4-g64"])
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    comparison = Comparison(parser, lambda *_: None)
    options, dense, best = comparison.options, comparison.dense, comparison.best
    comparison.add("dense", "bfloat16", f"{best:.3f}", "", "")

    def row(name: str, by: str, grid: str, make: Callable[[Path], object]) -> None:
        """Add the row of a result, which `make` writes into a directory if it is not there."""
        directory = options.place / name.replace(" ", "-")
        record = directory.with_suffix(".json")
        if not record.exists():
            begin = time.process_time()
            make(directory)
            spent = time.process_time() - begin
            value = measure(directory, comparison.whole, comparison.evaluation)
            record.write_text(json.dumps({"seconds": spent, "perplexity": value}))
        known = json.loads(record.read_text())
        value, spent = known["perplexity"], known["seconds"]
        comparison.add(by, grid, f"{value:.3f}", f"{value / best - 1:+.1%}", f"{spent:.0f}")

    for grid in options.grids:
        for label, options_of_ours in OURS.items():
            settings = {"grid": grid, **options_of_ours}
            row(
                f"ours-{grid}-{label.replace(',', '')}",
                f"ours, {label}",
                grid,
                lambda out, settings=settings: quantise(
                    dense, out, settings, comparison.calibration, "SM"
                ),
            )
        for recipe in options.recipes:
            row(
                f"auto-round-{grid}-{RECIPES[recipe]['iters']}",
                f"AutoRound, {recipe}",
                grid,
                lambda out, grid=grid, recipe=recipe: auto_round(
                    dense, out, grid, recipe, comparison.calibration
                ),
            )
    comparison.write(
        "| by | grid | perplexity | over dense | CPU seconds |",
        "| --- | --- | ---: | ---: | ---: |",
    )


if __name__ == "__main__":
    main()
