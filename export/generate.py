"""`python -m export.generate DIR --prompt TEXT` streams what a model writes, and tells its speed.

On a CPU a step of decoding is compiled ahead of time, once for each shape and format, which takes
minutes, and kept for later starts. If it cannot be compiled, a warning says why, and each step runs
in Python.
"""

from collections.abc import Sequence
from typing import Any

from mrp_lightning.cli.command import make_parser, number_from, told
from mrp_lightning.environment import device_named, machine


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line. Status 2: a mistake of the user's."""
    with told():
        options = _parser().parse_args(args)
        # Only now: they load transformers, which help and a mistake need not wait for.
        from transformers.utils import logging as transformers_logging

        from export.decoding import write

        transformers_logging.disable_progress_bar()
        device = device_named(options.device)
        print(f"On {machine(device)}\n")
        speeds = []
        for directory in filter(None, (options.compare, options.directory)):
            print(f"--- {directory}")
            speeds.append(
                write(
                    directory,
                    options.prompt,
                    options.max_new_tokens,
                    device,
                    compiled=not options.eager and device.type == "cpu",
                    eight_bits=options.activations == 8,
                    eight_bit_head=options.head_bits == 8,
                )
            )
            print(f"{speeds[-1]}\n")
    if options.compare and speeds[0].rate:
        before, after = speeds
        print(
            f"{after.rate / before.rate:.2f} times the tokens a second, "
            f"{after.num_bytes / before.num_bytes:.2f} of the memory"
        )


def _parser() -> Any:
    parser = make_parser("python -m export.generate", str(__doc__))
    option = parser.add_argument
    option("directory", metavar="DIR", help="a packed (or dense) model")
    option("--prompt", required=True, metavar="TEXT", help="how the text begins")
    what = "a model that writes the same first, to compare with"
    option("--compare", metavar="DENSE_DIR", help=what)
    what = "default: 128"
    option("--max-new-tokens", type=number_from(1), default=128, metavar="N", help=what)
    option("--device", help="default: cuda if present")
    option("--eager", action="store_true", help="let Python take each step, and compile nothing")
    what = "bits of the activations of layers of four bits, on a CPU; 8 is faster and less exact"
    option("--activations", type=int, choices=(16, 8), default=16, help=what)
    what = "bits of the head, on a CPU; 8 is faster and less exact"
    option("--head-bits", type=int, choices=(16, 8), default=16, help=what)
    return parser


if __name__ == "__main__":
    main()
