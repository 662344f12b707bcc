"""A pruned checkpoint, packed: validated, written, proved equal to its source and timed."""

import logging
import sys
from argparse import Namespace
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from transformers import PreTrainedModel

from export.backends.apply import check_backend, why_not_here
from export.backends.torchao_format import why_not_storable
from export.conversion.checkpoint import Checkpoint, open_checkpoint
from export.conversion.head_choice import HeadChoice, choose_head
from export.conversion.parity import check_parity
from export.conversion.selection import LayerChoice, choose_layers
from export.conversion.tracking import Track, bars
from export.conversion.writing import write_dense, write_packed, write_torchao
from export.loading import load
from export.report import NO_CUDA, ExportReport, write_card
from export.speed.comparison import compare
from export.speed.options import SpeedOptions
from mrp_lightning import errors
from mrp_lightning.environment import device_named
from mrp_lightning.files import output_path
from mrp_lightning.outputs import check_output_dir, save_directory
from mrp_sparse.formats.bitmask import BITMASK
from mrp_sparse.formats.bitmask4 import BITMASK4
from mrp_sparse.formats.sparse24 import SPARSE24

log = logging.getLogger(__name__)

_FORMS = {"packed": SPARSE24, "torchao": SPARSE24, "bitmask": BITMASK, "bitmask4": BITMASK4}


def convert(options: Namespace) -> ExportReport:
    """Validate, pack, compare, measure and report.

    Args:
        options: Those of `python -m export.to_sparse`.

    Raises:
        PatternError: The checkpoint is not pruned so; see `choose_layers`.
        ParityError: The export is not equal to its source; it is not written.
        FormatError: See `open_checkpoint`.
        OptionError: Options contradict each other.
        FileExistsError: The output exists.
    """
    device = device_named(options.device)
    if options.benchmark and device.type == "cuda":
        check_backend(options.backend, device)
    if options.format == "torchao" and (reason := why_not_here("torchao", device)):
        raise errors.OptionError(
            f"`--format torchao` cannot be written here: {reason}. Run it where torchao runs, or "
            "write `--format packed`, which is as small and needs no GPU."
        )
    if options.head_bits == 8 and options.format in ("dense", "torchao"):
        raise errors.OptionError(
            f"`--head-bits 8` is for the packed formats, and not for `--format {options.format}`."
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
    head = choose_head(source) if options.head_bits == 8 else None
    with bars() as track:
        layers = choose_layers(
            source,
            form=_FORMS.get(options.format),
            skip=options.skip,
            allow_partial=options.allow_partial,
            refuse=_why_not_torchao if options.format == "torchao" else partial(_why_head, head),
            track=track,
        )
        layers = [replace(layer, reason=_why_head(head, layer) or layer.reason) for layer in layers]
        options.format = options.format or layers[0].form.option
        out = _output(options)
        report = ExportReport(
            str(options.checkpoint), options.format, layers, source.num_bytes, head
        )
        export = _Export(source, report, options, device, track)
        if not options.check_only:
            with save_directory(out, overwrite=options.overwrite, argument="--out") as staging:
                export.write(staging)
                export.compare(staging)
                export.measure(staging)
                if report.format != "dense":
                    write_card(source, report, staging)
                report.save(staging)
        elif (out / "export_report.json").is_file():
            export.compare(out)
        else:
            report.notes.append(f"checked only: {out} does not exist, and nothing was written")
    report.print()
    if not options.check_only:
        sys.stdout.write(f"Written to {out}\n")
    return report


@dataclass(frozen=True)
class _Export:
    """A checkpoint that is exported, and what is asked and found."""

    source: Checkpoint
    report: ExportReport
    options: Namespace
    device: torch.device
    track: Track

    def write(self, directory: Path) -> None:
        layers = self.report.packed
        if self.report.format == "torchao":
            written = write_torchao(self.source, directory, layers, self.device)
        elif self.report.format == "dense":
            written = write_dense(self.source, directory, layers)
        else:
            written = write_packed(self.source, directory, layers, self.report.head)
        for _ in self.track(written, len(layers), "writing layers"):
            pass

    def compare(self, directory: Path) -> None:
        """Refuse an export that is not equal to its source."""
        report, text = self.report, self.options.text
        report.exported_bytes = open_checkpoint(directory).num_bytes
        report.parity = check_parity(
            self.source,
            directory,
            report.layers,
            head=report.head,
            text=text,
            device=self.device,
            track=self.track,
        )
        report.parity.require()
        if report.parity.text is None:
            is_model = bool(self.source.config)
            reason = "the model predicts no next token" if is_model else "the module is your own"
            report.notes.append(f"logits not compared: {reason}")

    def measure(self, directory: Path) -> None:
        """Time the export, where that has a meaning and was asked for."""
        why_not = {
            "dense": "the dense format runs as its source does",
            "bitmask": "no kernel for bitmasks runs on CUDA devices",
            "bitmask4": "no kernel for bitmasks runs on CUDA devices",
            "torchao": "`--format packed --backend torchao` measures it",
        }.get(self.report.format)
        notes, backend = self.report.notes, self.options.backend
        if self.device.type != "cuda":
            untried = "" if backend == "auto" else f", back-end {backend} not tried"
            notes.append(f"{NO_CUDA}{untried}")
        elif why_not or not self.options.benchmark:
            notes.append(f"speed not measured: {why_not or 'ask for it with --benchmark'}")
        else:
            try:
                model = cast(PreTrainedModel, load(directory).eval().to(self.device))
                self.report.benchmark = compare(model, SpeedOptions.of(self.options))
            except Exception as error:  # no reason to lose a proven export
                log.exception("The benchmark failed; the export is written all the same.")
                notes.append(f"speed not measured: {type(error).__name__}: {error}")


def _why_head(head: HeadChoice | None, layer: LayerChoice) -> str | None:
    is_head = head is not None and layer.name == head.name
    return "it has 8 bits, by `--head-bits`" if is_head else None


def _why_not_torchao(layer: LayerChoice) -> str | None:
    if layer.transposed:
        return "torchao packs nn.Linear, and this is a Conv1D"
    return why_not_storable(layer.shape, layer.dtype)


def _output(options: Namespace) -> Path:
    source = output_path(options.checkpoint).resolve()
    form = _FORMS.get(options.format)
    suffix = options.format if form is None or options.format == "torchao" else form.suffix
    name = source.name.removesuffix(".ckpt")
    out = options.out and output_path(options.out).resolve()
    out = out or source.with_name(f"{name}-{suffix}")
    if out == source or out in source.parents or source in out.parents:
        raise errors.OptionError(
            f"`--out` {out} must neither be the source {source}, nor hold it, nor lie in it."
        )
    if not options.check_only:
        check_output_dir(out, overwrite=options.overwrite, argument="--out")
    return out
