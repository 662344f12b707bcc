"""torch's own encoder layers, against each sequence run by itself, without padding."""

import pytest
import torch
from slow_pruning import prune_model
from torch import Tensor, nn

from mrp_lightning.calibration.hessians import Calibration
from mrp_lightning.calibration.padding import Padding
from mrp_lightning.calibration.walks import every_layer_called
from mrp_lightning.targets.layers import Linear

LENGTHS = (4, 6)


def encoder(*, batch_first: bool = True) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=batch_first).eval()
    for bias in (p for name, p in model.named_parameters() if name.endswith("bias")):
        nn.init.normal_(bias)
    return model


def padded(*, batch_first: bool = True, length: int = 6) -> dict[str, Tensor]:
    x = torch.randn(2, length, 8)
    is_padding = torch.tensor([[n >= tokens for n in range(length)] for tokens in LENGTHS])
    return {"src": x if batch_first else x.transpose(0, 1), "src_key_padding_mask": is_padding}


def inputs_one_by_one(model: nn.TransformerEncoder, x: Tensor) -> dict[str, Tensor]:
    """The inputs of all layers, by name, of the tokens of a batch (batch, length, columns)."""
    found: dict[str, list[Tensor]] = {}
    for sequence, length in zip(x, LENGTHS, strict=True):
        state = sequence[:length]
        for k, layer in enumerate(model.layers):
            attended, _ = layer.self_attn(state, state, state, need_weights=False)
            state = layer.norm1(state + attended)
            found.setdefault(f"layers.{k}.linear1", []).append(state)
            given = layer.linear1(state).relu()
            found.setdefault(f"layers.{k}.linear2", []).append(given)
            state = layer.norm2(state + layer.linear2(given))
    return {name: torch.cat(parts) for name, parts in found.items()}


@pytest.mark.parametrize("length", [6, 8])
@pytest.mark.parametrize("batch_first", [True, False])
@torch.no_grad()
def test_all_layers_are_calibrated_on_the_tokens(batch_first, length):
    model, batch = encoder(batch_first=batch_first), padded(batch_first=batch_first, length=length)
    padding = Padding(model)
    linears = [(name, m) for name, m in model.named_modules() if type(m) is nn.Linear]
    calibration = Calibration([Linear(*named) for named in linears], padding)
    with every_layer_called(), padding.watch(), calibration.hooked():
        padding.start_batch(batch)
        model(**batch)
        calibration.end_batch()
    x = batch["src"] if batch_first else batch["src"].transpose(0, 1)
    expected = inputs_one_by_one(model, x)
    hessians = {group.layers[0].name: group.accumulator.hessian() for group in calibration.groups}
    assert hessians.keys() == expected.keys() == dict(linears).keys()
    for name, given in expected.items():
        torch.testing.assert_close(hessians[name], 2 * given.T @ given / sum(LENGTHS))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_an_encoder_with_padding_is_pruned_block_by_block():
    model = encoder()
    report = prune_model(model, [padded() for _ in range(3)])
    assert report.config["walk"] == "inject"
    left = {row.name: row.skipped for row in report.layers if row.skipped}
    parts = ("in_proj_weight", "out_proj")
    assert left.keys() == {f"layers.{k}.self_attn.{part}" for k in (0, 1) for part in parts}
    assert "inside torch's attention" in left["layers.0.self_attn.out_proj"]
    assert {row.tokens for row in report.pruned} == {3 * sum(LENGTHS)}
    assert torch.backends.mha.get_fastpath_enabled()


class Own(nn.Module):
    """A block that calls its mask otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.mlp = nn.Linear(8, 8)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, key_padding_mask=hidden)[0]
        return x + self.mlp(x)


@pytest.mark.parametrize("is_padded", [True, False])
def test_padding_that_only_an_attention_knows_is_warned_of(is_padded, caplog):
    batch = padded()
    mask = batch["src_key_padding_mask"] & is_padded
    model = Own()
    prune_model(model, [{"x": batch["src"], "hidden": mask}] * 2)
    assert caplog.text.count("it counts as tokens") == is_padded
