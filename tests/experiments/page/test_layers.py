import pandas as pd
import pytest

pytest.importorskip("matplotlib")

from mrp_lightning.experiments import layers
from mrp_lightning.experiments.layers import short_names


@pytest.mark.parametrize(
    ("name", "block", "kind"),
    [
        ("model.layers.3.mlp.up_proj", "model.layers.3", "mlp.up_proj"),
        ("model.layers.3.mlp.experts.12.down_proj", "model.layers.3", "mlp.experts.*.down_proj"),
        ("stem.0.conv", "stem", "*.conv"),
        ("h.0", "h.0", "(the block itself)"),
        ("lm_head", None, "lm_head"),
        ("model.layers.3.mlp.up_proj", None, "model.layers.*.mlp.up_proj"),  # an older report
    ],
)
def test_a_layer_has_a_name_in_its_block(layer, name, block, kind):
    assert layers._kind(layer(name, block=block)) == kind


def test_blocks_are_ordered_by_stack_and_number():
    found = layers._in_order(pd.Series(["encoder.10", "", "decoder.0", "encoder.2", "encoder.10"]))
    assert found == ["encoder.2", "encoder.10", "decoder.0", ""]


def test_names_are_shortened_while_they_stay_apart():
    kinds = ["attention.self.query", "attention.output.dense", "output.dense", "inner.dense"]
    assert short_names(kinds) == {
        "attention.self.query": "query",
        "attention.output.dense": "attention.output.dense",
        "output.dense": "output.dense",
        "inner.dense": "inner.dense",
    }
