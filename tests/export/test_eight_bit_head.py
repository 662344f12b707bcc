"""A head of 8 bits, against products in float64 and the model with its own head."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from export.generate import main
from mrp_lightning.embedded import STDLIB_LLAMA
from mrp_lightning.errors import OptionError, PatternError
from mrp_sparse.eight_bit_head import EightBitLinear, round_head
from mrp_sparse.formats import eight_bit


def tiny(**options):
    config = AutoConfig.for_model(
        "llama", vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    config.update(options)
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rows_of_denormals_have_a_scale(dtype):
    """A 127th of their largest weight is less than half of the smallest number."""
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    weight = (torch.tensor([[0.0, 1, -3, 60], [0, 0, 0, -1]]).double() * smallest).to(dtype)
    codes, scales = eight_bit.pack(weight)
    assert eight_bit.damage(codes, scales) is None
    assert torch.equal(eight_bit.unpack(codes, scales), weight)
    for wrong in (0, torch.finfo(dtype).max):
        assert "not positive" in eight_bit.damage(codes, torch.full_like(scales, wrong))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "columns", "bias"), [(48, 64, False), (33, 80, True)])
def test_the_product_is_that_of_the_nearest_numbers(rows, columns, bias, dtype):
    torch.manual_seed(rows)
    linear = nn.Linear(columns, rows, bias=bias).to(dtype).requires_grad_(False)
    linear.weight[3] = 0
    linear.weight[4] *= 1e-3  # rows have scales of their own
    layer = EightBitLinear.from_linear(linear)
    dense = linear.weight.double()
    scales = layer.weight_scales.double()[:, None]
    peaks = dense.abs().amax(1, keepdim=True)
    torch.testing.assert_close(127 * scales[peaks > 0], peaks[peaks > 0], rtol=4e-3, atol=0)
    values = layer.weight.double() * scales
    # Half a step, and where the scale was rounded down, what 127 steps fall short of.
    assert bool(((values - dense).abs() <= scales / 2 + (peaks - 127 * scales).clamp_min(0)).all())
    assert not values[3].any()
    for shape in ((1, columns), (2, 5, columns)):
        x = torch.randn(shape).to(dtype)
        expected = x.double() @ values.T
        if bias:
            expected += linear.bias.double()
        error = (layer(x).double() - expected).norm() / expected.norm()
        assert layer(x).dtype == dtype
        assert error < (1e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("tokens", [1, 128])
def test_numbers_may_lie_at_any_address(tokens):
    linear = nn.Linear(64, 32).to(torch.bfloat16).requires_grad_(False)
    layer = EightBitLinear.from_linear(linear)
    x = torch.randn(tokens, 64).to(torch.bfloat16)
    expected = layer(x)
    memory = torch.zeros(layer.weight.numel() + 64, dtype=torch.int8)
    odd = memory[-memory.data_ptr() % 16 + 8 :][: layer.weight.numel()].view(32, 64)
    layer.weight = nn.Parameter(odd.copy_(layer.weight), requires_grad=False)
    assert layer.weight.data_ptr() % 16 == 8
    assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("tokens", [1, 20])
def test_gradients_pass_through_to_the_input_and_the_bias(tokens):
    layer = EightBitLinear.from_linear(nn.Linear(64, 32))
    layer.bias.requires_grad_()
    dense = nn.Linear(64, 32)
    dense.weight.data, dense.bias.data = layer.dense_weight(), layer.bias.detach().clone()
    x = torch.randn(2, tokens, 64, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    weights = torch.randn(2, tokens, 32)
    (layer(x) * weights).sum().backward()
    (dense(other) * weights).sum().backward()
    torch.testing.assert_close(x.grad, other.grad)
    torch.testing.assert_close(layer.bias.grad, dense.bias.grad)
    torch.library.opcheck(
        torch.ops.mrp_lightning.linear8.default,
        (x[0], layer.weight, layer.weight_scales, layer.bias),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_autocast_casts_what_it_casts_of_a_dense_layer():
    layer = EightBitLinear.from_linear(nn.Linear(64, 32))
    x = torch.randn(3, 64)
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(x)
    assert found.dtype == torch.bfloat16
    error = (found.double() - layer(x).double()).norm() / layer(x).double().norm()
    assert 0 < error < 0.02


def test_a_tied_table_has_the_same_bits():
    model = AutoModelForCausalLM.from_pretrained(STDLIB_LLAMA).eval()
    truth = AutoModelForCausalLM.from_pretrained(STDLIB_LLAMA).eval()
    assert model.lm_head.weight is model.get_input_embeddings().weight
    ids = torch.arange(1, 33).view(2, 16)
    with torch.no_grad():
        dense = model(ids).logits
        round_head(model)
        found = model(ids).logits
        scales = model.lm_head.weight_scales.float()[:, None]
        rounded = (model.lm_head.weight.float() * scales).to(truth.dtype)
        truth.get_input_embeddings().weight.copy_(rounded)  # and with it the head's
        expected = truth(ids).logits
    names = {name for name, tensor in model.state_dict().items() if tensor.shape[:1] == (2048,)}
    assert names == {"lm_head.weight", "lm_head.weight_scales"}
    assert model.lm_head.weight.dtype == torch.int8
    assert float((found - expected).norm() / expected.norm()) < 0.01
    assert 0 < float((found - dense).norm() / dense.norm()) < 0.02


def test_an_untied_table_stays_as_it_is():
    model = tiny(tie_word_embeddings=False)
    before = model.get_input_embeddings().weight
    round_head(model)
    assert model.get_input_embeddings().weight is before
    assert isinstance(copy.deepcopy(model).lm_head, EightBitLinear)


def test_a_copied_model_reads_its_own_bits():
    model = tiny(tie_word_embeddings=True)
    round_head(model)
    other = copy.deepcopy(model)
    other.lm_head.weight.zero_()
    ids = torch.arange(4).view(1, 4)
    assert not other.get_input_embeddings()(ids).any()
    assert model.get_input_embeddings()(ids).any()
    assert other.double().get_input_embeddings()(ids).dtype == torch.float64


def test_what_it_does_is_told(capsys):
    arguments = ["--prompt", "import os\n", "--max-new-tokens", "3", "--device", "cpu", "--eager"]
    main([str(STDLIB_LLAMA), *arguments, "--head-bits", "8"])
    assert "[a head of 8 bits: logits are off by 0." in capsys.readouterr().out


def test_a_model_without_a_head_is_refused():
    model = tiny()
    round_head(model)
    with pytest.raises(OptionError, match="LlamaForCausalLM has a EightBitLinear"):
        round_head(model)
    with pytest.raises(OptionError, match="LlamaModel has none"):
        round_head(model.model)
    with pytest.raises(OptionError, match="tied to model.layers.0.mlp.up_proj, where"):
        odd = tiny(vocab_size=32)
        odd.model.layers[0].mlp.up_proj.weight = odd.lm_head.weight
        round_head(odd)
    mamba = AutoConfig.for_model("mamba", vocab_size=64, hidden_size=32, num_hidden_layers=1)
    with pytest.raises(OptionError, match="MambaForCausalLM casts to the dtype of its head's w"):
        round_head(AutoModelForCausalLM.from_config(mamba))
    with pytest.raises(PatternError, match="a multiple of 16, got 72"):
        EightBitLinear(72, 8)
