"""The paper's values: as printed, and consistent with each other."""

import statistics
from collections import Counter, defaultdict

import pytest
from pages.paper import paper_values, reported

from mrp_lightning.experiments.trials import Trial, parse_setting
from mrp_lightning.solver.recipe import parse_method


def test_every_table_is_there_whole():
    def perplexities(dense, pruned, texts):
        return (dense + pruned) * texts

    # Rows of the tables: dense models, then pruned ones; dense values are printed more than once.
    assert Counter(value.table for value in paper_values()) == {
        "llama2": perplexities(9, 11 * 6, texts=2),
        "app:opt": perplexities(5, 5 * 6, texts=3),
        "app:bloom": perplexities(4, 4 * 6, texts=3),
        "others": perplexities(4, 4 * 2 * 2, texts=3) + 2,  # Wanda: on one text
        "app:others": perplexities(7, 7 * 2 * 2, texts=3) + 3,
        "mamba": (5 * 4 - 1) * 8,  # no magnitude for the largest; 6 tasks, average, perplexity
    }


@pytest.mark.parametrize(
    ("run", "metric", "value"),
    [
        (("LLaMA2-7B", "dense", None, None), "perplexity/wikitext2", 5.472),
        (("LLaMA2-7B", "2:4", "SM", 2048), "perplexity/wikitext2", 10.15),
        (("LLaMA2-7B", "2:4", "SM", None), "perplexity/wikitext2", 10.37),
        (("LLaMA2-7B", "2:4", "sparsegpt", None), "perplexity/wikitext2", 10.92),
        (("LLaMA2-7B", "2:4", "S+M", None), "perplexity/wikitext2", 10.37),
        (("LLaMA2-70B", "2:4", "MS", None), "perplexity/c4", 6.84),
        (("LLaMA2-7B", "70%", "SS", 512), "perplexity/ptb", 2203),
        (("LLaMA2-7B", "80%", "wanda", None), "perplexity/wikitext2", 1e5),
        (("OPT-350M", "2:4", "MM", 128), "perplexity/ptb", 70.96),
        (("OPT-66B", "80%", "SS", None), "perplexity/wikitext2", 1.5e4),
        (("BLOOM-560M", "50%", "SS", 128), "perplexity/c4", 32.83),
        (("BLOOM-7.1B", "2:4", "MM", 2048), "perplexity/ptb", 27.8),
        (("Mamba-1.4B", "70%", "SM", 128), "perplexity/lambada", 19.65),
        (("Mamba-2.8B", "70%", "SM", 512), "accuracy/winogrande", 58.25),
        (("Mamba-790M", "50%", "magnitude", None), "perplexity/lambada", 2e58),
    ],
)
def test_values_as_printed(run, metric, value):
    assert reported(Trial(*run), metric) == value


@pytest.mark.parametrize(
    ("run", "metric"),
    [
        (("stdlib-llama", "2:4", "SM", 128), "perplexity/wikitext2"),
        (("LLaMA2-7B", "2:4", "SM", 128), "perplexity/wikitext2"),  # 2048 and all, not 128
        (("LLaMA2-7B", "2:4", "SM", 2048), "perplexity/ptb"),
        (("LLaMA2-13B", "70%", "SM", 128), "perplexity/c4"),  # Table A3 gives the size, 2 does not
        (("OPT-66B", "80%", "wanda", None), "perplexity/wikitext2"),
    ],
)
def test_what_the_paper_does_not_report(run, metric):
    assert reported(Trial(*run), metric) is None


def test_tables_that_repeat_a_value_agree():
    cells = defaultdict(set)
    for value in paper_values():
        cell = value.model, value.setting, value.method, value.metric
        cells[cell].add((value.block_size, value.value))
    for cell, found in cells.items():
        sized = {(size, value) for size, value in found if size} or found
        assert len(dict(sized)) == len(sized), cell  # one value a block size
        assert {value for _, value in found} == {value for _, value in sized}, cell


def test_averages_are_those_of_the_six_tasks():
    accuracies = defaultdict(dict)
    for value in paper_values():
        kind, name = value.metric.split("/")
        if kind == "accuracy":
            accuracies[value.model, value.method][name] = value.value
    assert len(accuracies) == 19
    for of_tasks in accuracies.values():
        average = of_tasks.pop("average")
        assert len(of_tasks) == 6
        assert average == pytest.approx(statistics.fmean(of_tasks.values()), abs=6e-4)


def test_settings_and_methods_are_those_of_the_library():
    for value in paper_values():
        assert (value.setting == "dense") == (value.method == "")
        if value.method:
            parse_setting(value.setting, value.method)
            parse_method(value.method)
