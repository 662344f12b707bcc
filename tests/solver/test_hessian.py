import pytest
import torch

from mrp_lightning import HessianAccumulator
from mrp_lightning.errors import HessianError


def test_it_is_twice_the_mean_outer_product(problem, truth):
    _, inputs = problem()
    accumulator = HessianAccumulator(64)
    accumulator.update(inputs[:100].reshape(4, 25, 64))
    accumulator.update(inputs[100])
    accumulator.update(inputs[101:])
    assert accumulator.num_tokens == 256
    hessian = accumulator.hessian()
    assert hessian.dtype == torch.float32
    torch.testing.assert_close(hessian.double(), truth.hessian_of(inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_any_floating_dtype_is_summed_in_float32(problem, truth, dtype, device):
    inputs = problem()[1].to(dtype)
    accumulator = HessianAccumulator(64)
    accumulator.update(inputs.to(device))
    hessian = accumulator.hessian()
    assert hessian.dtype == torch.float32
    assert hessian.device.type == device
    expected = truth.hessian_of(inputs)
    torch.testing.assert_close(hessian.double().cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_wide_inputs_are_summed_as_exactly(truth, dtype):
    torch.manual_seed(0)
    inputs = torch.randn(700, 1100).to(dtype)
    accumulator = HessianAccumulator(1100)
    accumulator.update(inputs[:400])
    accumulator.update(inputs[400:])
    error = accumulator.hessian().double() - truth.hessian_of(inputs)
    # Sums of 700 products in float32; factors rounded to bfloat16 are off by more than 1e-3.
    assert error.abs().max() < 3e-6


def test_merging_equals_seeing_both(problem):
    _, inputs = problem()
    whole, first, second = (HessianAccumulator(64) for _ in range(3))
    whole.update(inputs)
    first.update(inputs[:50])
    second.update(inputs[50:])
    before = second.hessian()
    empty = HessianAccumulator(64)
    empty.merge(first)
    empty.merge(second)
    empty.merge(HessianAccumulator(64))
    assert empty.num_tokens == whole.num_tokens
    torch.testing.assert_close(empty.hessian(), whole.hessian())
    first.update(inputs)
    torch.testing.assert_close(empty.hessian(), whole.hessian())  # not tied to its sources
    assert torch.equal(second.hessian(), before)
    with pytest.raises(HessianError, match="32 columns into one of 64"):
        empty.merge(HessianAccumulator(32))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_what_is_not_finite_is_refused_and_leaves_no_trace(problem, bad):
    _, inputs = problem()
    accumulator = HessianAccumulator(64, name="model.layers.3.q_proj")
    accumulator.update(inputs)
    before = accumulator.hessian()
    spoiled = inputs.clone()
    spoiled[7, 5] = bad
    with pytest.raises(HessianError, match=r"`model.layers.3.q_proj`: 1 of 64 input features"):
        accumulator.update(spoiled)
    assert accumulator.num_tokens == 256
    assert torch.equal(accumulator.hessian(), before)


@pytest.mark.parametrize("shape", [(3, 63), (), (64, 3)])
def test_wrong_shapes_are_refused(shape):
    with pytest.raises(HessianError, match=r"shape \(\.\.\., 64\)"):
        HessianAccumulator(64).update(torch.zeros(shape))


def test_integers_are_refused():
    with pytest.raises(HessianError, match="int64"):
        HessianAccumulator(4).update(torch.ones(3, 4, dtype=torch.int64))


def test_inputs_without_values_are_refused():
    accumulator = HessianAccumulator(4, name="fc1")
    with pytest.raises(HessianError, match="`fc1`: the inputs are on the meta device"):
        accumulator.update(torch.ones(3, 4, device="meta"))
    assert accumulator.num_tokens == 0


def test_no_tokens_is_an_error():
    accumulator = HessianAccumulator(4, name="fc1")
    accumulator.update(torch.zeros(0, 4))
    with pytest.raises(HessianError, match="layer `fc1`: no calibration tokens"):
        accumulator.hessian()


def test_modes_of_the_caller_do_not_matter(problem, truth):
    _, inputs = problem()
    accumulator = HessianAccumulator(64)
    with torch.inference_mode():
        accumulator.update(inputs[:100] + 0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        accumulator.update(inputs[100:].clone().requires_grad_())
    hessian = accumulator.hessian()
    assert not hessian.requires_grad
    assert not hessian.is_inference()
    torch.testing.assert_close(hessian.double(), truth.hessian_of(inputs), rtol=1e-5, atol=1e-5)
