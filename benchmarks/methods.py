"""Compare pruning methods on one model: perplexity, layer loss and time, each row a `predict` run.

    python benchmarks/methods.py --config configs/quickstart.yaml

Every row is the run of `python -m mrp_lightning predict --config …` with another method, followed
by `test` on the pruned model.
"""

import argparse
import logging
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from mrp_lightning.machine import machine
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers.utils import logging as transformers_logging

from callbacks import MRPCallback
from mrp_lightning.cli import PruningCLI

NAMES = {"magnitude": "magnitude", "wanda": "Wanda", "SS": "SparseGPT"}
DEFAULT = ["2:4=magnitude,wanda,SS,SM,MM", "50%=SS,SM", "70%=SS,SM"]


@dataclass(frozen=True)
class Run:
    """One method at one sparsity; `method=None` is the dense model."""

    setting: str = "dense"
    method: str | None = None

    def options(self) -> list[str]:
        """What the run changes of the configuration."""
        if self.method is None:
            return ["--trainer.callbacks=null"]
        init = "--trainer.callbacks.init_args"
        if self.setting.endswith("%"):
            amount = [f"{init}.pattern=null", f"{init}.sparsity={float(self.setting[:-1]) / 100}"]
        else:
            amount = [f"{init}.pattern={self.setting}", f"{init}.sparsity=null"]
        return [*amount, f"{init}.method={self.method}"]


@dataclass(frozen=True)
class Result:
    """What one run with one calibration seed gave."""

    perplexity: float
    relative_loss: float | None = None
    seconds: float | None = None


def runs(settings: Iterable[str]) -> list[Run]:
    """Parse settings such as `2:4=SS,SM`."""
    parsed = [Run()]
    for setting in settings:
        name, _, methods = setting.partition("=")
        parsed += [Run(name, method) for method in methods.split(",")]
    return parsed


def execute(run: Run, config: list[str], seed: int, split: str, save_dir: str | None) -> Result:
    """Prune as the configuration says but for the run's method, then measure perplexity."""
    init = "--trainer.callbacks.init_args"
    options = [*run.options(), f"--data.seed={seed}", "--trainer.enable_progress_bar=false"]
    if run.method is not None:
        options.append(f"{init}.save_dir={save_dir or 'null'}")
    cli = PruningCLI([*config, *options, "--trainer.enable_model_summary=false"], run=False)
    evaluate = {"test": cli.trainer.test, "validation": cli.trainer.validate}[split]
    if run.method is None:
        (scores,) = evaluate(cli.model, datamodule=cli.datamodule, verbose=False)
        return Result(scores["perplexity"])
    start = time.perf_counter()
    cli.trainer.predict(cli.model, datamodule=cli.datamodule)
    seconds = time.perf_counter() - start
    (scores,) = evaluate(cli.model, datamodule=cli.datamodule, verbose=False)
    (callback,) = (c for c in cli.trainer.callbacks if isinstance(c, MRPCallback))
    losses = [layer.relative_loss for layer in callback.report.layers if not layer.skipped]
    return Result(scores["perplexity"], statistics.fmean(losses), seconds)


def spread(values: list[float], digits: int) -> str:
    """The mean, and the standard deviation where there are several values."""
    text = f"{statistics.fmean(values):.{digits}f}"
    return text if len(values) == 1 else f"{text} ± {statistics.stdev(values):.{digits}f}"


def rows(results: dict[Run, list[Result]]) -> list[list[str]]:
    """The table's cells."""
    table = []
    for run, found in results.items():
        cells = [run.setting, NAMES.get(run.method or "", run.method or "")]
        cells.append(spread([r.perplexity for r in found], 3))
        if run.method is None:
            cells += ["", ""]
        else:
            cells.append(spread([r.relative_loss for r in found if r.relative_loss], 4))
            cells.append(spread([r.seconds for r in found if r.seconds], 1))
        table.append(cells)
    return table


def claims(results: dict[Run, list[Result]]) -> list[str]:
    """How far SM is ahead of SparseGPT, seed by seed."""
    lines = []
    for run, found in results.items():
        other = results.get(Run(run.setting, "SS"))
        if run.method not in ("SM", "MM") or other is None or len(found) < 2:
            continue
        gains = [s.perplexity - m.perplexity for s, m in zip(other, found, strict=True)]
        mean, deviation = statistics.fmean(gains), statistics.stdev(gains)
        lines.append(
            f"{run.setting}: SparseGPT − {run.method} = {mean:.3f} ± {deviation:.3f} perplexity "
            f"over {len(gains)} calibration seeds, {mean / deviation:.1f} standard deviations."
        )
    return lines


def provenance() -> str:
    """Machine and versions."""
    versions = f"transformers {transformers.__version__}, Python {platform.python_version()}"
    return f"{machine(torch.device('cpu'))}, {versions}."


def _be_quiet() -> None:
    """A progress bar and a table are all that is shown."""
    sys.argv = sys.argv[:1]  # LightningCLI warns when it is given arguments beside these
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", action="append", required=True, help="may be repeated")
    parser.add_argument("--settings", nargs="+", default=DEFAULT, help="such as 2:4=SS,SM 50%%=SS")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="of the calibration set")
    parser.add_argument("--split", choices=["test", "validation"], default="test")
    parser.add_argument("--save", metavar="SETTING=METHOD=DIR", help="keep this run's checkpoint")
    parser.add_argument("--markdown", type=Path, help="write the table here as well")
    command = list(sys.argv)
    args, more = parser.parse_known_args()

    _be_quiet()
    config = [*(f"--config={path}" for path in args.config), *more]
    saved, _, save_dir = (args.save or "").rpartition("=")
    results: dict[Run, list[Result]] = {run: [] for run in runs(args.settings)}
    console = Console()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=len(results) * len(args.seeds))
        for run, found in results.items():
            for seed in args.seeds if run.method else args.seeds[:1]:
                progress.update(task, description=f"{run.setting} {run.method or ''} seed {seed}")
                keep = save_dir if saved == f"{run.setting}={run.method}" else None
                found.append(execute(run, config, seed, args.split, keep))
                progress.advance(task)

    header = ["sparsity", "method", f"perplexity ({args.split})", "relative layer loss", "seconds"]
    shown = Table(*header)
    for cells in rows(results):
        shown.add_row(*cells)
    console.print(shown)
    for line in claims(results):
        console.print(line)
    if save_dir:
        console.print(f"The pruned checkpoint {saved} is in {save_dir}.")
    if args.markdown:
        lines = [header, ["---"] * len(header), *rows(results)]
        table = "".join("| " + " | ".join(cells) + " |\n" for cells in lines)
        args.markdown.parent.mkdir(parents=True, exist_ok=True)
        args.markdown.write_text(
            f"`python {' '.join(command)}`\n\n{provenance()}\n\n{table}"
            + "".join(f"\n{line}\n" for line in claims(results))
        )


if __name__ == "__main__":
    main()
