"""The paper's values next to ours.

    python lab/paper.py runs/paper/50_and_2of4/results.csv

`paper.csv` holds all tables of "Pruning Foundation Models for High Accuracy without Retraining",
arXiv:2410.15567, as printed. Perplexities of WikiText2, PTB and C4 are over windows of 2048 tokens
(others report 4096 for the same models). That of LAMBADA, and accuracies, are zero-shot; which
accuracies are normalised by length the paper does not say. Wanda's values for LLaMA2 are from the
paper of Wanda. A row is one value of one table, which another table may repeat: `model`, `setting`
and `method` as in a `Trial`, `block_size` (a number of columns, or `all`; empty where the table
gives none), `metric` (`perplexity/<text>`, or `accuracy/<task>` in percent), `value` as printed,
and `table`, its label in the paper.
"""

import sys
from pathlib import Path

import pandas as pd

from mrp_lightning.experiments.scores import Table, markdown

CONTEXT = ("", "2048")
"""Tokens a window of the perplexities of WikiText2, PTB and C4; other scores have none."""
_RUN = ["model", "setting", "method"]


def paper_values() -> pd.DataFrame:
    """Return all values, in the order of the tables, with the columns of `paper.csv`."""
    path = Path(__file__).with_suffix(".csv")
    return pd.read_csv(path, dtype=str, keep_default_na=False).astype({"value": float})


def beside_paper(results: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of a sweep's `results.csv` that the paper has, with its `value`.

    A run has the paper's name of the model. Where no table gives a block size (Mamba, magnitude,
    Wanda), the value stands for any.
    """
    paper = paper_values().drop(columns="table").rename(columns={"metric": "measure"})
    paper = paper.drop_duplicates()
    key = [*_RUN, "measure"]
    of_any = paper.groupby(key)["block_size"].transform(lambda sizes: (sizes == "").all())
    is_row = (results["changed"] == "") & results["context"].isin(CONTEXT)
    results = results[is_row].assign(row=range(is_row.sum()))
    sized = results.merge(paper[~of_any], on=[*key, "block_size"])
    unsized = results.merge(paper[of_any].drop(columns="block_size"), on=key)
    return pd.concat([sized, unsized]).sort_values("row").drop(columns="row")


def main() -> None:
    """Print the rows of a `results.csv` with the paper's values and the differences."""
    results = pd.read_csv(sys.argv[1], dtype=str, keep_default_na=False)
    both = beside_paper(results).astype({"mean": float})
    cells = [
        (r.model, f"{r.setting} {r.method}".strip(), r.block_size, r.measure, f"{r.mean:.4g}",
         f"{r.value:g}", f"{r.mean - r.value:+.3g}")
        for r in both.itertuples()
    ]  # fmt: skip
    header = ("method", "block size", "measure", "ours", "paper", "difference")
    print(markdown(Table("", header, cells, group="model")))


if __name__ == "__main__":
    main()
