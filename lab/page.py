"""The tables of sweeps in pages of lab/results.

    python lab/page.py lab/results/results.md lab/results/ablations.md

A page has words of its own, and between `<!-- tables of runs/results -->` and `<!-- end -->` the
tables that the sweep with `out: runs/results` wrote: its `results.md`, and the claims of the paper
that its `results.csv` decides.
"""

import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from mrp_lightning.commands.numbers import perplexity
from mrp_lightning.experiments.scores import Table, markdown
from mrp_lightning.storage.files import save_text

_TABLES = re.compile(r"(<!-- tables of (\S+) -->\n).*?(<!-- end -->)", re.S)
_BETTER = "SM is better than SparseGPT"
_EQUAL = "MM is as good as SM: within a fifth of SM's gain over SparseGPT"
_GAP = "The gap to SparseGPT grows with sparsity"
_ABLATIONS = {
    "damping": ("Smaller damping is better", False),
    "num_samples": ("More calibration samples are better", True),
}


def main() -> None:
    """Write the tables of the pages of the command line."""
    for page in map(Path, sys.argv[1:]):
        text, number = _TABLES.subn(_tables, page.read_text("utf-8"))
        if not number:
            raise SystemExit(f"error: {page} has no `<!-- tables of DIR -->`, `<!-- end -->`.")
        save_text(page, text)


def _tables(markers: re.Match[str]) -> str:
    begin, directory, end = markers.groups()
    if not (results := Path(directory, "results.md")).is_file():
        raise SystemExit(f"error: there is no {results}. Make the sweep of the page first.")
    claims = claims_table(pd.read_csv(results.with_suffix(".csv")))
    decided = f"\n## What the paper claims\n\n{markdown(claims)}\n" if claims else ""
    return f"{begin}\n{results.read_text('utf-8')}{decided}\n{end}"


def claims_table(results: pd.DataFrame) -> Table | None:
    """Return the claims of the paper that the `results.csv` of a sweep decides; `None` if none."""
    rows = results[results["measure"].str.startswith("perplexity")]
    rows = rows.fillna({"block_size": "", "changed": "", "deviation": 0.0})
    changed = rows["changed"].astype(str).str.extract("^(?P<option>[^=]*)=?(?P<value>.*)$")
    decided: dict[str, list[tuple[str, ...]]] = {}
    for case, of in rows.join(changed).groupby(["model", "block_size", "measure"], sort=False):
        model, size, measure = map(str, case)
        text = measure.partition("/")[2]
        where = ", ".join(filter(None, [model, f"S={size}" if size else "", text]))
        for claim, holds, setting, numbers in (*_of_methods(of), *_of_options(of)):
            is_so = "yes" if holds else "**no**"
            decided.setdefault(claim, []).append((is_so, f"{setting} {where}".strip(), numbers))
    found = [(claim, *row) for claim, cases in decided.items() for row in cases]
    header = ("holds", "where", "perplexity")
    return Table("", header, found, group="claim") if found else None


def _of_methods(rows: pd.DataFrame) -> Iterator[tuple[str, bool, str, str]]:
    """Yield (claim, whether it holds, setting, numbers) of SparseGPT, SM and MM."""
    ratios: dict[str, float] = {}
    for setting, of_setting in rows[rows["option"] == ""].groupby("setting", sort=False):
        of = of_setting.set_index("method")
        if not {"SS", "SM"} <= set(of.index):
            continue
        mean, spread = of["mean"], of["deviation"]
        gain = mean["SS"] - mean["SM"]
        ratios[str(setting)] = mean["SS"] / mean["SM"]
        numbers = f"SparseGPT {perplexity(mean['SS'])}, SM {perplexity(mean['SM'])}"
        yield _BETTER, gain > np.hypot(spread["SS"], spread["SM"]), str(setting), numbers
        if "MM" in of.index:
            holds = abs(mean["SM"] - mean["MM"]) < 0.2 * gain
            yield _EQUAL, holds, str(setting), f"{numbers}, MM {perplexity(mean['MM'])}"
    grows = sorted((float(of[:-1]), ratio) for of, ratio in ratios.items() if of.endswith("%"))
    if len(grows) > 1:
        listed = ", ".join(f"{percent:g}% {ratio:.3f}" for percent, ratio in grows)
        holds = all(a[1] < b[1] for a, b in itertools.pairwise(grows))
        yield _GAP, holds, "", f"SparseGPT / SM: {listed}"


def _of_options(rows: pd.DataFrame) -> Iterator[tuple[str, bool, str, str]]:
    """Yield the same of options, from the value that a claim calls the worst to the best."""
    varied = rows[rows["option"].isin(_ABLATIONS)]
    for (setting, method, option), of in varied.groupby(["setting", "method", "option"]):
        claim, more_is_better = _ABLATIONS[option]
        means = of.set_index(of["value"].astype(float))["mean"]
        means = means.sort_index(ascending=more_is_better)
        if len(means) > 1:
            listed = ", ".join(f"{value:g}: {perplexity(mean)}" for value, mean in means.items())
            holds = all(a >= b for a, b in itertools.pairwise(means))
            yield claim, holds, f"{setting} {method}", listed


if __name__ == "__main__":
    main()
