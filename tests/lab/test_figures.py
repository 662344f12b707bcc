"""`lab/figures.py`: the figures of README and docs are those of the tables."""

import re

import figures
import pytest

PAGES = figures.read_passages()
NO_FIGURES = {"3.11", "0.5625", "0.1.0", "2.0"}
"""Versions, and what a format takes by its definition."""


@pytest.mark.parametrize("page", PAGES)
def test_the_figures_of_a_page_are_those_of_the_tables(page):
    text = (figures.ROOT / page).read_text("utf-8")
    stated = [figure for passage in PAGES[page] for figure in figures.figures_of(text, passage)]
    assert stated
    wrong = [figure for figure in stated if figure.written != figure.value]
    assert not wrong, "run `make figures`"


def test_every_figure_of_the_readme_has_a_source():
    text = (figures.ROOT / "README.md").read_text("utf-8")
    stated = [x for passage in PAGES["README.md"] for x in figures.figures_of(text, passage)]
    for figure in stated:
        text = text[: figure.start] + "#" * (figure.end - figure.start) + text[figure.end :]
    prose = re.sub(r"^```.*?^```$|\]\([^)]*\)|`[^`]*`", "", text, flags=re.M | re.S)
    without_names = re.findall(r"(?<![\w-])\d+(?:\.\d+)+(?!\w)", prose)  # no Qwen2.5-Coder-0.5B
    assert set(without_names) <= NO_FIGURES


def test_a_figure_that_differs_is_replaced():
    at_2_4 = "{smollm2 > 2:4 > SM > perplexity @512:.3f}"
    passage = "SM has {smollm2 > 50% > SM > perplexity @512}, and " + at_2_4
    text = "Of all, SM has 35.3,\nand 1.00 at 2:4: 35.3."
    wrong = list(figures.figures_of(text, passage))
    assert [(each.written, each.value) for each in wrong] == [("35.3", "35.2"), ("1.00", "49.861")]
    assert figures.replaced(text, wrong) == "Of all, SM has 35.2,\nand 49.861 at 2:4: 35.3."


def test_a_figure_may_be_a_share_of_a_difference():
    tuned, pruned, dense = (
        f"finetuning > {row} > perplexity @512" for row in (
            "2:4, SM, then 300 steps", "2:4, SM", "dense"
        )
    )  # fmt: skip
    share = f"{pruned} - {tuned} / {pruned} - {dense}:.0%"
    assert figures.value_of(share) == "46"  # (8.540 - 8.267) / (8.540 - 7.944)


def test_a_passage_or_a_row_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="0 passages like this"):
        list(figures.figures_of("no text", "a {smollm2 > 50% > SM > perplexity @512} b"))
    with pytest.raises(ValueError, match="Not one row of lab/results has 'smollm2 > 50% > XX"):
        figures.value_of("smollm2 > 50% > XX > perplexity @512")
