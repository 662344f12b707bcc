"""The reports of exports: tables on the terminal, `export_report.json`, and the model card."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from export.conversion.checkpoint import Checkpoint
from export.conversion.compressed import Compressed
from export.conversion.parity import Parity
from export.conversion.selection import LayerChoice
from export.conversion.writing import HeadChoice
from export.speed import COLUMNS, Speed, rows
from mrp_lightning.environment import command, versions
from mrp_lightning.errors import counted
from mrp_lightning.models.checkpoint import model_class
from mrp_lightning.records.model_card import NAME as CARD
from mrp_lightning.records.model_card import (
    in_markdown,
    made_by,
    new_card,
    with_section,
)
from mrp_lightning.storage.files import save_text, visible_files
from mrp_lightning.storage.json_files import as_json
from mrp_lightning.targets.blocks import alike, listed
from mrp_lightning.terminal import Console

FORMAT_VERSION = 1
NAME = "export_report.json"


@dataclass(kw_only=True)
class ExportReport:
    """The report of an export to `packed`, `bitmask`, `bitmask4` or `torchao`.

    Attributes:
        source: The pruned checkpoint.
        format: The name of the format for `--format`.
        exported_bytes: Bytes of the weight files of the export; `None` if there is no export.
        notes: The steps that were left out, with reasons.
        layers: Every linear layer of the model, and other layers that its report lists as pruned.
        head: The head if it has 8 bits.
        parity: The comparison with the source; `None` if there is no export.
        speed: The times beside the source, of 2:4 exports on a CUDA device.
    """

    source: Checkpoint
    format: str
    exported_bytes: int | None = None
    notes: list[str] = field(default_factory=list)
    layers: list[LayerChoice]
    head: HeadChoice | None = None
    parity: Parity | None = None
    speed: list[Speed] = field(default_factory=list)

    @property
    def packed(self) -> list[LayerChoice]:
        """The layers that were, or could be, packed."""
        return [layer for layer in self.layers if layer.reason is None]

    @property
    def totals(self) -> dict[str, Any]:
        """Numbers of layers, and bytes of the packed layers' weights and of whole files."""
        layers = self.packed
        dense_bytes = sum(layer.dense_bytes for layer in layers)
        packed_bytes = sum(layer.packed_bytes for layer in layers)
        return {
            "packed_layers": len(layers),
            "dense_layers": len(self.layers) - len(layers),
            "packed_layers_dense_bytes": dense_bytes,
            "packed_layers_packed_bytes": packed_bytes,
            "packed_fraction": packed_bytes / dense_bytes,
            "negative_zeros": sum(layer.negative_zeros for layer in layers),
            "source_bytes": self.source.num_bytes,
            "exported_bytes": self.exported_bytes,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `export_report.json`."""
        return {
            "format_version": FORMAT_VERSION,
            "source": str(self.source.path),
            "format": self.format,
            "layers": [
                {
                    "name": layer.name,
                    **_size(layer),
                    "kept": layer.kept,
                    "broken_groups": layer.broken_groups,
                    "negative_zeros": layer.negative_zeros,
                    "dense_because": layer.reason,
                }
                for layer in self.layers
            ],
            "head": self.head
            and {"name": self.head.name, "table": self.head.table, **_size(self.head)},
            "totals": self.totals,
            "parity": self.parity and asdict(self.parity),
            "speed": [asdict(speed) for speed in self.speed],
            "notes": self.notes,
            "versions": versions(),
        }

    def save(self, directory: Path) -> None:
        """Write the model card, and `export_report.json` with the names of all files."""
        _write_card(self, directory)
        # The report lists all files of the directory, itself too, so it is written after the
        # others.
        written = {file.relative_to(directory).as_posix() for file in visible_files(directory)}
        save_text(directory / NAME, as_json(self.to_dict() | {"files": sorted(written | {NAME})}))

    def print(self) -> None:
        """Print the sizes, the parity, and the layers that stay dense."""
        console = Console(width=None if sys.stdout.isatty() else 120)
        console.print(_sizes(self))
        # Layers with equal reasons whose names differ only in numbers share a row.
        if reasons := {layer.name: layer.reason for layer in self.layers if layer.reason}:
            console.print(_table("Dense layers", ("layer", "why"), alike(reasons)))
        if self.parity is not None:
            results = _parity_rows(self.parity)
            console.print(_table("Parity with the source", ("comparison", "result"), results))
        if self.speed:
            title = "Speed as CUDA graphs, prefill after `compress()`"
            console.print(_table(title, COLUMNS, rows(self.speed)))
        for note in self.notes:
            console.print(note)


@dataclass(kw_only=True)
class IntegerReport:
    """The report of an export to `compressed-tensors`; see `ExportReport`.

    Attributes:
        chosen: The layers and their codes.
    """

    source: Checkpoint
    format: str
    exported_bytes: int | None = None
    notes: list[str] = field(default_factory=list)
    chosen: Compressed

    @property
    def packed(self) -> Sequence[LayerChoice]:
        """The layers that were, or could be, packed."""
        return self.chosen.layers

    def save(self, directory: Path) -> None:
        """Write nothing: engines read the configuration alone."""

    def print(self) -> None:
        """Print the numbers of packed and dense layers, and how the export was read back."""
        lines, chosen = [], self.chosen
        if self.exported_bytes is not None:
            size = chosen.group_size
            groups = "a row" if size < 0 else f"{size} columns"
            lines.append(
                f"{counted(len(chosen.layers), 'layer')} in {chosen.bits} bits, with a "
                f"scale for {groups}; each weight is read back to the bit."
            )
            if chosen.left:
                lines.append(
                    f"{counted(len(chosen.left), 'pruned layer')} with {chosen.left_weights:,} "
                    f"weights stay in 16 bits:\n{listed(chosen.left)}"
                )
            lines.append("vLLM and SGLang, which read this format, were not tried.")
            sizes = (self.source.num_bytes, self.exported_bytes)
            lines.append("{:.1f} → {:.1f} MiB.".format(*(size / 2**20 for size in sizes)))
        sys.stdout.write("".join(f"{line}\n" for line in (*lines, *self.notes)))


Report = ExportReport | IntegerReport


def _size(choice: LayerChoice | HeadChoice) -> dict[str, Any]:
    return {
        "shape": list(choice.shape),
        "dtype": str(choice.dtype).removeprefix("torch."),
        "dense_bytes": choice.dense_bytes,
        "packed_bytes": choice.packed_bytes,
    }


def _table(title: str, columns: Iterable[str], lines: Iterable[Iterable[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in lines:
        table.add_row(*row)
    return table


def _sizes(report: ExportReport) -> Table:
    totals = report.totals
    kind = report.format if report.format.startswith("bitmask") else "2:4"
    name = counted(totals["packed_layers"], f"{kind} layer")
    sizes = {name: (totals["packed_layers_dense_bytes"], totals["packed_layers_packed_bytes"])}
    if report.head is not None:
        sizes["head of 8 bits"] = (report.head.dense_bytes, report.head.packed_bytes)
    if report.exported_bytes is not None:
        sizes["weight files"] = (report.source.num_bytes, report.exported_bytes)
    lines = [
        (item, f"{dense / 2**20:,.2f} MiB", f"{packed / 2**20:,.2f} MiB", f"{packed / dense:.4f}")
        for item, (dense, packed) in sizes.items()
    ]
    table = _table("Size", ("", "with zeros", "packed", "ratio"), lines)
    for column in table.columns[1:]:
        column.justify = "right"
    if totals["negative_zeros"]:
        table.caption = f"{totals['negative_zeros']} weights were −0.0 and are +0.0 now"
    return table


def _parity_rows(parity: Parity) -> Iterable[tuple[str, str]]:
    yield "tensors that unpack to the same bits", f"{parity.tensors} of {parity.tensors}"
    if parity.operators:
        worst = max(parity.operators, key=lambda row: row.packed)
        errors = f"{worst.packed:.1e} (dense product {worst.dense:.1e})"
        yield "largest relative error of a layer", errors
    if (text := parity.text) is not None:
        yield "compared on", f"{counted(text.tokens, 'token')}: {text.text}"
        equal = "equal" if text.bit_equal else f"largest difference {text.max_difference:.3g}"
        yield "logits", equal
        yield "likeliest next token equal", f"{text.top1_agreement:.2%} of all tokens"
        if not text.bit_equal:
            tokens = f"of the {text.confident_tokens} tokens with a margin above rounding"
            yield "… where it is clear", f"{text.confident_agreement:.2%} {tokens}"
        yield "perplexity", f"{text.perplexity_before:.4f} → {text.perplexity_after:.4f}"
    for name, text in (
        ("before that, 8 bits for the head", parity.head),
        ("after that, 8 bits for activations", parity.activations),
    ):
        if text is not None:
            change = f"{text.perplexity_before:.4f} → {text.perplexity_after:.4f}"
            yield f"{name}: perplexity", change
            yield "… likeliest next token equal", f"{text.top1_agreement:.2%} of all tokens"


_TITLES = {
    "packed": "Packed 2:4",
    "bitmask": "Packed as bitmasks",
    "bitmask4": "Packed as bitmasks and four bits",
    "torchao": "Packed 2:4 for torchao 0.18, on a CUDA device",
}
"""The titles of the sections on packed weights in model cards."""


def _write_card(report: ExportReport, directory: Path) -> None:
    """Write the model card of an export whose zeros are not stored."""
    source, totals = report.source, report.totals
    lines = [
        f"{totals['packed_layers']} layers take {totals['packed_fraction']:.4f} of their bytes. "
        "Transformers loads them, and any other loader refuses them, until mrp-lightning's "
        "`export` is imported.",
        *("", "```python", *_loading_code(source, report.format), "```", ""),
    ]
    if report.exported_bytes is not None:
        lines.append(
            f"Its weight files have {report.exported_bytes:,} bytes, those of the pruned model "
            f"with zeros {source.num_bytes:,}."
        )
    if report.parity is not None:
        lines += ["", "It was compared with the pruned model:", ""]
        lines += [f"* {name}: {in_markdown(value)}" for name, value in _parity_rows(report.parity)]
    # The card of the pruned checkpoint is extended, and not replaced, so that its own sections
    # stay.
    text = new_card("Pruned model")
    if (source.path / CARD).is_file():
        text = (source.path / CARD).read_text("utf-8", "replace")
    if made := made_by(command()):
        lines += ["", "Made by:", "", *made]
    text = with_section(text, _TITLES[report.format], lines)
    (directory / CARD).write_text(text, encoding="utf-8")


def _loading_code(source: Checkpoint, form: str) -> list[str]:
    """Return the lines of Python that load an export from `DIRECTORY`."""
    if not source.config:
        return ["import export", "", 'module = export.load_into(MyModule(), "DIRECTORY")']
    if form == "torchao":
        return ["import export", "", 'model = export.load("DIRECTORY")']
    # The name is that of transformers' class, since a name in the checkpoint could be any code.
    architecture = model_class(source.pretrained_config()).__name__
    return [
        "import export  # of mrp-lightning: teaches transformers the format",
        f"from transformers import {architecture}",
        "",
        f'model = {architecture}.from_pretrained("DIRECTORY")',
    ]
