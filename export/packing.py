"""Pack a pruned checkpoint: validate, write, compare with the source, and time."""

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from transformers import PreTrainedModel

from export.backends import check_backend, why_not_here, why_not_storable
from export.comparison import compare
from export.conversion.checkpoint import Checkpoint, Track, bars, open_checkpoint
from export.conversion.compressed import (
    FORMAT,
    check_compressed,
    choose_compressed,
    write_compressed,
)
from export.conversion.parity import check_parity
from export.conversion.selection import LayerChoice, choose_layers
from export.conversion.writing import (
    HeadChoice,
    choose_head,
    write_dense,
    write_packed,
    write_torchao,
)
from export.loading import load
from export.report import NO_CUDA, ExportReport, write_card
from export.timing import SpeedOptions
from mrp_lightning import errors
from mrp_lightning.environment import device_named
from mrp_lightning.files import output_path
from mrp_lightning.outputs import check_output_dir, save_directory
from mrp_sparse.formats.bitmask import BITMASK
from mrp_sparse.formats.bitmask4 import BITMASK4
from mrp_sparse.formats.sparse24 import SPARSE24

log = logging.getLogger(__name__)

_UNPACKED = ("dense", "torchao", FORMAT)
_FORMS = {"packed": SPARSE24, "torchao": SPARSE24, "bitmask": BITMASK, "bitmask4": BITMASK4}


@dataclass(frozen=True, kw_only=True)
class PackingOptions:
    """The options of `python -m export.to_sparse`.

    Attributes:
        checkpoint: A Hugging Face directory, the directory of a pruned LightningModule, or a .ckpt.
        out: The directory to write; by default named after the checkpoint and the format.
        format: A key of `_FORMS`, dense or compressed-tensors; by default the checkpoint decides.
        head_bits: 8 rounds the head to 8 bits, 16 leaves it unchanged.
        overwrite: Whether an earlier export in `out` may be replaced.
        skip: Name patterns of layers that stay dense.
        allow_partial: Whether layers that should be pruned and are not stay dense, or are an error.
        check_only: Whether to write nothing, and to compare an existing export again.
        text: Files whose text the logits are compared on; by default the embedded text.
        device: The device for comparison and measurement; by default CUDA if available.
        benchmark: Whether to measure speed, on a CUDA device.
        speed: The options of the measurement.
    """

    checkpoint: str
    out: str | None = None
    format: str | None = None
    head_bits: int = 16
    overwrite: bool = False
    skip: Sequence[str] = ()
    allow_partial: bool = False
    check_only: bool = False
    text: Sequence[str] = ()
    device: str | None = None
    benchmark: bool = False
    speed: SpeedOptions = field(default_factory=SpeedOptions)

    def output(self, form: str) -> Path:
        """Return the directory to write in a format, checked unless nothing is written."""
        source = output_path(self.checkpoint).resolve()
        suffix = form if form in _UNPACKED else _FORMS[form].suffix
        name = source.name.removesuffix(".ckpt")
        chosen = None if self.out is None else output_path(self.out).resolve()
        out = chosen or source.with_name(f"{name}-{suffix}")
        if out == source or out in source.parents or source in out.parents:
            raise errors.OptionError(
                f"`--out` {out} must neither be the source {source}, nor hold it, nor lie in it."
            )
        if not self.check_only:
            check_output_dir(out, overwrite=self.overwrite, argument="--out")
        return out


def convert(options: PackingOptions) -> ExportReport:
    """Validate, pack, compare, measure and report.

    Raises:
        PatternError: The checkpoint lacks the pattern; see `choose_layers`.
        ParityError: The export differs from its source, and is removed.
        FormatError: See `open_checkpoint`.
        OptionError: Options contradict each other.
        FileExistsError: The output exists.
    """
    device = device_named(options.device)
    _check_options(options, device)
    if device.index is not None:
        torch.cuda.set_device(device)  # the device on which `load` puts torchao's tensors
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
            form=_FORMS.get(options.format or ""),
            skip=options.skip,
            allow_partial=options.allow_partial,
            refuse=_why_not_torchao if options.format == "torchao" else partial(_why_head, head),
            track=track,
        )
        layers = [replace(layer, reason=_why_head(head, layer) or layer.reason) for layer in layers]
        form = options.format or layers[0].form.option
        out = options.output(form)
        report = ExportReport(str(options.checkpoint), form, layers, source.num_bytes, head)
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


def compress(options: PackingOptions) -> Path:
    """Write a pruning with bits as compressed-tensors, and return the directory.

    Raises:
        PatternError: Weights do not lie on the format's grid; see `choose_compressed`.
        ParityError: The export differs from its source, and is removed.
        FormatError: See `open_checkpoint`.
        OptionError: Options contradict each other.
        FileExistsError: The output exists.
    """
    without = {"`--head-bits`": options.head_bits == 8, "`--benchmark`": options.benchmark}
    if names := [name for name, is_given in without.items() if is_given]:
        raise errors.OptionError(f"{' and '.join(names)} is not for `--format {FORMAT}`.")
    out = options.output(FORMAT)
    source = open_checkpoint(options.checkpoint)
    with bars() as track:
        chosen = choose_compressed(source, options.skip, track)
        if options.check_only:
            if out.is_dir():
                check_compressed(source, out, chosen)
            return out
        with save_directory(out, overwrite=options.overwrite, argument="--out") as staging:
            written = write_compressed(source, staging, chosen)
            for _ in track(written, len(chosen.layers), "writing layers"):
                pass
            check_compressed(source, staging, chosen)
            num_bytes = open_checkpoint(staging).num_bytes
    groups = "a row" if chosen.group_size < 0 else f"{chosen.group_size} columns"
    sys.stdout.write(
        f"{len(chosen.layers)} layers in {chosen.bits} bits, with a scale for {groups}; each "
        "weight is read back to the bit.\n"
        f"{source.num_bytes / 2**20:.1f} → {num_bytes / 2**20:.1f} MiB. vLLM, SGLang and, with the "
        "package compressed-tensors, transformers load it.\n"
        f"Written to {out}\n"
    )
    return out


def _check_options(options: PackingOptions, device: torch.device) -> None:
    """Raise, before anything is read, if options contradict each other or this machine."""
    if options.benchmark and device.type == "cuda":
        check_backend(options.speed.backend, device)
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
        options.output(options.format or "packed")


@dataclass(frozen=True)
class _Export:
    """The steps of one export, which fill its report."""

    source: Checkpoint
    report: ExportReport
    options: PackingOptions
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
        """Compare the export with its source, and raise if they differ."""
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
        """Time the export, or note why it is not timed."""
        why_not = {
            "dense": "the dense format runs as its source does",
            "bitmask": "no kernel for bitmasks runs on CUDA devices",
            "bitmask4": "no kernel for bitmasks runs on CUDA devices",
            "torchao": "`--format packed --backend torchao` measures it",
        }.get(self.report.format)
        notes, backend = self.report.notes, self.options.speed.backend
        if self.device.type != "cuda":
            untried = "" if backend == "auto" else f", back-end {backend} not tried"
            notes.append(f"{NO_CUDA}{untried}")
        elif why_not or not self.options.benchmark:
            notes.append(f"speed not measured: {why_not or 'ask for it with --benchmark'}")
        else:
            try:
                model = cast(PreTrainedModel, load(directory).eval().to(self.device))
                self.report.benchmark = compare(model, self.options.speed)
            except Exception as error:  # must not discard a verified export
                log.exception("The benchmark failed; the export is written all the same.")
                notes.append(f"speed not measured: {type(error).__name__}: {error}")


def _why_head(head: HeadChoice | None, layer: LayerChoice) -> str | None:
    is_head = head is not None and layer.name == head.name
    return "it has 8 bits, by `--head-bits`" if is_head else None


def _why_not_torchao(layer: LayerChoice) -> str | None:
    if layer.transposed:
        return "torchao packs nn.Linear, and this is a Conv1D"
    return why_not_storable(layer.shape, layer.dtype)
