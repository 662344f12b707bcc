"""Time the same pruned weights packed and stored dense, on a CUDA device.

    python -m export.benchmark --shape llama3-8b llama2-7b opt-6.7b --out lab/results/export

A shape is filled with random 2:4 weights, on whose values speed does not depend. Measurements are
written as they come; a failure is listed with its reason.
"""

from collections.abc import Sequence
from typing import Any

from export.timing import LAYER_TOKENS, SHAPES, SpeedOptions, add_arguments
from mrp_lightning.cli.command import exit_on_mistake, make_parser, number_from


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line. Status 1: a shape could not be measured to its end."""
    with exit_on_mistake():
        parsed = _parser().parse_args(args)
        # Only now: it loads transformers, which help and a mistake need not wait for.
        from export.comparison import measure_shapes

        measure_shapes(parsed.shape, SpeedOptions.of(parsed), parsed.dtype, parsed.out)


def _parser() -> Any:
    parser = make_parser("python -m export.benchmark", str(__doc__))
    option = parser.add_argument
    option("--shape", choices=SHAPES, nargs="+", required=True)
    add_arguments(parser, batch_sizes=[1])
    text = "time every kernel on each layer shape at so many tokens; no number: only the models"
    tokens = {"type": number_from(1), "nargs": "*", "default": [*LAYER_TOKENS]}
    option("--layer-tokens", **tokens, metavar="N", help=text)
    option("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    option("--out", metavar="DIR", help="write SHAPE-BACKEND.md and .json there as it runs")
    return parser


if __name__ == "__main__":
    main()
