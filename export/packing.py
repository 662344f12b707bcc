"""Pack a pruned checkpoint: validate, write, and compare with the source."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from export import torchao_tensors
from export.conversion.checkpoint import Checkpoint, Track, bars, open_checkpoint
from export.conversion.compressed import (
    Compressed,
    check_compressed,
    choose_compressed,
    write_compressed,
)
from export.conversion.integer_layouts import LAYOUTS
from export.conversion.loading_check import load_with_transformers
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
from export.report import ExportReport, write_card
from export.speed import measure
from mrp_lightning import errors
from mrp_lightning.devices import device_named
from mrp_lightning.errors import counted
from mrp_lightning.storage.files import output_path
from mrp_lightning.storage.outputs import check_output_dir, save_directory
from mrp_lightning.targets.blocks import listed
from mrp_sparse.formats.bitmask import BITMASK
from mrp_sparse.formats.bitmask4 import BITMASK4
from mrp_sparse.formats.sparse24 import SPARSE24

_UNPACKED = ("dense", "torchao", *LAYOUTS)
_FASTER = ("packed", "torchao")
"""The formats that CUDA devices multiply with packed, by `export.load`."""
_FORMS = {"packed": SPARSE24, "torchao": SPARSE24, "bitmask": BITMASK, "bitmask4": BITMASK4}


@dataclass(frozen=True, kw_only=True)
class PackingOptions:
    """The options of `python -m export.to_sparse`.

    Attributes:
        checkpoint: A Hugging Face directory, the directory of a pruned LightningModule, or a .ckpt.
        out: The directory to write; by default named after the checkpoint and the format.
        format: A key of `_FORMS` or `LAYOUTS`, or dense; by default the checkpoint decides.
        head_bits: 8 rounds the head to 8 bits, 16 leaves it unchanged.
        overwrite: Whether an earlier export in `out` may be replaced.
        skip: Name patterns of layers that stay dense.
        allow_partial: Whether layers that should be pruned and are not stay dense, or are an error.
        check_only: Whether to write nothing, and to compare an existing export again.
        text: Files whose text the logits are compared on; by default the embedded text.
        device: The device for the comparison, and for packing torchao's tensors; by default CUDA if
            available.
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

    def output(self, form: str) -> Path:
        """Return the directory to write in a format, checked unless nothing is written.

        Raises:
            OptionError: It is, holds or lies in the source; `check_output_dir` raises more.
        """
        source = output_path(self.checkpoint).resolve()
        suffix = form if form in _UNPACKED else _FORMS[form].suffix
        name = source.name.removesuffix(".ckpt")
        chosen = None if self.out is None else output_path(self.out).resolve()
        out = chosen or source.with_name(f"{name}-{suffix}")
        # With `--overwrite`, an output around the source would delete it. Paths are resolved, since
        # links could hide that.
        if out == source or out in source.parents or source in out.parents:
            raise errors.OptionError(
                f"`--out` {out} must neither be the source {source}, nor hold it, nor lie in it."
            )
        if not self.check_only:
            check_output_dir(out, overwrite=self.overwrite, argument="--out")
        return out


def convert(options: PackingOptions) -> ExportReport:
    """Pack a checkpoint, compare the result with its source, and print and return the report.

    Raises:
        PatternError: The checkpoint lacks the pattern; see `choose_layers`.
        ParityError: The export differs from its source; a new one is removed.
        FileNotFoundError, FormatError, TargetError: See `open_checkpoint` and `choose_layers`.
        DataError: See `text_windows`.
        OptionError: Options contradict each other, the source or this machine.
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
        # All layers are judged before anything is written, so that one message lists every layer
        # that does not fit.
        layers = choose_layers(
            source,
            form=_FORMS.get(options.format or ""),
            skip=options.skip,
            allow_partial=options.allow_partial,
            refuse=_why_not_torchao if options.format == "torchao" else partial(_why_head, head),
            track=track,
        )
        # The head is written in 8 bits, hence is no packed layer, whatever else keeps it dense.
        layers = [replace(layer, reason=_why_head(head, layer) or layer.reason) for layer in layers]
        form = options.format or layers[0].form.option
        out = options.output(form)
        report = ExportReport(str(options.checkpoint), form, layers, source.num_bytes, head)
        export = _Export(source, report, options, device, track)
        if not options.check_only:
            # The comparison precedes the move into place: a wrong export is never at `out`.
            with save_directory(out, overwrite=options.overwrite, argument="--out") as staging:
                export.write(staging)
                export.compare(staging)
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
    """Write a pruning with bits in the layout `format` of `LAYOUTS`, and return the directory.

    With `check_only`, nothing is written, and an export that is there is compared again.

    Raises:
        PatternError, TargetError: See `choose_compressed`.
        ParityError: The export differs from its source; a new one is removed.
        FileNotFoundError, FormatError: See `open_checkpoint`.
        OptionError: Options contradict each other or the source, or are not for this layout.
        FileExistsError: The output exists.
    """
    assert options.format is not None
    layout = LAYOUTS[options.format]
    without_effect = {
        "--head-bits": options.head_bits == 8,
        "--allow-partial": options.allow_partial,
        "--text": options.text,
        "--device": options.device is not None,
    }
    if named := [f"`{name}`" for name, is_given in without_effect.items() if is_given]:
        raise errors.OptionError(
            f"`--format {layout.name}` has no use for {', '.join(named)}. Leave them out; layers "
            "stay dense by `--skip`."
        )
    out = options.output(layout.name)
    source = open_checkpoint(options.checkpoint)
    with bars() as track:
        compressed = choose_compressed(source, layout, options.skip, track)
        if options.check_only:
            note = f"checked only: {out} does not exist, and nothing was written\n"
            if out.is_dir():
                check_compressed(source, out, compressed)
                loaded = load_with_transformers(source, out, compressed)
                note = f"{_summary(compressed, loaded)}Checked: {out}\n"
            sys.stdout.write(note)
            return out
        with save_directory(out, overwrite=options.overwrite, argument="--out") as staging:
            written = write_compressed(source, staging, compressed)
            for _ in track(written, len(compressed.layers), "writing layers"):
                pass
            # Bits are compared before transformers loads the model, which takes longer.
            check_compressed(source, staging, compressed)
            loaded = load_with_transformers(source, staging, compressed)
            num_bytes = open_checkpoint(staging).num_bytes
    sys.stdout.write(
        _summary(compressed, loaded)
        + f"{source.num_bytes / 2**20:.1f} → {num_bytes / 2**20:.1f} MiB. Written to {out}\n"
    )
    return out


def _summary(compressed: Compressed, loaded: str) -> str:
    """Return the lines on packed and dense layers; `loaded` is of `load_with_transformers`."""
    size = compressed.integers.group_size
    groups = "a row" if size < 0 else f"{size} columns"
    lines = [
        f"{counted(len(compressed.layers), 'layer')} in {compressed.integers.bits} "
        f"bits, with a scale for {groups}; each weight is read back to the bit."
    ]
    if compressed.left:
        lines += [
            f"{counted(len(compressed.left), 'pruned layer')} with {compressed.left_weights:,} "
            f"weights stay in 16 bits:\n{listed(compressed.left)}"
        ]
    lines += [f"{loaded} vLLM and SGLang, which read this format, were not tried here."]
    return "".join(f"{line}\n" for line in lines)


def _check_options(options: PackingOptions, device: torch.device) -> None:
    """Raise, before anything is read, if options contradict each other or this machine."""
    if options.format == "torchao" and (reason := torchao_tensors.missing(device)):
        raise errors.OptionError(
            f"`--format torchao` cannot be written here: {reason}. Run it where torchao runs, or "
            "write `--format packed`, which is as small and needs no GPU."
        )
    if options.head_bits == 8 and options.format in ("dense", "torchao"):
        raise errors.OptionError(
            f"`--head-bits 8` is for the packed formats, and not for `--format {options.format}`."
        )
    # The output is checked early if its name is known without reading the checkpoint. Otherwise it
    # depends on the format that the layers decide, and is checked after.
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
        """Compare the export with its source, and raise a `ParityError` if they differ."""
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
        elif self.device.type == "cuda" and report.format in _FASTER and report.head is None:
            self._measure(directory)

    def _measure(self, directory: Path) -> None:
        """Measure the speed of the export beside its source on the CUDA device."""
        try:
            dense, packed = self.source.load(), load(directory)
            for model in (dense, packed):
                nn.Module.to(model, self.device).eval()  # PreTrainedModel.to has another signature
        except torch.OutOfMemoryError:
            self.report.notes.append("speed not measured: the GPU cannot hold both models")
            return
        cases = self.track(measure(dense, packed), None, "measuring speed")
        self.report.speed = list(cases)


def _why_head(head: HeadChoice | None, layer: LayerChoice) -> str | None:
    is_head = head is not None and layer.name == head.name
    return "it has 8 bits, by `--head-bits`" if is_head else None


def _why_not_torchao(layer: LayerChoice) -> str | None:
    if layer.transposed:
        return "torchao packs nn.Linear, and this is a Conv1D"
    return torchao_tensors.why_not_storable(layer.shape, layer.dtype)
