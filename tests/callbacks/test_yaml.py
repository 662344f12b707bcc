"""The callbacks' arguments as YAML and jsonargparse give them."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

pytest.importorskip("jsonargparse", reason="the command line needs the extra `cli`")

from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings
from lightning.pytorch.callbacks import Callback

import callbacks
import mrp_lightning.callbacks
from callbacks import MRPCallback, PruningCallback
from mrp_lightning import BlockTuning, CausalLM, TextDataModule
from mrp_lightning.commands.parser import Parser
from mrp_lightning.errors import PatternError
from mrp_lightning.pruning.settings import Settings


def parse(text: str) -> Callback:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--callback", type=Callback)
    return parser.instantiate(parser.parse_string(text)).callback


def test_all_arguments_are_read():
    callback = parse("""
callback:
  class_path: callbacks.PruningCallback
  init_args:
    method: MM
    pattern: "4:8"
    block_size: null
    damping: 1e-2
    targets: [q_proj, "layers.*.mlp"]
    ignore: down_proj
    blocks: [model.layers]
    target: dense
    offload: true
    skip_indivisible: true
    save_dir: runs/x
    overwrite: true
""")
    assert type(callback) is PruningCallback
    assert (callback.settings.recipe.pattern.kept, callback.settings.recipe.pattern.group) == (4, 8)
    assert callback.settings.recipe.method.name == "MM"
    assert callback.settings.recipe.block_size is None
    assert callback.settings.recipe.damping == 0.01
    assert callback.settings.target == "dense"
    assert callback.settings.targets == ("q_proj", "layers.*.mlp")
    assert callback.settings.ignore == ("down_proj",)
    assert callback.save_dir == Path("runs/x").absolute()


def test_both_names_are_of_one_class():
    found = parse(
        "callback: {class_path: mrp_lightning.callbacks.MRPCallback, init_args: {sparsity: 0.7}}"
    )
    assert type(found) is MRPCallback
    assert callbacks.__all__ == mrp_lightning.callbacks.__all__
    for name in callbacks.__all__:
        assert getattr(callbacks, name) is getattr(mrp_lightning.callbacks, name)


def test_the_methods_default():
    callback = parse("callback: {class_path: callbacks.MRPCallback, init_args: {sparsity: 0.7}}")
    assert type(callback) is MRPCallback
    assert callback.settings.recipe.method.name == "SM"
    assert callback.settings.recipe.pattern.sparsity == 0.7


@pytest.fixture
def wants_help():
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    yield
    set_parsing_settings(docstring_parse_attribute_docstrings=False)


def test_help_documents_all_arguments(wants_help):
    parser = Parser()
    names = parser.add_class_arguments(MRPCallback)
    undocumented = [action.dest for action in parser._actions if not action.help]
    assert {f.name for f in fields(Settings) if f.init} < {*names}
    assert not undocumented


def test_an_unquoted_pattern_is_explained():
    with pytest.raises(PatternError, match='write `pattern: "2:4"`'):
        parse("callback: {class_path: callbacks.MRPCallback, init_args: {pattern: 2:4}}")


def test_an_unknown_argument_is_refused():
    with pytest.raises(ArgumentError, match="sparsty"):
        parse("callback: {class_path: callbacks.MRPCallback, init_args: {sparsty: 0.5}}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("true", BlockTuning()),
        ("{epochs: 15, learning_rate: 1e-3}", BlockTuning(epochs=15, learning_rate=1e-3)),
        ("false", None),
    ],
)
def test_what_goes_beyond_single_layers_is_read(text, expected):
    callback = parse(f"""
callback:
  class_path: callbacks.MRPCallback
  init_args: {{sparsity: 0.7, target: dense, allocation: output, tuning: {text}}}
""")
    asked = callback.settings
    assert asked.block_tuning == expected
    assert asked.allocation == "output"
    assert asked.target == "dense"


def test_the_signatures_that_are_checked_are_those_that_help_shows(capsys):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(TextDataModule, "data")
    parser.add_class_arguments(CausalLM, "model")
    parser.add_argument("--callback", type=Callback)
    for asked in ("--help", "--callback.help=callbacks.MRPCallback"):
        with pytest.raises(SystemExit):
            parser.parse_args([asked])
    shown = capsys.readouterr().out
    for option in ("--data.num_samples", "--model.streaming", "--callback.overwrite"):
        assert option in shown
    assert "args" not in re.findall(r"--[\w.]*\b(\w+)", shown)
    text = "data: {num_samples: 3, sequence_length: 16, train_files: [a.txt, b.txt]}"
    data = parser.parse_string(text + "\nmodel: {model: x, learning_rate: 1}").data
    assert (data.num_samples, data.sequence_length, data.train_files) == (3, 16, ["a.txt", "b.txt"])
    with pytest.raises(ArgumentError, match="num_samples"):
        parser.parse_string("data: {num_samples: 2.5}\nmodel: {model: x}")
