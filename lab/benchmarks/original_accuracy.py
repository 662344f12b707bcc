r"""The accuracy that the original codes of SparseGPT and ALPS give on the windows of a sweep.

    python lab/benchmarks/original_accuracy.py --config lab/sweeps/frontier.yaml --alps ALPS
    python lab/benchmarks/original_accuracy.py --config lab/sweeps/frontier.yaml \
        --sparsegpt SPARSEGPT --models LLaMA --settings 2:4 --seeds 0 1 2

They prune the models of the sweep, loaded as it loads them, on the calibration windows that it
draws, with the same damping, and are evaluated as its runs are: the figures compare with those of
the sweep's page. With `--save DIR` each pruned model is kept as a Hugging Face directory in it.
"""

import argparse
import logging
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import originals
import torch
from torch import Tensor, nn

from mrp_lightning.devices import machine
from mrp_lightning.experiments.design import Sweep
from mrp_lightning.experiments.running import configure
from mrp_lightning.experiments.sweep import read_sweep
from mrp_lightning.experiments.trials import Trial, parse_setting
from mrp_lightning.solver.patterns import Pattern
from mrp_lightning.targets.plan import make_plan

CODES = {"SparseGPT": originals.sparsegpt, "ALPS": originals.alps}


def run(
    original: originals.Original,
    sweep: Sweep,
    model: str,
    pattern: Pattern,
    seed: int,
    saved: Path | None = None,
) -> tuple[float, float, float]:
    """Prune and evaluate one model: perplexity, mean relative loss of the layers, CPU seconds."""
    cli = configure(Trial(model), sweep)
    cli.config["data.seed"] = seed
    cli.config["trainer.enable_progress_bar"] = False
    cli.build()
    cli.datamodule.tokenizer = cli.model.tokenizer
    losses: list[float] = []

    def seen(layer: nn.Linear, weight: Tensor, matrix: Tensor) -> None:
        losses.append(originals.relative_loss(layer, weight, matrix))

    windows = list(cli.datamodule.calibration_windows().split(1))
    lm: Any = cli.model.model.eval()
    start = time.process_time()
    with torch.no_grad():
        plan = make_plan(lm, pattern)
        originals.prune_model(
            original, lm, windows, plan, lambda _: nullcontext(), seen, pattern=pattern
        )
    seconds = time.process_time() - start
    if saved is not None:
        lm.save_pretrained(saved)
        cli.model.tokenizer.save_pretrained(saved)
    cli.trainer.test(cli.model, datamodule=cli.datamodule, verbose=False)
    (found,) = cli.model.evaluation.values()
    return float(found["perplexity"]), sum(losses) / len(losses), seconds


def main() -> None:
    """Print the table, row by row as they come."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", nargs="+", required=True, help="YAMLs of the sweep")
    parser.add_argument("--sparsegpt", type=Path, help="a checkout of IST-DASLab/sparsegpt")
    parser.add_argument("--alps", type=Path, help="a checkout of mazumder-lab/ALPS")
    parser.add_argument("--models", nargs="*", help="of the sweep (default: all)")
    parser.add_argument("--settings", nargs="*", help="of the sweep (default: all)")
    parser.add_argument("--seeds", nargs="*", type=int, help="default: the sweep's")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save", type=Path, metavar="DIR", help="where to keep the pruned models")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    sweep = read_sweep([f"--config={path}" for path in options.config])
    print(
        f"{machine(torch.device('cpu'))}, {options.threads} threads; damping {originals.DAMPING}.\n"
    )
    print("| model | sparsity | code | seed | perplexity | rel. loss | CPU s |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for model in options.models or sweep.models:
        for setting in options.settings or sweep.runs:
            pattern = parse_setting(setting, "magnitude").pattern
            for code, of in CODES.items():
                repository = getattr(options, code.lower())
                if repository is None:
                    continue
                for seed in sweep.seeds if options.seeds is None else options.seeds:
                    name = f"{Trial(model, setting).setting_name}-{code}-seed{seed}"
                    saved = options.save and options.save / model / name
                    found = run(of(repository), sweep, model, pattern, seed, saved)
                    figures = f"{found[0]:.3f} | {found[1]:.4f} | {found[2]:.1f}"
                    print(f"| {model} | {setting} | {code} | {seed} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
