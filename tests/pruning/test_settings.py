"""What users may ask for beside pruning each layer by itself."""

import pytest

from mrp_lightning import BlockTuning, MethodError, OptionError
from mrp_lightning.pruning.settings import Settings


def made(method="SM", pattern=None, **options) -> Settings:
    sparsity = None if pattern else 0.5
    return Settings(**{"method": method, "sparsity": sparsity, "pattern": pattern} | options)


def test_all_is_off_by_default():
    settings = made()
    assert (settings.target, settings.block_tuning, settings.targets) == ("own", None, None)
    given = {"method": "SM", "sparsity": 0.5}
    assert settings.config() == Settings.defaults() | given


@pytest.mark.parametrize("tuning", [True, BlockTuning(), BlockTuning(epochs=5)])
def test_tuning_may_be_said_in_two_ways(tuning):
    assert made(tuning=tuning).block_tuning == BlockTuning()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "Dense"}, "`target` must be one of own, dense; got 'Dense'"),
        ({"allocation": "output", "pattern": "2:4"}, "all have the pattern 2:4"),
        ({"bits": 5}, "`bits` must be 3, 4 or 8; got 5"),
        ({"bits": "4"}, "`bits` must be a whole number or None"),
        ({"bits": 4, "group_size": 0}, "`group_size` must be a positive number of columns"),
        ({"targets": []}, "`targets` is empty, so nothing would be pruned"),
        ({"group_size": 32}, "`group_size` 32 means nothing without `bits`"),
        ({"allocation": "output", "sparsity": None, "bits": 4}, "all have the pattern dense"),
    ],
)
def test_what_does_not_go_is_refused(options, message):
    with pytest.raises(OptionError, match=message):
        made(**options)


@pytest.mark.parametrize("method", ["wanda", "magnitude", "S+none"])
def test_methods_without_compensation_can_aim_at_nothing(method):
    with pytest.raises(MethodError, match=rf"`target: dense` .* {method.replace('+', '.')} moves"):
        made(method, target="dense")
    assert made(method, tuning=True).block_tuning == BlockTuning()
