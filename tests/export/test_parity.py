"""The gates of the parity check let equals pass and stop each kind of difference."""

import copy
import dataclasses
import json

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from export.conversion import parity
from export.conversion.checkpoint import open_checkpoint
from export.conversion.parity import (
    MIN_TOKENS,
    Parity,
    TextParity,
    check_parity,
    compare_logits,
    operator_error,
    source_logits,
    text_failures,
)
from export.conversion.selection import choose_layers
from export.conversion.writing import write_packed
from mrp_lightning.embedded import STDLIB_LLAMA
from mrp_lightning.errors import ParityError
from mrp_lightning.storage.json_files import as_json
from mrp_sparse.formats.packed_format import different_bits
from mrp_sparse.packed_linear import Sparse24Linear

from .conftest import keep_two_of_four


@pytest.fixture
def exported(exports, tmp_path):
    made = exports("packed", tmp_path)
    source = open_checkpoint(made.source)
    return source, made.packed, choose_layers(source)


def test_every_gate_is_passed_by_an_honest_export(exported, monkeypatch):
    monkeypatch.setattr(parity, "MIN_TOKENS", MIN_TOKENS)  # as many as users have
    result = check_parity(*exported)
    assert result.failures == []
    assert result.tensors == 20
    assert len(result.operators) == 14
    assert result.text is not None
    assert result.text.bit_equal
    assert result.text.tokens >= MIN_TOKENS
    result.require()


def test_a_less_accurate_operator_is_stopped(exported, monkeypatch):
    monkeypatch.setattr(
        parity, "operator_error", lambda name, *_: parity.OperatorError(name, 1.6e-3, 1e-3)
    )
    result = check_parity(*exported)
    assert len(result.failures) == 14
    assert "1.60e-03, more than 1.5 times the 1.00e-03" in result.failures[0]
    assert result.text is None  # what follows a failed gate is not computed
    with pytest.raises(ParityError, match="up_proj"):
        result.require()


def split_in_two(layer, x):
    """Sum a product in two halves, in float32, and round once: another order, as honest."""
    weight, half = layer.dense_weight().float(), layer.in_features // 2
    x32 = x.float()
    y = x32[..., :half] @ weight[:, :half].T + x32[..., half:] @ weight[:, half:].T
    return y.to(x.dtype)


def test_another_order_of_summation_passes(monkeypatch, tmp_path):
    """Of the embedded model in bfloat16, with the two largest of every four weights."""
    model = AutoModelForCausalLM.from_pretrained(STDLIB_LLAMA, dtype=torch.bfloat16)
    for module in model.model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = keep_two_of_four(module.weight.data)
    model.save_pretrained(tmp_path / "pruned")
    AutoTokenizer.from_pretrained(STDLIB_LLAMA).save_pretrained(tmp_path / "pruned")
    source = open_checkpoint(tmp_path / "pruned")
    layers = choose_layers(source)
    (tmp_path / "packed").mkdir()
    assert len(list(write_packed(source, tmp_path / "packed", layers))) == len(layers)
    monkeypatch.setattr(parity, "MIN_TOKENS", 1024)
    monkeypatch.setattr(Sparse24Linear, "forward", split_in_two)
    result = check_parity(source, tmp_path / "packed", layers)
    assert result.failures == []
    assert not result.text.bit_equal
    assert result.text.top1_agreement < 0.999  # ties turn
    assert result.text.confident_agreement == 1
    assert 0.8 * result.text.tokens < result.text.confident_tokens < result.text.tokens


def test_one_wrong_group_in_a_large_layer_is_stopped(monkeypatch):
    torch.manual_seed(0)
    layer = Sparse24Linear(2048, 512, bias=False, dtype=torch.bfloat16)
    layer.weight.data.normal_()
    layer.weight_meta.fill_(0x4E)
    wrong = layer.dense_weight().clone()
    wrong[7, 64:68] = wrong[7, 64:68].roll(1)
    monkeypatch.setattr(Sparse24Linear, "forward", split_in_two)
    assert operator_error("layer", layer).passes
    monkeypatch.setattr(Sparse24Linear, "forward", lambda _, x: nn.functional.linear(x, wrong))
    error = operator_error("layer", layer)
    assert not error.passes
    x = torch.randn(256, 2048).bfloat16()
    exact = x.float() @ layer.dense_weight().float().T
    whole = (x.float() @ wrong.float().T - exact).norm() / exact.norm()
    assert whole < 1.5e-3  # the whole output does not show it: bfloat16 rounds by as much
    assert error.packed > 10 * whole


def test_the_error_of_the_operator_is_that_of_the_dense_product():
    layer = Sparse24Linear(64, 16, bias=False, dtype=torch.bfloat16)
    torch.manual_seed(0)
    layer.weight.data.normal_()
    layer.weight_meta.fill_(0x4E)
    error = operator_error("layer", layer)
    assert error.packed == error.dense
    assert 1e-4 < error.dense < 1e-2  # bfloat16 has 8 bits


def test_a_model_that_predicts_otherwise_is_stopped(llama):
    dense = AutoModelForCausalLM.from_pretrained(llama)
    changed = copy.deepcopy(dense)
    with torch.no_grad():  # as far from the original as can be: the likeliest token is the rarest
        changed.model.norm.weight.mul_(-8)
    windows = torch.randint(2048, (3, 64), generator=torch.Generator().manual_seed(0))
    text = compare_logits(source_logits(dense, windows), changed, windows, origin="random")
    assert text.tokens == 3 * 63
    assert not text.bit_equal
    assert text.divergence > 0.1
    assert text.top1_agreement < 0.5
    assert text.perplexity_after > 1.5 * text.perplexity_before
    failures = "; ".join(text_failures(text))
    for reason in ("likeliest next token agrees", "divergence", "perplexity goes from"):
        assert reason in failures


def test_perplexity_is_that_of_the_models_own_loss(llama):
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    windows = torch.randint(2048, (2, 64), generator=torch.Generator().manual_seed(0))
    text = compare_logits(source_logits(model, windows), model, windows, origin="random")
    with torch.inference_mode():
        loss = model(input_ids=windows, labels=windows).loss
    assert text.perplexity_before == text.perplexity_after == pytest.approx(float(loss.exp()))
    assert text.top1_agreement == 1.0
    assert text.divergence == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("after", "failures"), [(2047.59, 0), (2053.0, 1)])
def test_a_perplexity_may_change_by_a_thousandth_of_itself(after, failures):
    text = TextParity("", 4096, 1.0, 2047.56, after, 0.0, 0.0, False)
    assert len(text_failures(text)) == failures


def test_not_a_number_fails():
    nan = float("nan")
    text = TextParity("", 1, nan, 1.0, nan, nan, nan, False, 1, nan)
    assert len(text_failures(text)) == 3


def test_a_source_that_gives_nan_fails_however_equal_its_export_is(llama):
    broken = AutoModelForCausalLM.from_pretrained(llama)
    with torch.no_grad():
        broken.model.norm.weight[0] = float("nan")
    windows = torch.randint(2048, (2, 64), generator=torch.Generator().manual_seed(0))
    text = compare_logits(
        source_logits(broken, windows), copy.deepcopy(broken), windows, origin="random"
    )
    assert text.bit_equal
    for equal in (True, False):
        (failure,) = text_failures(dataclasses.replace(text, bit_equal=equal))
        assert (
            "the logits of the source hold NaN or Inf: its perplexity on random is nan" in failure
        )
    written = json.loads(as_json(dataclasses.asdict(Parity(text=text))))
    assert written["text"]["perplexity_before"] is None


def test_the_worst_number_of_tokens_counts(monkeypatch):
    def errors_at(name, multiply, dense, tokens):
        yield parity.OperatorError(name, packed={1: 3e-3, 16: 1e-3}[tokens], dense=1e-3)

    monkeypatch.setattr(parity, "_errors_at", errors_at)
    layer = Sparse24Linear(8, 4, dtype=torch.bfloat16)
    assert operator_error("layer", layer).packed == 3e-3


def test_without_a_tokenizer_tokens_are_random(exported):
    source, out, layers = exported
    for file in source.path.glob("tokenizer*"):
        file.unlink()
    assert "random tokens" in check_parity(source, out, layers).text.text


def test_bits_and_not_values_are_compared():
    assert different_bits(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])) == 1
    assert different_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")])) == 0
    assert different_bits(torch.zeros(3), torch.zeros(3).half()) == 3
    assert different_bits(torch.zeros(0), torch.zeros(0)) == 0


def test_a_failure_is_an_error_that_lists_all():
    Parity().require()
    with pytest.raises(ParityError, match=r"(?s)one.*two"):
        Parity(failures=["one", "two"]).require()
