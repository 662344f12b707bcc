"""The README of an exported model: that of the pruned one, and how this form of it is loaded."""

from pathlib import Path

from export.conversion.checkpoint import Checkpoint
from export.report import ExportReport
from mrp_lightning.environment import command
from mrp_lightning.models.skeleton import model_class
from mrp_lightning.records import evaluation as records
from mrp_lightning.records import evaluation_card as card

_FORMS = {
    "packed": (
        "Packed 2:4",
        "`weight` holds the kept values and `weight_meta` their places. Transformers loads them, "
        "and any other loader refuses them, until mrp-lightning's `export` is imported.",
    ),
    "bitmask": (
        "Packed as bitmasks",
        "`weight` holds the kept values and `weight_bits` their places. Transformers loads them, "
        "and any other loader refuses them, until mrp-lightning's `export` is imported.",
    ),
    "torchao": (
        "torchao's 2:4 tensors",
        "They run on a CUDA device, with torchao 0.18.",
    ),
}


def write_card(source: Checkpoint, report: ExportReport, directory: Path) -> None:
    """Write `README.md` into a directory that was exported, packed or as torchao's tensors.

    Args:
        source: The pruned checkpoint; of its card, if it has one, all is kept.
        report: The report of the export.
        directory: Where the exported files are.
    """
    title, form = _FORMS[report.format]
    totals = report.totals
    lines = [
        f"## {title}",
        "",
        f"{totals['packed_layers']} layers take {totals['packed_fraction']:.4f} of their bytes. "
        f"{form}",
        "",
        "```python",
        *_loading(source, report.format),
        "```",
        "",
        *_parity(report),
    ]
    if (made_by := command()) is not None:
        lines += ["Made by:", "", "```", made_by, "```", ""]
    text = _card_of_source(source).rstrip() + "\n\n" + "\n".join(lines)
    (directory / card.NAME).write_text(text.rstrip() + "\n", encoding="utf-8")


def _card_of_source(source: Checkpoint) -> str:
    """The card of the pruned model, with the perplexities that are known by now."""
    text = "---\ntags: [pruned, sparse]\n---\n\n# Pruned model\n"
    if (source.path / card.NAME).is_file():
        text = (source.path / card.NAME).read_text("utf-8", "replace")
    if (source.path / records.NAME).is_file():
        text = card.with_perplexities(text, records.read(source.path).perplexity)
    return text


def _loading(source: Checkpoint, form: str) -> list[str]:
    if not source.config:
        return ["import export", "", 'module = export.load_into(MyModule(), "DIRECTORY")']
    if form == "torchao":
        return ["import export", "", 'model = export.load("DIRECTORY")']
    # What the checkpoint calls its class is made code here, for others to run.
    architecture = model_class(source.pretrained_config()).__name__
    return [
        "import export  # of mrp-lightning: teaches transformers the format",
        f"from transformers import {architecture}",
        "",
        f'model = {architecture}.from_pretrained("DIRECTORY")',
    ]


def _parity(report: ExportReport) -> list[str]:
    text = report.parity.text if report.parity else None
    if text is None:
        return []
    same = "Its logits are equal to" if text.bit_equal else "It was compared with"
    return [
        f"{same} those of the pruned model on {text.tokens:,} tokens"
        + ("." if text.bit_equal else f": the likeliest agrees at {text.top1_agreement:.2%}."),
        "",
    ]
