"""The README of an exported model: that of the pruned one, and how this form of it is loaded."""

from pathlib import Path

from export.conversion.checkpoint import Checkpoint
from export.report import ExportReport
from mrp_lightning.environment import command
from mrp_lightning.models.skeleton import model_class
from mrp_lightning.records import evaluation
from mrp_lightning.records.model_card import (
    NAME as CARD,
)
from mrp_lightning.records.model_card import (
    made_by,
    new_card,
    with_perplexities,
    with_section,
)

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
    "bitmask4": (
        "Packed as bitmasks and four bits",
        "`weight` holds the codes of the kept values, `weight_bits` their places and "
        "`weight_scales` what the codes are multiplied with. Transformers loads them, and any "
        "other loader refuses them, until mrp-lightning's `export` is imported.",
    ),
    "torchao": (
        "torchao's 2:4 tensors",
        "They run on a CUDA device, with torchao 0.18.",
    ),
}


def write_card(source: Checkpoint, report: ExportReport, directory: Path) -> None:
    """Write `README.md` beside the files of an export, packed or as torchao's tensors.

    All is kept of the card of the pruned checkpoint, if it has one.
    """
    title, form = _FORMS[report.format]
    totals = report.totals
    lines = [
        f"{totals['packed_layers']} layers take {totals['packed_fraction']:.4f} of their bytes. "
        f"{form}",
        "",
        "```python",
        *_loading(source, report.format),
        "```",
        *_parity(report),
        *made_by(command()),
    ]
    text = with_section(_card_of_source(source.path), title, lines)
    (directory / CARD).write_text(text, encoding="utf-8")


def _card_of_source(source: Path) -> str:
    """The card of the pruned model, with the perplexities that are known by now."""
    text = new_card("Pruned model")
    if (source / CARD).is_file():
        text = (source / CARD).read_text("utf-8", "replace")
    if (source / evaluation.NAME).is_file():
        text = with_perplexities(text, evaluation.read(source).perplexity)
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
    lines = [
        "",
        f"{same} those of the pruned model on {text.tokens:,} tokens"
        + ("." if text.bit_equal else f": the likeliest agrees at {text.top1_agreement:.2%}."),
    ]
    head, cost = report.head, report.parity.head if report.parity else None
    if head is not None and cost is not None:
        what = "Its head" if head.table is None else "Its head, and the embeddings tied to it,"
        verb = "has" if head.table is None else "have"
        lines.append(
            f"{what} {verb} 8 bits, which that model was given, too: on these tokens the "
            f"likeliest agrees at {cost.top1_agreement:.2%} with what it is in 16 bits, and "
            f"perplexity goes from {cost.perplexity_before:.3f} to {cost.perplexity_after:.3f}."
        )
    return lines
