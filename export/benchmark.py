"""How fast a pruned model is: the same weights packed and stored dense, on a CUDA device.

    mrp-lightning benchmark MODEL-sparse24
    mrp-lightning benchmark --shape llama3-8b llama2-7b opt-6.7b --out docs/benchmarks/export

A shape is filled with random 2:4 weights: speed does not depend on what the weights mean. What is
measured is written as it comes; what fails is listed with its reason.
"""

from collections.abc import Sequence
from typing import Any

from export.timing import LAYER_TOKENS, SHAPES, SpeedOptions, add_arguments
from mrp_lightning.cli.command import exit_on_mistake, make_parser, number_from
from mrp_lightning.errors import OptionError


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line. Status 1: a shape could not be measured to its end."""
    with exit_on_mistake():
        parsed = _parser().parse_args(args)
        if bool(parsed.models) == bool(parsed.shape):
            raise OptionError("expected directories of packed models, or a `--shape`.", "MODEL")
        # Only now: it loads transformers, which help and a mistake need not wait for.
        from export.comparison import measure_models, measure_shapes

        options = SpeedOptions.of(parsed)
        measure_models(parsed.models, options)
        if parsed.shape:
            measure_shapes(parsed.shape, options, parsed.dtype, parsed.out)


def _parser() -> Any:
    parser = make_parser("mrp-lightning benchmark", str(__doc__))
    option = parser.add_argument
    option("models", metavar="MODEL", nargs="*", help="directories of 2:4 packed models")
    text = "a model's shape, in place of a model: its layers are filled with random weights"
    option("--shape", choices=SHAPES, nargs="+", help=text)
    add_arguments(parser, batch_sizes=[1])
    text = "time every kernel on each layer shape at so many tokens; no number: only the models"
    tokens = {"type": number_from(1), "nargs": "*", "default": [*LAYER_TOKENS]}
    option("--layer-tokens", **tokens, metavar="N", help=text)
    option("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    option("--out", metavar="DIR", help="write SHAPE-BACKEND.md and .json there as it runs")
    return parser


if __name__ == "__main__":
    main()
