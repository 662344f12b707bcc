"""Perplexities in a model card."""

import re
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from mrp_lightning.files import save_text

NAME = "README.md"
_ESCAPED = str.maketrans({mark: f"\\{mark}" for mark in "\\`*[]|!"})
_SECTION = re.compile(r"\n## Perplexity\n.*?(?=\n## |\Z)", re.S)


def in_markdown(text: str) -> str:
    """A text from elsewhere in a line of Markdown: no markup, no cell or line of its own."""
    return escape(" ".join(text.split()), quote=False).translate(_ESCAPED)


def with_perplexities(card: str, perplexity: Mapping[str, Mapping[str, Any]]) -> str:
    """A model card with a section of perplexities, in place of the one that it had.

    Args:
        card: The text of the card.
        perplexity: What was found, by text, as in `Evaluation`.
    """
    rows = [
        f"| {in_markdown(text)} | {scores['perplexity']:.3f} | {scores['context']} "
        f"| {scores['tokens']:,} |"
        for text, scores in perplexity.items()
        if None not in (scores.get(key) for key in ("perplexity", "context", "tokens"))
    ]
    if not rows:
        return card
    header = ["", "## Perplexity", "", "| text | perplexity | context | tokens |"]
    section = "\n".join([*header, "| --- | --- | --- | --- |", *rows]) + "\n"
    return _SECTION.sub("", card).rstrip() + "\n" + section


def add_perplexities(directory: Path, perplexity: Mapping[str, Mapping[str, Any]]) -> None:
    """Write perplexities into the card in a directory, if it is one of a model pruned here."""
    file = directory / NAME
    if not file.is_file():
        return
    card = file.read_text("utf-8", "replace")
    if "mrp-lightning" in card:
        save_text(file, with_perplexities(card, perplexity))
