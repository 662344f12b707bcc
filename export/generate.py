"""Stream the text that a model writes after a prompt, and report its speed.

On a CPU, a decoding step is compiled ahead of time, once for each shape and format, which takes
minutes, and cached for later starts. At the first start Python takes the steps of the text, and the
step is compiled when the text is written; with `--compare`, which measures, before. On a GPU,
transformers compiles it with a static cache at each start, and CUDA graphs replay it. If it cannot
be compiled, a warning says why, and each step runs in Python.
"""

from collections.abc import Sequence
from typing import Any

from mrp_lightning.commands.command import exit_on_mistake, make_parser, number_from


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line. Status 2: a mistake of the user's."""
    with exit_on_mistake():
        options = _parser().parse_args(args)
        # Only now: it loads torch and transformers, which help and mistakes need not wait for.
        from export.continuation import generate

        generate(options)


def _parser() -> Any:
    parser = make_parser("mrp-lightning generate", str(__doc__))
    option = parser.add_argument
    option("directory", metavar="DIR", help="a packed (or dense) model")
    option("--prompt", required=True, metavar="TEXT", help="how the text begins")
    text = "a model that writes the same first, to compare with"
    option("--compare", metavar="DENSE_DIR", help=text)
    text = "default: 128"
    option("--max-new-tokens", type=number_from(1), default=128, metavar="N", help=text)
    option("--device", help="default: cuda if present")
    option("--eager", action="store_true", help="let Python take each step, and compile nothing")
    text = "bits of the activations of layers of four bits, on a CPU; 8 is faster and less exact"
    option("--activations", type=int, choices=(16, 8), default=16, help=text)
    text = "bits of the head, on a CPU; 8 is faster and less exact"
    option("--head-bits", type=int, choices=(16, 8), default=16, help=text)
    return parser


if __name__ == "__main__":
    main()
