"""Export a pruned checkpoint: choose what is packed, write it, and prove it equal to its source.

A `Target` does this for one format; all of them are in `TARGETS`.
"""

import json
import sys
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from export.conversion.checkpoint import Checkpoint, open_checkpoint, tracked
from export.conversion.compressed import NAME as COMPRESSED
from export.conversion.compressed import (
    check_compressed,
    choose_compressed,
    write_compressed,
)
from export.conversion.parity import Parity, check_parity
from export.conversion.selection import Claims, LayerChoice, choose_layers
from export.conversion.writing import choose_head, write_packed
from export.loading import TORCHAO, load, torchao_missing, why_not_torchao
from export.report import ExportReport, IntegerReport, Report
from export.speed import measure
from mrp_lightning.devices import device_named
from mrp_lightning.errors import OptionError, first_line
from mrp_lightning.records import evaluation
from mrp_lightning.storage.files import output_path, save_text
from mrp_lightning.storage.json_files import as_json, read_json
from mrp_lightning.storage.outputs import check_output_dir, save_directory
from mrp_sparse.formats.bitmask import BITMASK
from mrp_sparse.formats.bitmask4 import BITMASK4
from mrp_sparse.formats.packed_format import PackedFormat
from mrp_sparse.formats.sparse24 import SPARSE24


@dataclass(frozen=True)
class Job:
    """One export: its source, the options of the command line, and the comparison's device."""

    source: Checkpoint
    options: Namespace
    device: torch.device


R = TypeVar("R", ExportReport, IntegerReport)


class Target(ABC, Generic[R]):
    """A format of an export, whose report is an R.

    Attributes:
        suffix: The end of the name of an exported directory; `None` if the checkpoint decides.
    """

    suffix: str | None

    @abstractmethod
    def require(self, options: Namespace) -> None:
        """Raise an `OptionError` if options contradict the format, or the machine lacks it."""

    @abstractmethod
    def choose(self, job: Job) -> R:
        """Judge all layers, so that one message lists each that does not fit, and report them."""

    @abstractmethod
    def write(self, job: Job, report: R, directory: Path) -> Iterator[str]:
        """Write the export into an empty directory, yielding the names of layers."""

    @abstractmethod
    def check(self, job: Job, report: R, directory: Path) -> None:
        """Compare an export on disk with its source; a `ParityError` lists the differences."""


class Packed(Target[ExportReport]):
    """A format of this package: the zeros of a packed layer are not stored.

    Args:
        form: The packed format; `None` lets the checkpoint decide.
    """

    name: str | None = None  # of the format, if it is not that of the packed layers

    def __init__(self, form: PackedFormat | None) -> None:
        self.form = form
        self.suffix = self.name or (form.name if form else None)

    def require(self, options: Namespace) -> None:
        """Refuse activations of 8 bits where the format has none."""
        if self.form is not None:
            self._check_activations(options, self.form)

    def why_not(self, layer: LayerChoice) -> str | None:  # noqa: ARG002
        """Return why a layer that has the zeros cannot be written, `None` if it can."""
        return None

    def choose(self, job: Job) -> ExportReport:
        """Choose a format and the layers that fit it; see `choose_layers` and `choose_head`."""
        head = choose_head(job.source) if job.options.head_bits == 8 else None

        def why_not(layer: LayerChoice) -> str | None:
            if head is not None and layer.name == head.name:
                return "it has 8 bits, by `--head-bits`"
            return self.why_not(layer)

        layers = choose_layers(
            job.source,
            form=self.form,
            skip=job.options.skip,
            refuse=why_not,
        )
        # The head is written in 8 bits, hence is no packed layer, whatever else keeps it dense.
        layers = [replace(layer, reason=why_not(layer) or layer.reason) for layer in layers]
        name = self.name or layers[0].form.option
        self._check_activations(job.options, layers[0].form)
        return ExportReport(source=job.source, format=name, layers=layers, head=head)

    def _check_activations(self, options: Namespace, form: PackedFormat) -> None:
        """Raise an `OptionError` if activations are to be rounded, and files cannot ask for it."""
        if options.activations == "int8" and "int8" not in form.activations:
            raise OptionError(
                f"`--activations {options.activations}` is for `--format {BITMASK4.option}`, and "
                f"not for {self.name or form.option}. Leave it out, or prune with `bits=4`."
            )

    def write(self, job: Job, report: ExportReport, directory: Path) -> Iterator[str]:
        """Write packed tensors as safetensors, as `Target.write` asks.

        Unless the user decides, files of four bits ask for rounded activations: `check` has to
        measure the loss, and withdraws this where it is no small one.
        """
        activations = job.options.activations
        # The loss is measured of transformers' models alone: for others the user decides.
        may_round = activations is None and bool(job.source.config)
        if may_round and "int8" in report.packed[0].form.activations:
            activations = "int8"
        settings = {"activations": activations if activations == "int8" else None}
        return write_packed(job.source, directory, report.packed, report.head, settings)

    def check(self, job: Job, report: ExportReport, directory: Path) -> None:
        """Compare bits, products and logits; on a CUDA device measure the speed of 2:4.

        An export that was written before must have been written by these options.
        """
        if job.options.check_only:
            chosen = job.options.activations
            given = {} if chosen is None else {"activations": None if chosen == "exact" else chosen}
            given |= {"head": report.head and report.head.settings}
            _require_settings(directory, {"quant_method": self.quant_method(report), **given})
        report.exported_bytes = open_checkpoint(directory).num_bytes
        report.parity = check_parity(
            job.source,
            directory,
            report.layers,
            head=report.head,
            device=job.device,
        )
        report.parity.require()
        is_chosen = job.options.activations is not None or job.options.check_only
        if not is_chosen and not report.parity.rounding_is_free:
            _keep_activations(report.parity, directory, report.notes)
        if not job.options.check_only:
            _leave_out_scores(report, directory)
        if report.parity.text is None:
            is_model = bool(job.source.config)
            reason = "the model predicts no next token" if is_model else "the module is your own"
            report.notes.append(f"logits not compared: {reason}")
        elif job.device.type == "cuda" and self.form is SPARSE24 and report.head is None:
            _measure(job, report, directory)

    def quant_method(self, report: ExportReport) -> str:
        """Return the `quant_method` of the written files."""
        return report.packed[0].form.quant_method


def _require_settings(directory: Path, expected: Mapping[str, Any]) -> None:
    """Raise an `OptionError` if the files of an export say that it had other options."""
    path = directory / "config.json"
    config = read_json(path, "export the pruned model again") if path.is_file() else {}
    written = config.get("quantization_config") or {}
    different = [
        f"`{key}` is {written.get(key)!r}, expected {value!r}"
        for key, value in expected.items()
        if written.get(key) != value
    ]
    if different:
        raise OptionError(
            f"`--out` {directory} is no export with these options, by `quantization_config` of its "
            f"config.json: {'; '.join(different)}. Give the options that it was made with."
        )


def _keep_activations(parity: Parity, directory: Path, notes: list[str]) -> None:
    """Withdraw from the files of an export that activations are rounded, if they say so."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    if config.get("quantization_config", {}).pop("activations", None) is None:
        return
    save_text(path, as_json(config))
    text, parity.activations = parity.activations, None
    reason = "the loss could not be measured"
    if text is not None:
        change = text.perplexity_after / text.perplexity_before - 1
        reason = f"it would change the perplexity of {text.text} by {change:+.1%}"
    notes.append(f"activations are not rounded: {reason} (`--activations int8` rounds them)")


def _leave_out_scores(report: ExportReport, directory: Path) -> None:
    """Delete the copied scores of a checkpoint whose head or activations the export rounds."""
    path, scores = directory / "config.json", directory / evaluation.NAME
    config = json.loads(path.read_text()) if path.is_file() else {}
    rounds = report.head or config.get("quantization_config", {}).get("activations")
    if rounds and scores.is_file():
        scores.unlink()
        report.notes.append(f"{scores.name} not copied: rounding changes the scores")


def _measure(job: Job, report: ExportReport, directory: Path) -> None:
    """Measure the speed of an export beside its source on the CUDA device."""
    try:
        dense, packed = job.source.load(), load(directory)
        for model in (dense, packed):
            nn.Module.to(model, job.device).eval()  # PreTrainedModel.to has another signature
        report.speed = list(tracked(measure(dense, packed), None, "measuring speed"))
    except Exception as error:  # such as a GPU that cannot hold both; the export is proven already
        report.notes.append(f"speed not measured: {first_line(error)}")


class Torchao(Packed):
    """The packed 2:4 format, of which torchao multiplies with the layers on a CUDA device."""

    name = "torchao"

    def quant_method(self, report: ExportReport) -> str:  # noqa: ARG002
        """Return the `quant_method` of files that torchao multiplies with."""
        return TORCHAO

    def require(self, options: Namespace) -> None:
        """Raise an OptionError on machines where torchao's tensors do not run, or for 8 bits."""
        if reason := torchao_missing(device_named(options.device)):
            raise OptionError(
                f"`--format torchao` cannot be written here: {reason}. Run it where torchao runs, "
                "or write `--format packed`, whose files are the same and need no GPU."
            )
        if options.head_bits == 8:
            raise OptionError(
                "`--head-bits 8` is for the packed formats, and not for `--format torchao`."
            )
        super().require(options)

    def why_not(self, layer: LayerChoice) -> str | None:
        """Return why torchao cannot store a layer, `None` if it can."""
        if layer.transposed:
            return "torchao packs nn.Linear, and this is a Conv1D"
        return why_not_torchao(layer.shape, layer.dtype)

    def choose(self, job: Job) -> ExportReport:
        """Choose the layers of a transformers model that fit."""
        if not job.source.config:
            raise OptionError(
                "`--format torchao` is for transformers models; pack a module of your own with "
                "`--format packed`."
            )
        return super().choose(job)

    def write(self, job: Job, report: ExportReport, directory: Path) -> Iterator[str]:
        """Write packed tensors under torchao's `quant_method`, as `Target.write` asks."""
        settings = {"quant_method": self.quant_method(report)}
        return write_packed(job.source, directory, report.packed, settings=settings)


class CompressedTensors(Target[IntegerReport]):
    """Weights of 4 or 8 bits, with their zeros, for engines that read integers."""

    suffix = COMPRESSED

    def require(self, options: Namespace) -> None:
        """Raise an OptionError that lists the options which this format has no use for."""
        without_effect = {
            "--head-bits": options.head_bits == 8,
            "--activations": options.activations is not None,
            "--device": options.device is not None,
        }
        if named := [f"`{name}`" for name, is_given in without_effect.items() if is_given]:
            raise OptionError(
                f"`--format {COMPRESSED}` has no use for {', '.join(named)}. Leave them out; "
                "layers stay dense by `--skip`."
            )

    def choose(self, job: Job) -> IntegerReport:
        """Find the codes of all pruned layers; see `choose_compressed`."""
        chosen = choose_compressed(job.source, job.options.skip)
        return IntegerReport(source=job.source, format=COMPRESSED, chosen=chosen)

    def write(self, job: Job, report: IntegerReport, directory: Path) -> Iterator[str]:
        """Write codes and scales as safetensors, as `Target.write` asks."""
        return write_compressed(job.source, directory, report.chosen)

    def check(self, job: Job, report: IntegerReport, directory: Path) -> None:
        """Compare all weights with the source's bit by bit; see `Packed.check`."""
        if job.options.check_only:
            _require_settings(directory, {"quant_method": COMPRESSED})
        check_compressed(job.source, directory, report.chosen)
        report.exported_bytes = open_checkpoint(directory).num_bytes


TARGETS: dict[str, Target[ExportReport] | Target[IntegerReport]] = {
    **{form.option: Packed(form) for form in (SPARSE24, BITMASK, BITMASK4)},
    "torchao": Torchao(SPARSE24),
    COMPRESSED: CompressedTensors(),
}
"""The formats by their names for `--format`."""


def claims_of_model(checkpoint: str) -> Claims:
    """Return the claims about a transformers model, none about a module of the user's own."""
    run = Path(checkpoint).expanduser()
    return Claims.read(run) if (run / "config.json").is_file() else Claims()


def _default_target(options: Namespace) -> Target:
    """Return the format of the engine on whose grid a run put its weights, else a packed one."""
    claims = claims_of_model(options.checkpoint)
    if (grid := claims.engine_grid) is None:
        # Weights of 8 bits of which none was removed have nothing to pack.
        is_of_bytes = claims.grid is not None and claims.grid.bits == 8 and not claims.structure
        has_zeros = any(claim.sparsity or claim.pattern for claim in (claims.layers or {}).values())
        return TARGETS[COMPRESSED] if is_of_bytes and not has_zeros else Packed(None)
    if grid.engine == "vLLM":
        return TARGETS[COMPRESSED]
    raise OptionError(
        f"{options.checkpoint} is on llama.cpp's grid {grid}, whose file `mrp-lightning gguf` "
        "writes, and so does `export` with no option but `--out` and `--overwrite`. A `--format` "
        "stores the weights in 16 bits or more."
    )


def _output(options: Namespace, suffix: str) -> Path:
    """Return the directory to write, whose default name ends in a suffix; check it, if written."""
    source = output_path(options.checkpoint).resolve()
    chosen = None if options.out is None else output_path(options.out).resolve()
    out = chosen or source.with_name(f"{source.name}-{suffix}")
    # With `--overwrite`, an output around the source would delete it. Paths are resolved, since
    # links could hide that.
    if out == source or out in source.parents or source in out.parents:
        raise OptionError(
            f"`--out` {out} must neither be the source {source}, nor hold it, nor lie in it."
        )
    if not options.check_only:
        check_output_dir(out, overwrite=options.overwrite, argument="--out")
    return out


def convert(options: Namespace) -> Report:
    """Export a checkpoint by the options of `export/to_sparse.py`; print and return the report.

    Raises:
        PatternError, FileNotFoundError, FormatError, TargetError: See `open_checkpoint`,
            `choose_layers` and `choose_compressed`.
        ParityError: The export differs from its source; a new one is removed.
        DataError: See `text_windows`.
        OptionError: Options contradict each other, the source or this machine.
        FileExistsError: The output exists.
    """
    target: Target = TARGETS[options.format] if options.format else _default_target(options)
    target.require(options)
    device = device_named(options.device)
    # The output is checked early if its name is known without reading the checkpoint. Otherwise it
    # depends on the format that the layers decide, and is checked after.
    if target.suffix is not None or options.out is not None:
        _output(options, target.suffix or "")
    if device.index is not None:
        torch.cuda.set_device(device)  # the device on which `load` puts torchao's tensors
    job = Job(open_checkpoint(options.checkpoint), options, device)
    report = target.choose(job)
    target = TARGETS[report.format]
    out = _output(options, target.suffix or "")
    outcome = "Written to"
    if not options.check_only:
        # The comparison precedes the move into place: a wrong export is never at `out`.
        with save_directory(out, overwrite=options.overwrite, argument="--out") as staging:
            written = target.write(job, report, staging)
            for _ in tracked(written, len(report.packed), "writing layers"):
                pass
            target.check(job, report, staging)
            report.save(staging)
    elif out.is_dir():
        target.check(job, report, out)
        outcome = "Checked:"
    else:
        report.notes.append(f"checked only: {out} does not exist, and nothing was written")
        outcome = ""
    report.print()
    sys.stdout.write(f"{outcome} {out}\n" if outcome else "")
    return report
