"""The paper's values: as printed, consistent with each other, and beside the runs of a sweep."""

import statistics
from collections import Counter, defaultdict

import pandas as pd
import pytest
from paper import beside_paper, paper_values

from mrp_lightning.experiments.trials import parse_setting

COLUMNS = ["model", "setting", "method", "block_size", "measure"]


def rows():
    return list(paper_values().itertuples())


def reported(run, **changes):
    """The paper's value of a row of a `results.csv`; `None` if it has none."""
    row = dict(zip(COLUMNS, run, strict=True)) | {"changed": "", "context": "", "mean": "1"}
    return next(iter(beside_paper(pd.DataFrame([row | changes]))["value"]), None)


def test_every_table_is_there_whole():
    def perplexities(dense, pruned, texts):
        return (dense + pruned) * texts

    # Rows of the tables: dense models, then pruned ones; dense values are printed more than once.
    assert Counter(value.table for value in rows()) == {
        "llama2": perplexities(9, 11 * 6, texts=2),
        "app:opt": perplexities(5, 5 * 6, texts=3),
        "app:bloom": perplexities(4, 4 * 6, texts=3),
        "others": perplexities(4, 4 * 2 * 2, texts=3) + 2,  # Wanda: on one text
        "app:others": perplexities(7, 7 * 2 * 2, texts=3) + 3,
        "mamba": (5 * 4 - 1) * 8,  # no magnitude for the largest; 6 tasks, average, perplexity
    }


@pytest.mark.parametrize(
    ("run", "value"),
    [
        (("LLaMA2-7B", "dense", "", "", "perplexity/wikitext2"), 5.472),
        (("LLaMA2-7B", "2:4", "SM", "2048", "perplexity/wikitext2"), 10.15),
        (("LLaMA2-7B", "2:4", "SM", "all", "perplexity/wikitext2"), 10.37),
        (("LLaMA2-7B", "2:4", "SS", "all", "perplexity/wikitext2"), 10.92),
        (("LLaMA2-70B", "2:4", "MS", "all", "perplexity/c4"), 6.84),
        (("LLaMA2-7B", "70%", "SS", "512", "perplexity/ptb"), 2203),
        (("LLaMA2-7B", "80%", "wanda", "", "perplexity/wikitext2"), 1e5),
        (("OPT-350M", "2:4", "MM", "128", "perplexity/ptb"), 70.96),
        (("OPT-66B", "80%", "SS", "all", "perplexity/wikitext2"), 1.5e4),
        (("BLOOM-560M", "50%", "SS", "128", "perplexity/c4"), 32.83),
        (("BLOOM-7.1B", "2:4", "MM", "2048", "perplexity/ptb"), 27.8),
        (("Mamba-1.4B", "70%", "SM", "128", "perplexity/lambada"), 19.65),
        (("Mamba-2.8B", "70%", "SM", "512", "accuracy/winogrande"), 58.25),
        (("Mamba-790M", "50%", "magnitude", "", "perplexity/lambada"), 2e58),
        (("stdlib-llama", "2:4", "SM", "128", "perplexity/wikitext2"), None),
        (("LLaMA2-7B", "2:4", "SM", "128", "perplexity/wikitext2"), None),  # 2048 and all, not 128
        (("LLaMA2-7B", "2:4", "SM", "2048", "perplexity/ptb"), None),
        (("LLaMA2-13B", "70%", "SM", "128", "perplexity/c4"), None),  # Table A3 gives the size
        (("OPT-66B", "80%", "wanda", "", "perplexity/wikitext2"), None),
    ],
)
def test_values_as_printed(run, value):
    assert reported(run) == value


def test_other_contexts_and_ablations_are_not_compared():
    run = ("LLaMA2-7B", "2:4", "SM", "all", "perplexity/wikitext2")
    assert reported(run, context="2048") == 10.37
    assert reported(run, context="4096") is None
    assert reported(run, changed="damping=0.1") is None


def test_tables_that_repeat_a_value_agree():
    cells = defaultdict(set)
    for value in rows():
        cell = value.model, value.setting, value.method, value.metric
        cells[cell].add((value.block_size, value.value))
    for cell, found in cells.items():
        sized = {(size, value) for size, value in found if size} or found
        assert len(dict(sized)) == len(sized), cell  # one value a block size
        assert {value for _, value in found} == {value for _, value in sized}, cell


def test_averages_are_those_of_the_six_tasks():
    accuracies = defaultdict(dict)
    for value in rows():
        kind, name = value.metric.split("/")
        if kind == "accuracy":
            accuracies[value.model, value.method][name] = value.value
    assert len(accuracies) == 19
    for of_tasks in accuracies.values():
        average = of_tasks.pop("average")
        assert len(of_tasks) == 6
        assert average == pytest.approx(statistics.fmean(of_tasks.values()), abs=6e-4)


def test_settings_and_methods_are_those_of_the_library():
    for value in rows():
        assert (value.setting == "dense") == (value.method == "")
        if value.method:
            parse_setting(value.setting, value.method)
