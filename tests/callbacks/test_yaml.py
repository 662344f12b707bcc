"""The callbacks' arguments as YAML and jsonargparse give them."""

import pytest

pytest.importorskip("jsonargparse", reason="the command line needs the extra `cli`")

from jsonargparse import ArgumentError, ArgumentParser
from lightning.pytorch.callbacks import Callback

from callbacks import MRPCallback, PruningCallback
from mrp_lightning import BlockTuning
from mrp_lightning.errors import OptionError, PatternError


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
    true_sequential: true
    offload: true
    skip_indivisible: true
    save_dir: runs/x
    overwrite: true
""")
    assert type(callback) is PruningCallback
    assert (callback.recipe.pattern.kept, callback.recipe.pattern.group) == (4, 8)
    assert callback.recipe.method.name == "MM"
    assert callback.recipe.block_size is None
    assert callback.recipe.damping == 0.01
    assert callback.true_sequential
    assert callback.targets == ["q_proj", "layers.*.mlp"]
    assert callback.ignore == "down_proj"
    assert callback.save_dir == "runs/x"


def test_the_methods_default():
    callback = parse("callback: {class_path: callbacks.MRPCallback, init_args: {sparsity: 0.7}}")
    assert type(callback) is MRPCallback
    assert callback.recipe.method.name == "SM"
    assert callback.recipe.pattern.sparsity == 0.7


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
  init_args: {{sparsity: 0.7, target: dense, allocation: dlp, tuning: {text}}}
""")
    asked = callback.extensions
    assert asked.tuning == expected
    assert asked.allocation == "dlp"
    assert asked.target_weight == 0.5


def test_what_does_not_go_beyond_single_layers_is_explained():
    with pytest.raises(OptionError, match="`target_weight` 0.5 means nothing without"):
        parse(
            "callback: {class_path: callbacks.MRPCallback, "
            "init_args: {sparsity: 0.7, target_weight: 0.5}}"
        )
