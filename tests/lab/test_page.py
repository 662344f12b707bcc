"""`python lab/page.py`: the tables of a sweep, and the paper's claims, in a page."""

import sys

import pandas as pd
import pytest

pytest.importorskip("matplotlib", reason="pages need the extra `report`")

import page
from tables import RESULTS, read_tables

COLUMNS = ["model", "setting", "method", "block_size", "changed", "measure", "mean", "deviation"]
ROWS = [
    ("tiny", "50%", "SS", 128, None, "perplexity", 7.4, 0.01),
    ("tiny", "50%", "SM", 128, None, "perplexity", 7.2, 0.01),
    ("tiny", "50%", "MM", 128, None, "perplexity", 7.1, 0.01),
    ("tiny", "70%", "SS", 128, None, "perplexity", 9.9, 1.0),
    ("tiny", "70%", "SM", 128, None, "perplexity", 8.6, 1.0),
    ("tiny", "70%", "SM", 128, "damping=0.1", "perplexity", 8.0, None),
    ("tiny", "70%", "SM", 128, "damping=0.01", "perplexity", 8.2, None),
    ("tiny", "70%", "SM", 128, "num_samples=9", "perplexity", 8.3, None),
    ("tiny", "70%", "SM", 128, "num_samples=16", "perplexity", 8.1, None),
    ("tiny", "70%", "SM", 128, None, "relative loss", 0.1, None),
]


def test_claims_are_decided_by_means_and_deviations():
    table = page.claims_table(pd.DataFrame(ROWS, columns=COLUMNS))
    assert [(claim.split()[0], is_so) for claim, is_so, *_ in table.rows] == [
        ("SM", "yes"),
        ("SM", "**no**"),  # 1.3 < √2
        ("MM", "**no**"),  # 0.1 > 0.2 / 5
        ("The", "yes"),  # 1.028 < 1.151
        ("Smaller", "**no**"),
        ("More", "yes"),
    ]
    assert page.claims_table(pd.DataFrame(ROWS[-1:], columns=COLUMNS)) is None


def test_the_tables_between_the_comments_are_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mine = "# Mine\n\n<!-- tables of out -->\nformer\n<!-- end -->\nwords\n"
    (tmp_path / "page.md").write_text(mine)
    (tmp_path / "other.md").write_text("# Other\n")
    monkeypatch.setattr(sys, "argv", ["page.py", "page.md"])
    with pytest.raises(SystemExit, match="no out/results.md. Make the sweep"):
        page.main()
    assert (tmp_path / "page.md").read_text() == mine
    (tmp_path / "out").mkdir()
    (tmp_path / "out/results.md").write_text("## tiny\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n")
    pd.DataFrame(ROWS, columns=COLUMNS).to_csv("out/results.csv", index=False)
    page.main()
    page.main()
    text = (tmp_path / "page.md").read_text()
    assert text.startswith("# Mine\n\n<!-- tables of out -->\n\n## tiny\n")
    assert text.endswith("\n<!-- end -->\nwords\n")
    assert "former" not in text
    assert text.count("## What the paper claims") == 1
    assert len(read_tables(text)) == 2
    monkeypatch.setattr(sys, "argv", ["page.py", "other.md"])
    with pytest.raises(SystemExit, match="has no"):
        page.main()


def test_pages_name_the_directories_of_sweeps():
    outs = {
        line.split(": ")[1]
        for directory in (RESULTS.parents[1] / "configs/sweeps", RESULTS.parent / "sweeps")
        for path in directory.glob("*.yaml")
        for line in path.read_text().splitlines()
        if line.startswith("out: ")
    }
    texts = [path.read_text("utf-8") for path in RESULTS.glob("*.md")]
    named = {match[2] for text in texts for match in page._TABLES.finditer(text)}
    assert len(named) == 7
    assert named <= outs
