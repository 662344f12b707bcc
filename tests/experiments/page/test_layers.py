import pytest

from mrp_lightning.experiments.page.layers import OUTSIDE, Block, in_order, place, short_kinds


@pytest.mark.parametrize(
    ("name", "block", "kind"),
    [
        ("model.layers.3.mlp.up_proj", Block("model.layers", 3), "mlp.up_proj"),
        (
            "model.layers.3.mlp.experts.12.down_proj",
            Block("model.layers", 3),
            "mlp.experts.*.down_proj",
        ),
        ("h.0", Block("h", 0), "(the block itself)"),
        ("0.weight", Block("", 0), "weight"),
        ("lm_head", OUTSIDE, "lm_head"),
    ],
)
def test_a_layer_stands_in_the_block_of_the_first_number(name, block, kind):
    assert place(name) == (block, kind)


def test_blocks_are_ordered_by_stack_and_number():
    encoder, decoder = Block("encoder", 10), Block("decoder", 0)
    found = in_order([encoder, OUTSIDE, decoder, Block("encoder", 2), encoder])
    assert found == [Block("encoder", 2), encoder, decoder, OUTSIDE]


def test_kinds_are_shortened_while_they_stay_apart():
    kinds = ["attention.self.query", "attention.output.dense", "output.dense", "inner.dense"]
    assert short_kinds(kinds) == {
        "attention.self.query": "query",
        "attention.output.dense": "attention.output.dense",
        "output.dense": "output.dense",
        "inner.dense": "inner.dense",
    }
