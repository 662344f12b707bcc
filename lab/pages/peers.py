"""The perplexities of other codes, from the table of a page in Markdown."""

import itertools
import re
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from mrp_lightning.errors import FormatError
from mrp_lightning.records.evaluation import UNNAMED

Peers = Mapping[tuple[str, str], Mapping[str, Mapping[str, float]]]
"""Perplexities by (model, text), sparsity and the name of the code."""

NO_PEERS: Peers = {}
_COLUMNS = ("model", "sparsity", "code", "perplexity")


def read_tables(page: str) -> list[pd.DataFrame]:
    """Return the tables of a page in Markdown, all cells as text."""
    tables: list[list[list[str]]] = []
    lines = ["", *page.splitlines()]
    for last, line in itertools.pairwise(lines):
        if line.startswith("|"):
            if not last.startswith("|"):
                tables.append([])
            tables[-1].append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return [pd.DataFrame(rows[2:], columns=rows[0]) for rows in tables if len(rows) > 2]


def read_peers(path: Path, text: str = UNNAMED) -> Peers:
    """Return the perplexities of a page, by its tables that name `model`, `sparsity` and `code`.

    They are means over the seeds, of the text that sweeps call `text`.

    Raises:
        FileNotFoundError: There is no such page.
        FormatError: No table of it has these columns.
    """
    tables = [
        table for table in read_tables(path.read_text("utf-8")) if set(_COLUMNS) <= set(table)
    ]
    if not tables:
        raise FormatError(
            f"`peers`: {path} has no table with the columns {', '.join(_COLUMNS)}; expected what "
            "`python lab/benchmarks/original_accuracy.py` prints."
        )
    peers: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    for keys, rows in pd.concat(tables).groupby(list(_COLUMNS[:3]), sort=False):
        model, sparsity, code = keys
        of_model = peers.setdefault((model, text), {}).setdefault(sparsity, {})
        of_model[code] = float(rows["perplexity"].astype(float).mean())
    return peers
