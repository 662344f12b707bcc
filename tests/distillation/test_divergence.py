"""KL(teacher ‖ student) by chunks against the plain formula, for the loss and all gradients."""

import copy

import pytest
import torch
from families import build
from torch.nn import functional as F

from mrp_lightning.distillation import divergence as module
from mrp_lightning.distillation.divergence import Predictor, divergence


def pair(name):
    """Two models of a family with other weights, in float64."""
    teacher = build(name).double().eval()
    student = copy.deepcopy(teacher)
    torch.manual_seed(1)
    for parameter in student.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return student, teacher.requires_grad_(False)


def plain(student, teacher, ids, mask):
    """Σ p log(p / q) from whole logits, by autograd."""
    p = teacher(input_ids=ids, attention_mask=mask).logits.double().softmax(-1)
    q = student(input_ids=ids, attention_mask=mask).logits.double().softmax(-1)
    by_token = (p * (p.log() - q.log())).sum(-1)
    return by_token.sum() if mask is None else by_token[mask != 0].sum()


FAMILIES = ["opt", "opt_350m", "bloom", "mamba", "gemma2", "cohere2", "granite"]


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    """Several chunks, of which the last is shorter."""
    monkeypatch.setattr(module, "_LOGITS", 64 * 5)


@pytest.mark.parametrize(
    ("name", "trains_head"),
    [*((name, False) for name in FAMILIES), ("llama", True), ("gpt2", True)],
)
def test_loss_and_gradients_are_those_of_the_formula(name, trains_head, batches, monkeypatch):
    student, teacher = pair(name)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # so that nothing is rounded
    student.get_output_embeddings().requires_grad_(trains_head)
    batch = batches[1]  # padded on the right: on the left, BLOOM gives NaN in float64
    ids, mask = batch["input_ids"], batch["attention_mask"]
    expected = plain(student, teacher, ids, mask)
    expected.backward()
    gradients = {n: p.grad.clone() for n, p in student.named_parameters() if p.grad is not None}
    student.zero_grad(set_to_none=True)

    predictor = Predictor(student)
    result = divergence(predictor, Predictor(teacher), ids, mask)
    assert predictor._head is not None
    assert result.tokens == int(mask.sum())
    torch.testing.assert_close(result.kl.double(), expected, rtol=1e-6, atol=0)
    result.kl.backward()
    assert {n for n, p in student.named_parameters() if p.grad is not None} == set(gradients)
    for n, parameter in student.named_parameters():
        if n in gradients:
            torch.testing.assert_close(parameter.grad, gradients[n], rtol=1e-6, atol=1e-8)


def test_another_way_to_logits_runs_whole(batches):
    student, teacher = pair("llama")

    class Shifted(type(student)):
        def forward(self, *arguments, **named):
            output = super().forward(*arguments, **named)
            output.logits = output.logits + torch.arange(output.logits.shape[-1])
            return output

    student.__class__ = teacher.__class__ = Shifted
    ids = batches[2]["input_ids"]
    predictor = Predictor(student)
    result = divergence(predictor, Predictor(teacher), ids, None)
    assert predictor._head is None
    expected = plain(student, teacher, ids, None)
    torch.testing.assert_close(result.kl.double(), expected, rtol=1e-5, atol=0)


def test_what_padding_holds_changes_nothing(batches):
    student, teacher = pair("llama")
    batch = batches[0]
    ids, mask = batch["input_ids"], batch["attention_mask"]
    other = torch.where(mask == 0, 63 - ids, ids)
    first = divergence(Predictor(student), Predictor(teacher), ids, mask)
    second = divergence(Predictor(student), Predictor(teacher), other, mask)
    torch.testing.assert_close(first.kl, second.kl, rtol=1e-6, atol=0)
    assert float(first.kl) > 0


def test_equal_models_diverge_by_nothing(batches):
    _, teacher = pair("gemma2")
    ids = batches[2]["input_ids"]
    kl = divergence(Predictor(copy.deepcopy(teacher)), Predictor(teacher), ids, None).kl
    assert abs(float(kl)) < 1e-4
    assert float(F.relu(-kl)) < 1e-4


def test_parts_that_are_kept_in_eval_mode_stay_there(batches):
    student, teacher = pair("llama")
    student.train()
    student.model.norm.eval()
    divergence(Predictor(student), Predictor(teacher), batches[2]["input_ids"], None)
    assert student.training
    assert not student.model.norm.training


def test_the_sum_is_of_float32_whatever_the_default_type_is(batches):
    """`precision: bf16-true` makes bfloat16 the default, in which a sum loses all but 8 bits."""
    (student, teacher), batch = pair("llama"), batches[1]
    ids, mask = batch["input_ids"], batch["attention_mask"]
    torch.set_default_dtype(torch.bfloat16)
    try:
        kl = divergence(Predictor(student), Predictor(teacher), ids, mask).kl
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(kl.double(), plain(student, teacher, ids, mask), rtol=1e-4, atol=0)
