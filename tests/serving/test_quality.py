"""vLLM computes with a packed model what it computes with the pruned one, as transformers does."""

import pytest
import torch
from served import by_transformers, embedded, engine, four_bits, scores, text, two_of_four

pytest.importorskip("vllm", reason="needs vLLM: `make vllm`")

PRUNINGS = {"bitmask4": four_bits, "packed": two_of_four}
EXACT = ("--activations", "exact")


def assert_close(ours, theirs):
    """bfloat16 products are summed in another order: 0.03 nats a token, and nothing in the mean."""
    assert (ours.log_probs - theirs.log_probs).abs().mean() < 0.03
    assert ours.perplexity == pytest.approx(theirs.perplexity, rel=2e-3)


@pytest.fixture(scope="module")
def source(half, root):
    """A function that returns the model that is packed in a format."""
    pruned = {"bitmask": half}
    pruned |= {form: embedded(root / form, prune) for form, prune in PRUNINGS.items()}
    return pruned.__getitem__


@pytest.mark.parametrize("form", ["bitmask", "bitmask4", "packed"])
def test_a_packed_model_is_the_pruned_one(form, source, packed):
    dense = scores(engine(source(form)), text())
    sparse = scores(engine(packed(source(form), form, *EXACT)), text())
    assert_close(sparse, dense)
    assert sparse.greedy == dense.greedy


def test_perplexity_is_that_of_transformers(half, packed):
    """In float32: how bfloat16 is rounded depends on the CPU, in the dense model as well."""
    import math

    sparse = scores(engine(packed(half, "bitmask"), dtype="float32"), text())
    theirs = by_transformers(half, text(), torch.float32)
    assert sparse.perplexity == pytest.approx(math.exp(-float(theirs.double().mean())), rel=1e-5)


def test_a_compiled_step_computes_the_same(half, packed, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    directory = packed(half, "bitmask")
    compiled = scores(engine(directory, enforce_eager=False), text())
    assert_close(compiled, scores(engine(directory), text()))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_dtypes(dtype, half, packed):
    dense = scores(engine(half, dtype=dtype), text())
    sparse = scores(engine(packed(half, "bitmask"), dtype=dtype), text())
    bound = 1e-4 if dtype == "float32" else 5e-3
    assert (sparse.log_probs - dense.log_probs).abs().mean() < bound


def test_a_layer_of_which_some_parts_are_packed(half, packed):
    directory = packed(half, "bitmask", "--skip", "*.k_proj", "*.up_proj", "*.0.mlp.down_proj")
    partly = scores(engine(directory), text())
    assert_close(partly, scores(engine(half), text()))


def test_a_head_of_8_bits_with_tied_embeddings(half, packed):
    import mrp_sparse  # noqa: F401

    directory = packed(half, "bitmask", "--head-bits", "8")
    theirs = by_transformers(directory, text(), torch.bfloat16)
    ours = scores(engine(directory), text())
    assert (ours.log_probs - theirs).abs().mean() < 0.03


def test_activations_are_rounded_as_by_transformers(source, packed):
    import mrp_sparse  # noqa: F401

    plain = packed(source("bitmask4"), "bitmask4", *EXACT)
    rounding = packed(source("bitmask4"), "bitmask4", "--activations", "int8")
    theirs = by_transformers(rounding, text(), torch.float32)
    change, error = (
        float((scores(engine(directory, dtype="float32"), text()).log_probs - theirs).abs().mean())
        for directory in (plain, rounding)
    )
    # A value at a tie may be rounded to the other side after sums of another order.
    assert error < 0.25 * change
