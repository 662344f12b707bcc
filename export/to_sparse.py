"""`python -m export.to_sparse CKPT`: pack a pruned checkpoint, prove it equal, time it."""

import argparse
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from export.backends.apply import why_not_here
from export.backends.torchao_format import load, why_not_storable
from export.conversion.checkpoint import Checkpoint, open_checkpoint
from export.conversion.layer_choice import LayerChoice
from export.conversion.parity import check_parity
from export.conversion.selection import choose_layers
from export.conversion.tracking import Track, bars
from export.conversion.writing import write_dense, write_packed, write_torchao
from export.model_card import write_card
from export.packed.bitmask_format import BITMASK
from export.packed.sparse24_format import SPARSE24
from export.report import NO_CUDA, ExportReport
from export.speed.comparison import compare
from export.speed.options import SpeedOptions, add_arguments
from mrp_lightning import errors
from mrp_lightning.environment import device_named
from mrp_lightning.files import check_output_dir, save_directory

log = logging.getLogger(__name__)

_FORMS = {"packed": SPARSE24, "torchao": SPARSE24, "bitmask": BITMASK}
_USER_ERRORS = (
    errors.DataError,
    errors.FormatError,
    errors.OptionError,
    errors.PatternError,
    errors.TargetError,
    OSError,  # files that are not there, exist already, or cannot be written: a full disk, too
    SafetensorError,
)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line.

    Status 0: the export is written and equal to its source. 1: it is not equal. 2: a mistake of the
    user's. 130 and 143: interrupted. But for 0 nothing is written.
    """
    options = _parser().parse_args(args)
    signal.signal(signal.SIGTERM, _stop)
    # A line for each file of each model that the gate loads says nothing.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    try:
        convert(options)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: nothing was written\n")
        raise SystemExit(130) from None
    except errors.ParityError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(1) from error
    except _USER_ERRORS as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(2) from error


def convert(options: argparse.Namespace) -> ExportReport:
    """Validate, pack, compare, measure and report.

    Raises:
        PatternError: The checkpoint is not pruned so; see `choose_layers`.
        ParityError: The export is not equal to its source; it is not written.
        FormatError: See `open_checkpoint`.
        OptionError: Options contradict each other.
        FileExistsError: The output exists.
    """
    device = device_named(options.device)
    measured = options.benchmark and device.type == "cuda"
    if measured and (reason := why_not_here(options.backend, device)):
        raise errors.OptionError(f"`--backend {options.backend}` cannot run here: {reason}.")
    if options.format == "torchao" and (reason := why_not_here("torchao", device)):
        raise errors.OptionError(
            f"`--format torchao` cannot be written here: {reason}. Run it where torchao runs, or "
            "write `--format packed`, which is as small and needs no GPU."
        )
    if options.format is not None or options.out is not None:
        _output(options)  # refused before anything is read
    if device.index is not None:
        torch.cuda.set_device(device)  # where `load` puts torchao's tensors
    source = open_checkpoint(options.checkpoint)
    if options.format == "torchao" and not source.config:
        raise errors.OptionError(
            "`--format torchao` is for transformers models; pack a module of your own with "
            "`--format packed`."
        )
    with bars() as track:
        layers = choose_layers(
            source,
            form=_FORMS.get(options.format),
            skip=options.skip,
            allow_partial=options.allow_partial,
            refuse=_why_not_torchao if options.format == "torchao" else lambda _: None,
            track=track,
        )
        options.format = options.format or layers[0].form.option
        out = _output(options)
        report = ExportReport(str(options.checkpoint), options.format, layers, source.num_bytes)
        if options.check_only:
            _check(source, report, out, options, device, track)
        else:
            with save_directory(out, overwrite=options.overwrite, argument="--out") as staging:
                _export(source, report, staging, options, device, track)
                _compare(source, report, staging, options, device, track)
                _measure(report, staging, options, device)
                if report.format != "dense":
                    write_card(source, report, staging)
                report.save(staging)
    report.print()
    if not options.check_only:
        sys.stdout.write(f"Written to {out}\n")
    return report


def _export(
    source: Checkpoint,
    report: ExportReport,
    staging: Path,
    options: argparse.Namespace,
    device: torch.device,
    track: Track,
) -> None:
    layers = report.packed
    if options.format == "torchao":
        written = write_torchao(source, staging, layers, device)
    elif options.format == "dense":
        written = write_dense(source, staging, layers)
    else:
        written = write_packed(source, staging, layers)
    for _ in track(written, len(layers), "writing layers"):
        pass


def _check(
    source: Checkpoint,
    report: ExportReport,
    out: Path,
    options: argparse.Namespace,
    device: torch.device,
    track: Track,
) -> None:
    """Compare with what was exported before, if that is there."""
    if (out / "export_report.json").is_file():
        _compare(source, report, out, options, device, track)
    else:
        report.notes.append(f"checked only: {out} does not exist, and nothing was written")


def _compare(
    source: Checkpoint,
    report: ExportReport,
    directory: Path,
    options: argparse.Namespace,
    device: torch.device,
    track: Track,
) -> None:
    report.exported_bytes = open_checkpoint(directory).num_bytes
    report.parity = check_parity(
        source, directory, report.layers, text=options.text, device=device, track=track
    )
    report.parity.require()
    if report.parity.text is None:
        reason = "the model predicts no next token" if source.config else "the module is your own"
        report.notes.append(f"logits not compared: {reason}")


def _measure(
    report: ExportReport, directory: Path, options: argparse.Namespace, device: torch.device
) -> None:
    """Time the export, where that has a meaning and was asked for."""
    if device.type != "cuda":
        untried = "" if options.backend == "auto" else f", back-end {options.backend} not tried"
        report.notes.append(f"{NO_CUDA}{untried}")
    elif report.format == "dense":
        report.notes.append("speed not measured: the dense format runs as its source does")
    elif report.format == "bitmask":
        report.notes.append("speed not measured: no kernel for bitmasks runs on CUDA devices")
    elif report.format == "torchao":
        report.notes.append("speed not measured: `--format packed --backend torchao` measures it")
    elif not options.benchmark:
        report.notes.append("speed not measured: ask for it with --benchmark")
    else:
        try:
            model = cast(PreTrainedModel, load(directory).eval().to(device))
            report.benchmark = compare(model, SpeedOptions.of(options))
        except Exception as error:  # no reason to lose a proven export
            log.exception("The benchmark failed; the export is written all the same.")
            report.notes.append(f"speed not measured: {type(error).__name__}: {error}")


def _why_not_torchao(layer: LayerChoice) -> str | None:
    if layer.transposed:
        return "torchao packs nn.Linear, and this is a Conv1D"
    return why_not_storable(layer.shape, layer.dtype)


def _output(options: argparse.Namespace) -> Path:
    source = Path(options.checkpoint).expanduser().resolve()
    form = _FORMS.get(options.format)
    suffix = options.format if form is None or options.format == "torchao" else form.suffix
    name = source.name.removesuffix(".ckpt")
    out = options.out and Path(options.out).expanduser().resolve()
    out = out or source.with_name(f"{name}-{suffix}")
    if out == source or out in source.parents or source in out.parents:
        raise errors.OptionError(
            f"`--out` {out} must neither be the source {source}, nor hold it, nor lie in it."
        )
    for place in (Path.cwd(), Path.home().resolve()):
        if out == place or out in place.parents:
            raise errors.OptionError(f"`--out` {out} would replace {place}. Name a new directory.")
    if not options.check_only:
        check_output_dir(out, overwrite=options.overwrite, argument="--out")
    return out


def _stop(*_: Any) -> None:
    """End by an exception, so that what is half written is removed."""
    raise SystemExit(143)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m export.to_sparse",
        description="Pack a checkpoint that was pruned, prove that it computes the same, "
        "and measure its speed.",
    )
    parser.add_argument(
        "checkpoint",
        metavar="CKPT",
        help="a Hugging Face directory, what pruning wrote of your own LightningModule, or a "
        "Lightning .ckpt of mrp_lightning.CausalLM",
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="default: CKPT-sparse24, or CKPT-FORMAT for the others",
    )
    parser.add_argument(
        "--format",
        choices=("packed", "bitmask", "dense", "torchao"),
        help="packed is for 2:4, bitmask for any pattern; dense keeps the zeros, for software that "
        "knows no sparsity; torchao writes its own 2:4 tensors, on a CUDA device (default: packed "
        "where the checkpoint is 2:4, else bitmask)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what is in --out")
    parser.add_argument(
        "--skip",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="layers that stay dense: name parts with wildcards, such as lm_head or layers.0",
    )
    parser.add_argument(
        "--allow-partial",
        action="store_true",
        help="leave layers dense that were to be pruned and are not",
    )
    parser.add_argument(
        "--check-only",
        action="store_true",
        help="write nothing: check the source, and compare it with --out if that exists",
    )
    parser.add_argument(
        "--text",
        nargs="+",
        default=[],
        metavar="FILE",
        help="text or .jsonl to compare logits on (default: the embedded text)",
    )
    parser.add_argument("--device", help="where to compare and measure (default: cuda if present)")
    speed = parser.add_argument_group("speed, on a CUDA device")
    speed.add_argument("--benchmark", action="store_true", help="measure prefill and decode")
    add_arguments(speed, batch_sizes=[1, 8])
    return parser


if __name__ == "__main__":
    main()
