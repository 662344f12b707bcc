"""The figures that the paper reports, for comparison: all of its tables, in `published.csv`.

From "Pruning Foundation Models for High Accuracy without Retraining", arXiv:2410.15567, as printed.
Perplexities of WikiText2, PTB and C4 are over windows of 2048 tokens (others report 4096 for the
same models). That of LAMBADA, and accuracies, are zero-shot; which accuracies are normalised by
length the paper does not say. Wanda's figures for LLaMA2 are from the paper of Wanda.
"""

import csv
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

CONTEXT = 2048
"""Tokens a window of the perplexities of WikiText2, PTB and C4."""


@dataclass(frozen=True)
class Figure:
    """One figure of one table; another table may repeat it.

    Attributes:
        model: Such as `LLaMA2-7B`.
        setting: `dense`, a percentage such as `50%`, or a pattern such as `2:4`.
        method: As `PruningCallback` takes it; empty for the dense model.
        block_size: A number of columns, or `all`; empty where the table gives none.
        metric: `perplexity/<text>`, or `accuracy/<task>` in percent.
        value: As printed; where it is large, often of one digit.
        table: Its label in the paper: `llama2`, `others`, `mamba` (Tables 1, 2, 3), `app:opt`,
            `app:bloom`, `app:others` (Tables A1, A2, A3).
    """

    model: str
    setting: str
    method: str
    block_size: str
    metric: str
    value: float
    table: str


@cache
def published() -> tuple[Figure, ...]:
    """All figures, in the order of the tables."""
    text = files(__package__).joinpath("published.csv").read_text("utf-8")
    rows = csv.DictReader(text.splitlines())
    return tuple(Figure(**{**row, "value": float(row["value"])}) for row in rows)  # type: ignore[arg-type]


def reported(
    model: str, setting: str, method: str | None, block_size: int | None, metric: str
) -> float | None:
    """The paper's figure for a run; `None` where it has none.

    The tables never contradict each other. Where none of them gives a block size (Mamba,
    magnitude, Wanda), the figure stands for any.

    Args:
        model: As in `Figure`.
        setting: As in `Figure`.
        method: As in `Figure`; `None` for the dense model.
        block_size: Columns a block; `None` is all.
        metric: As in `Figure`.
    """
    wanted = (model, setting, method or "", metric)
    found = [f for f in published() if (f.model, f.setting, f.method, f.metric) == wanted]
    sized = [f for f in found if f.block_size]
    size = "all" if block_size is None else str(block_size)
    matching = [f for f in sized if f.block_size == size] if sized else found
    return matching[0].value if matching else None
