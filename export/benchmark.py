"""Time a packed model against the same weights stored dense, on a CUDA device.

    mrp-lightning benchmark runs/opt-125m-2of4-sparse24

All kernels are timed on each layer shape, then whole models in prefill and decode. With `--out`
measurements are written as they come.
"""

import sys
from collections.abc import Sequence
from typing import Any

from export.speed_options import SpeedOptions, add_arguments
from mrp_lightning.commands.command import exit_on_mistake, make_parser
from mrp_lightning.errors import OptionError


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line.

    Raises:
        SystemExit: With status 2 without a CUDA device or 2:4 layers; see also `exit_on_mistake`.
    """
    with exit_on_mistake():
        options = _parser().parse_args(args)
        # Only now: they load torch, which help and a mistake need not wait for.
        from mrp_lightning.devices import device_named

        device = device_named(None)
        if device.type != "cuda":
            raise OptionError("speed is measured on a CUDA device, and this machine has none.")
        # Likewise, for transformers.
        from export.comparison import SpeedReport, compare, tables
        from export.loading import load
        from mrp_sparse.packed_linear import Sparse24Linear

        model: Any = load(options.directory).eval()
        if not any(isinstance(module, Sparse24Linear) for module in model.modules()):
            raise OptionError(
                f"{options.directory} holds no packed 2:4 layers, which alone have kernels on CUDA "
                "devices. Pack the pruned model with `mrp-lightning export --format packed`."
            )

        def save(report: SpeedReport) -> None:
            if options.out is not None:
                report.save(options.out)

        # The report is saved as it grows: a later kernel that crashes the process leaves the
        # earlier times.
        report = compare(model.to(device), SpeedOptions.of(options), report_on=save)
        save(report)
        sys.stdout.write(tables(report))


def _parser() -> Any:
    parser = make_parser("mrp-lightning benchmark", str(__doc__))
    option = parser.add_argument
    option("directory", metavar="MODEL", help="a packed 2:4 model, as `export` writes it")
    add_arguments(parser)
    option("--out", metavar="FILE", help="write FILE.md and FILE.json as it runs")
    return parser


if __name__ == "__main__":
    main()
