"""The values that the paper reports, for comparison: all of its tables, in `paper.csv`.

From "Pruning Foundation Models for High Accuracy without Retraining", arXiv:2410.15567, as printed.
Perplexities of WikiText2, PTB and C4 are over windows of 2048 tokens (others report 4096 for the
same models). That of LAMBADA, and accuracies, are zero-shot; which accuracies are normalised by
length the paper does not say. Wanda's values for LLaMA2 are from the paper of Wanda.

A row is one value of one table, which another table may repeat: `model`, `setting` and `method` as
in a `Trial`, `block_size` (a number of columns, or `all`; empty where the table gives none),
`metric` (`perplexity/<text>`, or `accuracy/<task>` in percent), `value` as printed, and `table`,
its label in the paper: `llama2`, `others`, `mamba` (Tables 1, 2, 3), `app:opt`, `app:bloom`,
`app:others` (Tables A1, A2, A3).
"""

from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from mrp_lightning.experiments.trials import Trial

CONTEXT = 2048
"""Tokens a window of the perplexities of WikiText2, PTB and C4."""


@cache
def paper_values() -> tuple[Any, ...]:
    """All values, in the order of the tables: rows with the columns of `paper.csv`."""
    path = Path(__file__).with_name("paper.csv")
    table = pd.read_csv(path, dtype=str, keep_default_na=False).astype({"value": float})
    return tuple(table.itertuples(index=False))


def reported(trial: Trial, metric: str) -> float | None:
    """Return the paper's value for a trial; `None` where it has none.

    The trial has the paper's name of the model. The tables never contradict each other. Where none
    of them gives a block size (Mamba, magnitude, Wanda), the value stands for any.
    """
    if trial.changed or trial.recipe:
        return None
    wanted = (trial.model, trial.setting, trial.method or "", metric)
    values = [v for v in paper_values() if (v.model, v.setting, v.method, v.metric) == wanted]
    sized = [v for v in values if v.block_size]
    size = "all" if trial.block_size is None else str(trial.block_size)
    matching = [v for v in sized if v.block_size == size] if sized else values
    return matching[0].value if matching else None
