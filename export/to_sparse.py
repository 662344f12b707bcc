"""`python -m export.to_sparse CKPT`: pack a pruned checkpoint, and prove it equal."""

import signal
import sys
from collections.abc import Sequence
from typing import Any

from export import to_gguf
from mrp_lightning.commands.command import (
    CommandParser,
    check_directory,
    check_output,
    exit_on_mistake,
)
from mrp_lightning.environment import require_extra

FORMATS = ("packed", "bitmask", "bitmask4", "torchao", "compressed-tensors")
"""The keys of `TARGETS`, which loads torch."""


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line.

    Exit status 0: the export is written and equal to its source, or as `--check-only` checks it. 1:
    it differs. 2: another error that the user can correct. 130 and 143: interrupted by Ctrl-C or
    SIGTERM. Only status 0 leaves a new export.
    """
    with exit_on_mistake(interrupted="interrupted: nothing was written"):
        parser = _parser()
        options = parser.parse_args(args)
        check_directory(options.checkpoint, "CKPT")
        check_output(options.out, overwrite=options.overwrite or options.check_only)
        if options.format == "torchao":
            require_extra("torchao", "`--format torchao`")
        # Only now: they load transformers, which help and a mistake need not wait for.
        from export.conversion.checkpoint import silence_transformers
        from export.packing import claims_of_model, convert
        from mrp_lightning.signals import interruptible, unclaimed_signals

        silence_transformers()
        # SIGTERM raises an exception, so that incomplete files are removed.
        handled = [number for number in unclaimed_signals() if number == signal.SIGTERM]
        with interruptible(handled):
            out = [] if options.out is None else ["--out", options.out]
            plain = [options.checkpoint, *out, *["--overwrite"] * options.overwrite]
            grid = claims_of_model(options.checkpoint).engine_grid
            is_plain = options == parser.parse_args(plain)
            if is_plain and grid is not None and grid.engine == "llama.cpp":
                sys.stdout.write(f"The weights are on llama.cpp's grid {grid}: a GGUF file.\n")
                to_gguf.main(plain)
            else:
                convert(options)


def _parser() -> Any:
    parser = CommandParser(
        "mrp-lightning export",
        "Pack a checkpoint that was pruned, and prove that it computes the same.",
    )
    option = parser.add_argument
    text = "a Hugging Face directory, or what pruning wrote of your own LightningModule"
    option("checkpoint", metavar="CKPT", help=text)
    text = "default: CKPT-sparse24, or CKPT-FORMAT for the others"
    option("--out", metavar="DIR", help=text)
    text = (
        "packed is for 2:4, bitmask for any pattern, bitmask4 for weights of four bits; torchao is "
        "2:4, multiplied by torchao on a CUDA device; compressed-tensors is for vLLM and SGLang, "
        "of 4 or 8 bits "
        "(default: the file of the engine whose `grid` the run has, compressed-tensors or GGUF; "
        "bitmask4 where the report says `bits` of 3 or 4, packed where the checkpoint is 2:4, else "
        "bitmask)"
    )
    option("--format", choices=FORMATS, help=text)
    text = "bits of the head; 8 is smaller, faster on a CPU and less exact: its loss is reported"
    option("--head-bits", type=int, choices=(16, 8), default=16, help=text)
    text = (
        "of bitmask4: int8 rounds the inputs of its layers as well, exact does not (default: int8 "
        "where it raises the perplexity of the text of the comparison by at most 0.5%%)"
    )
    option("--activations", choices=("int8", "exact"), help=text)
    option("--overwrite", action="store_true", help="replace what is in --out")
    text = "layers that stay dense: name parts with wildcards, such as lm_head or layers.0"
    option("--skip", nargs="+", default=(), metavar="PATTERN", help=text)
    text = "write nothing: check the source, and compare it with --out if that exists"
    option("--check-only", action="store_true", help=text)
    option("--device", help="where to compare (default: cuda if present)")
    return parser


if __name__ == "__main__":
    main()
