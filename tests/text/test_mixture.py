"""Shares are checked in words, and each source gives as many windows as its share says."""

from pathlib import Path

import pytest
import torch
from special_tokens import tokenizer_with

from mrp_lightning import TextDataModule
from mrp_lightning.errors import DataError, OptionError
from mrp_lightning.text.mixture import Mixture, interleaved, shares_of


@pytest.mark.parametrize(
    ("calibration", "message"),
    [
        ({"self": -0.5, "c4": 1.5}, "share of self must be a number from 0 to 1; got -0.5; the sh"),
        ({"self": "half", "c4": 0.5}, "share of self .* got 'half'"),
        ({"self": True}, "got True"),
        ({"self": float("nan")}, "got nan"),
        (["self", "stdlib"], r"one source, or a share of each.* Got \['self', 'stdlib'\]"),
        ("", "'' unknown"),
        ({"self": 0.5, "c4": 0.4}, r"expected shares of 1 in all.* got 0\.9"),
        ({}, "got 0"),
        ({"self": 0.5, "c5": 0.5}, "'c5' unknown. Expected self .*stdlib.*c4, lambada"),
        ("slef", "'slef' unknown. Expected self"),
        ({"self": 0.5, "train_files": 0.5}, "it names `train_files`, and there is no such text"),
    ],
)
def test_wrong_shares_are_refused_before_work(calibration, message):
    with pytest.raises(OptionError, match=message):
        TextDataModule(calibration=calibration)


def test_text_that_would_not_be_read_is_refused():
    with pytest.raises(OptionError, match="not several of them"):
        TextDataModule(__file__, calibration="self")
    with pytest.raises(OptionError, match="not several of them"):
        TextDataModule(None, __file__, calibration="self", evaluation="c4")


def test_counts_add_up_and_are_next_to_the_shares():
    for shares in ({"self": 1 / 3, "c4": 1 / 3, "ptb": 1 / 3}, {"self": 0.05, "c4": 0.95}):
        for windows in (20, 31, 64, 100):
            counts = Mixture(shares, {}).counts(windows)
            assert sum(counts.values()) == windows
            for name, share in shares.items():
                assert abs(counts[name] - share * windows) < 1
    assert shares_of({"self": 0.0, "c4": 1}) == {"c4": 1.0}
    with pytest.raises(DataError, match="of 4 windows, the share of self is less than one"):
        Mixture({"self": 0.1, "c4": 0.9}, {}).counts(4)


def test_any_run_of_windows_has_the_shares():
    order = interleaved([torch.zeros(30, 1), torch.ones(10, 1)]).flatten()
    assert order.sum() == 10
    for start in range(0, 40, 4):
        assert order[start : start + 4].sum() == 1


def test_each_source_gives_its_windows(tmp_path):
    """The same windows that each source gives alone, for as many samples."""
    common = {"sequence_length": 16, "tokenizer": tokenizer_with("$A"), "seed": 3}
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(" ".join(f"{name}_{i}" for i in range(300)))
    first, second, third = (str(tmp_path / f"{name}.txt") for name in "abc")
    shares = {"train_files": 0.5, second: 0.25, third: 0.25}
    mixed = TextDataModule([first], calibration=shares, num_samples=8, **common)
    alone = [TextDataModule([first], num_samples=4, **common)]
    alone += [TextDataModule(calibration=x, num_samples=2, **common) for x in (second, third)]
    expected = {tuple(row) for data in alone for row in data.calibration_windows().tolist()}
    found = mixed.calibration_windows()
    assert found.shape == (8, 16)
    assert {tuple(row) for row in found.tolist()} == expected
    assert mixed.calibration_source == "0.5 train_files + 0.25 b.txt + 0.25 c.txt"


def test_several_texts_are_evaluated_by_the_names_given(tmp_path):
    names = {"first": str(tmp_path / "a.txt"), "second": str(tmp_path / "b.txt")}
    for name, path in names.items():
        Path(path).write_text(" ".join(f"word{i}" for i in range(400)) + name)
    common = {"sequence_length": 16, "tokenizer": tokenizer_with("$A")}
    data = TextDataModule(calibration="self", evaluation=names, **common)
    loaders = data.test_dataloader()
    assert list(loaders) == ["first", "second"]
    for name, path in names.items():
        alone = TextDataModule(eval_files=path, **common).windows("test").ids
        assert torch.equal(torch.cat(list(loaders[name])), alone)
    with pytest.raises(OptionError, match=r"'absent.txt' unknown. Expected stdlib, c4"):
        TextDataModule(evaluation={"x": "absent.txt"})
    with pytest.raises(OptionError, match="`a/b` is no name of a text"):
        TextDataModule(evaluation={"a/b": "stdlib"})
    with pytest.raises(OptionError, match=r"'x.txt' unknown.*with a name for its results"):
        TextDataModule(evaluation=["stdlib", "x.txt"])
    assert TextDataModule(evaluation="stdlib").evaluation == {"stdlib": "stdlib"}
