"""`python -m export.to_gguf RUN --like SOURCE.gguf`: a pruned checkpoint for llama.cpp."""

import os
import signal
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mrp_lightning import errors
from mrp_lightning.commands.command import CommandParser, check_directory, exit_on_mistake
from mrp_lightning.environment import require_extra
from mrp_lightning.models.locations import find_gguf
from mrp_lightning.storage.outputs import check_output_file, save_file

_TYPES = (
    *("auto", "bf16", "f16", "f32", "q8_0", "q5_0", "q5_1", "q5_k", "q4_0", "q4_1", "q4_k"),
    *("iq4_nl", "mxfp4", "q3_k"),
)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line.

    Exit status 0: the file is written. 1: a zero weight would not stay zero, or the file does not
    hold the checkpoint. 2: another error that the user can correct. 130 and 143: interrupted by
    Ctrl-C or SIGTERM. Only status 0 leaves a new file.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(errors.ended_by(number)))
    with exit_on_mistake(interrupted="interrupted: nothing was written"):
        convert(_parser().parse_args(args))


def check_config(config: Any, source: str) -> None:
    """Raise an OptionError for a configuration of which no file can be written without `--like`."""
    from export.gguf.families import family_of

    family_of(config, source)


def convert(options: Namespace) -> Path:
    """Write the GGUF file, print a summary, and return the path of the file.

    Raises:
        FileExistsError: The file exists, and may not be replaced.
        FileNotFoundError: The checkpoint or the file of `--like` does not exist.
        DependencyError: The package gguf is not installed.
        FormatError: The file with the scales of the weights is missing; see also `write_gguf`.
        OptionError: `--out` or `--like` is no GGUF file, or both are one; see also `write_gguf`.
        ParityError: See `write_gguf`.
    """
    require_extra("gguf", "Writing a GGUF file")
    check_directory(options.checkpoint, "RUN")
    like = None if options.like is None else _gguf_file(options.like)
    if options.out is not None:
        _checked_output(Path(options.out), like, options)
    # Only now: they load transformers, which help and a mistake need not wait for.
    from export.conversion.checkpoint import open_checkpoint, silence_transformers
    from export.conversion.selection import Claims
    from export.gguf.file import write_gguf
    from mrp_lightning.records.grid_file import NAME as PARAMETERS
    from mrp_lightning.records.report import pruned_before, was_rounded

    silence_transformers()
    run = Path(options.checkpoint).expanduser().resolve()
    claims = Claims.read(run)
    kind = options.type or ("auto" if was_rounded(pruned_before(run)) else "bf16")
    needing = [str(grid) for grid in claims.grids if grid.needs_parameters]
    # Weights on such a grid do not determine minima and units to the bit, so that the file of the
    # parameters is needed. It is looked for before the checkpoint is read.
    if needing and kind in ("auto", *needing) and not (run / PARAMETERS).is_file():
        raise errors.FormatError(
            f"{run / PARAMETERS} is missing: without the scales that the pruning kept there, the "
            f"weights of {run.name} cannot be stored as {needing[0]}. Copy the directory with it, "
            "prune again, or round the weights to another --type."
        )
    out = Path(
        options.out or run.with_name(f"{run.name}{'' if kind == 'auto' else f'-{kind}'}.gguf")
    )
    out = _checked_output(out, like, options)
    checkpoint = open_checkpoint(run)
    with save_file(out, argument="--out") as partial:
        written = write_gguf(checkpoint, like, partial, kind, options.embedding_type)
    types = ", ".join(f"{count} {name}" for name, count in written.types.items())
    sys.stdout.write(f"Written to {out}: {types} tensors, {written.num_bytes / 2**20:.1f} MiB\n")
    if written.rounded:
        worst = max(written.rounded, key=written.rounded.__getitem__)
        sys.stdout.write(
            f"{len(written.rounded)} of them were rounded, by up to {written.rounded[worst]:.2%} "
            f"of their size ({worst}); --type auto holds every tensor to the bit.\n"
        )
    else:
        sys.stdout.write("Each holds the weights of the checkpoint to the bit.\n")
    for note in written.notes:
        sys.stdout.write(f"Note: {note}\n")
    return out


def _gguf_file(like: str) -> Path:
    """Return the file of `--like`."""
    if not Path(like).expanduser().exists():
        raise FileNotFoundError(f"`--like`: there is no file {like}. Give one that exists.")
    if (file := find_gguf(like)) is None:
        raise errors.OptionError(f"`--like` names a GGUF file; got {like}.")
    return file


def _checked_output(out: Path, like: Path | None, options: Namespace) -> Path:
    """Return the absolute path of the file to write, which may be written."""
    out = out.expanduser().resolve()
    # The file of `--like` is read while the output is written, and the user may have no other copy.
    if like is not None and out == like.resolve():
        raise errors.OptionError(f"`--out` {out} must not be the file of `--like`.")
    if out.suffix != ".gguf" or out.is_dir():
        raise errors.OptionError(f"`--out` names a file that ends in .gguf; got {out}.")
    if os.path.lexists(out) and not options.overwrite:
        raise FileExistsError(f"`--out`: {out} exists. Name another file, or add --overwrite.")
    check_output_file(out, "--out")
    return out


def _parser() -> Any:
    parser = CommandParser(
        "mrp-lightning gguf",
        "Write a pruned checkpoint as a GGUF file for llama.cpp.",
    )
    option = parser.add_argument
    option("checkpoint", metavar="RUN", help="the Hugging Face directory that pruning wrote")
    text = (
        "the GGUF file that the model came from, or another of the same model; llama, mistral, "
        "qwen2, qwen3, gemma, gemma2 and gemma3 do without"
    )
    option("--like", metavar="SOURCE.gguf", help=text)
    text = (
        "of matrices; norms and biases are float32. auto: the smallest type that holds a matrix to "
        "the bit (default: auto for a model that was put on few bits, else bf16)"
    )
    option("--type", choices=_TYPES, help=text)
    text = (
        "of embeddings and head (default: as --type, but q8_0 where that has fewer bits, and the "
        "type of --head-grid where that holds them to the bit)"
    )
    option("--embedding-type", choices=_TYPES, help=text)
    text = "default: RUN-TYPE.gguf, or RUN.gguf with auto, next to RUN"
    option("--out", metavar="FILE.gguf", help=text)
    option("--overwrite", action="store_true", help="replace --out")
    return parser


if __name__ == "__main__":
    main()
