r"""The gain of balanced columns for a grid, by the order p of the norm for the scale of a group.

    python lab/benchmarks/balance.py MODEL --calibration C.txt [--targets 're:.*layers\.2\..*']

METHOD. MODEL is a dense LLaMA, such as the `dense` that engine_types.py writes. Its layers are put
on the grid twice, as they are and with `balance`, on the same 32 windows of 512 tokens; the table
has the geometric mean over the layers of a kind of the ratio of their losses, each relative to its
layer's output. p = 8 is what the product does; see `mrp_lightning/pruning/balance.py`.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

import torch
from engine_types import quantise, windows
from transformers import AutoTokenizer

from mrp_lightning.pruning import balance
from mrp_lightning.records.report import PruningReport

ORDERS = (2.0, 4.0, 8.0, 16.0)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a Hugging Face directory of a LLaMA")
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--grid", default="int4-g64")
    parser.add_argument("--targets", help="the layers, all of them by default")
    parser.add_argument("--orders", type=float, nargs="+", default=list(ORDERS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    calibration = windows(options.calibration, AutoTokenizer.from_pretrained(options.model), 32)

    def losses(**settings: bool) -> dict[str, float]:
        """Return the relative losses of the layers, by name."""
        with tempfile.TemporaryDirectory() as place:
            run = Path(place) / "run"
            given = {"grid": options.grid, "targets": options.targets, **settings}
            quantise(options.model, run, given, calibration, "SM")
            rows = PruningReport.load(run / "pruning_report.json").layers
        return {row.name: row.relative_loss for row in rows}

    plain = losses()
    kinds = list(dict.fromkeys(name.rpartition(".")[2] for name in plain))
    print(f"`python {' '.join(sys.argv)}`\n\n| p | {' | '.join(kinds)} |")
    print(f"| --- |{' ---: |' * len(kinds)}", flush=True)
    for order in options.orders:
        with patch.object(balance, "_NORM", order):
            balanced = losses(balance=True)
        ratios = [
            statistics.geometric_mean(
                balanced[name] / plain[name] for name in plain if name.endswith(f".{kind}")
            )
            for kind in kinds
        ]
        print(f"| {order:g} | {' | '.join(f'{ratio:.3f}' for ratio in ratios)} |", flush=True)


if __name__ == "__main__":
    main()
