"""Contracts of `prune_weight` that hold for all methods."""

import copy
import dataclasses
import gc
import warnings
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrp_lightning import HessianAccumulator, prune_weight
from mrp_lightning.errors import HessianError, NumericalWarning, PatternError, TargetError
from mrp_lightning.solver.arguments import MASK_NAMES, NAMED
from mrp_lightning.solver.hessian import InputHessian
from mrp_lightning.solver.pruning import prune
from mrp_lightning.solver.recipe import Recipe

PAIRS = [f"{mask}+{compensation}" for mask in MASK_NAMES for compensation in ("none", "S", "M")]


def is_negative_zero(values):
    return (values == 0) & values.signbit()


@given(
    method=st.sampled_from(PAIRS),
    pattern=st.sampled_from(["2:4", "1:4", "4:8", "1:2", None]),
    sparsity=st.floats(0.01, 0.99),
    rows=st.integers(1, 7),
    groups=st.integers(1, 5),
    tokens=st.sampled_from([1, 2, 5, 200]),
    block=st.sampled_from([8, 16, 128, None]),
    damping=st.sampled_from([0.0, 1e-4, 0.01]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    spoil=st.sets(st.sampled_from(["zero", "duplicate", "ties", "strided", "zero rows"])),
    seed=st.integers(0, 2**20),
)
def test_counts_are_exact_and_inputs_untouched(
    problem, method, pattern, sparsity, rows, groups, tokens, block, damping, dtype, spoil, seed
):
    if pattern is None and method.startswith("M+"):
        method = "S" + method[1:]
    columns = 8 * groups
    weight, inputs = problem(rows, columns, tokens=tokens, seed=seed, dtype=torch.float64)
    if "zero" in spoil:
        inputs[:, [0, columns // 2]] = 0
    if "duplicate" in spoil:
        inputs[:, -1] = inputs[:, 1]
    if "ties" in spoil:
        weight = weight.sign() * 0.125
    if "zero rows" in spoil:
        weight[0] = 0
    hessian = (2 * inputs.T @ inputs / tokens).to(torch.float32)
    weight = weight.to(dtype)
    if "strided" in spoil:
        weight = weight.repeat_interleave(2, dim=1)[:, ::2]
        hessian = hessian.T.contiguous().T
    before = weight.clone(), hessian.clone()
    arguments = {"sparsity": sparsity} if pattern is None else {"pattern": pattern}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericalWarning)
        solution = prune_weight(
            weight, hessian, method=method, block_size=block, damping=damping, **arguments
        )
    assert torch.equal(weight, before[0])
    assert torch.equal(hessian, before[1])
    assert solution.weight.dtype == dtype
    assert solution.weight.isfinite().all()
    assert (solution.weight[solution.pruned] == 0).all()
    assert not is_negative_zero(solution.weight[solution.pruned]).any()
    if pattern is not None:
        kept, group = map(int, pattern.split(":"))
        assert (solution.pruned.reshape(rows, -1, group).sum(2) == group - kept).all()
    elif method.startswith("wanda"):
        assert (solution.pruned.sum(1) == int(sparsity * columns + 0.5)).all()
    elif method.startswith(("magnitude", "J")):
        assert solution.pruned.sum() == int(sparsity * rows * columns + 0.5)
    else:
        for stop in [*range(0, columns, block or columns), columns]:
            assert solution.pruned[:, :stop].sum() == int(sparsity * rows * stop + 0.5)
    assert solution.dead_inputs == (hessian.diagonal() == 0).sum()


@pytest.mark.parametrize("method", NAMED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_is_the_mean_squared_change_of_the_outputs(problem, truth, method, dtype):
    weight, inputs = problem()
    weight = weight.to(dtype)
    hessian = truth.hessian_of(inputs).float()
    solution = prune_weight(weight, hessian, pattern="2:4", method=method)
    change = (solution.weight.double() - weight.double()) @ inputs.double().T
    assert solution.loss == pytest.approx(float(change.square().sum()) / len(inputs), rel=1e-4)


def test_damping_used_is_what_is_added_to_the_diagonal(problem, truth):
    weight, inputs = problem()
    hessian = truth.hessian_of(inputs)
    hessian[3], hessian[:, 3] = 0, 0
    solution = prune_weight(weight, hessian, pattern="2:4", damping=0.05)
    live = hessian.diagonal()[hessian.diagonal() > 0]
    assert solution.damping_used == pytest.approx(0.05 * float(live.mean()))


@pytest.mark.parametrize("method", ["SM", "JM"])
def test_dead_inputs_do_not_lower_the_gap_without_damping(problem, truth, method):
    weight, inputs = problem(rows=8, columns=32)
    inputs[:, ::3] = 0
    hessian, live = truth.hessian_of(inputs), inputs.abs().sum(0) > 0
    solution = prune_weight(weight, hessian.float(), sparsity=0.5, method=method, damping=0)
    matrix, kept = hessian[live][:, live], solution.pruned[:, live]
    best = truth.exact_optimum(weight[:, live], matrix, kept)
    least = truth.loss(best, weight[:, live], matrix)
    lost = truth.loss(solution.weight[:, live], weight[:, live], matrix)
    assert (lost - least) / lost <= max(1e-6, solution.gap)


@pytest.mark.parametrize("method", [*NAMED, "wanda+M", "magnitude+S"])
def test_weights_of_dead_inputs_go_first_and_never_move(problem, truth, method):
    weight, inputs = problem(rows=8, columns=32)
    inputs[:, [4, 5, 6, 13, 31]] = 0
    hessian = truth.hessian_of(inputs).float()
    for damping in (0.01, 1e-4):
        solution = prune_weight(
            weight * 100, hessian, pattern="2:4", method=method, damping=damping
        )
        assert solution.dead_inputs == 5
        assert solution.pruned[:, [4, 5, 13, 31]].all()  # of 4, 5 and 6 only two can go
        assert not solution.pruned[:, 6].any()
        assert torch.equal(solution.weight[:, 6], weight[:, 6] * 100)
    rest = torch.arange(32)[inputs.abs().sum(0) > 0]
    alone = prune_weight(
        weight[:, rest], hessian[rest][:, rest], sparsity=0.5, method="SM", block_size=None
    )
    both = prune_weight(
        weight, hessian, sparsity=(5 * 8 + alone.pruned.sum().item()) / 256, block_size=None
    )
    assert torch.equal(both.pruned[:, rest], alone.pruned)
    torch.testing.assert_close(both.weight[:, rest], alone.weight, rtol=1e-3, atol=1e-4)


def test_dead_weights_beyond_the_budget_stay(problem, truth):
    weight, inputs = problem(rows=4, columns=16)
    inputs[:, :12] = 0
    solution = prune_weight(weight, truth.hessian_of(inputs), sparsity=0.25, method="SM")
    assert solution.pruned.sum() == 16
    assert solution.pruned[0, :12].all()  # equal scores go by position: row after row
    assert solution.pruned[1, :4].all()
    assert torch.equal(solution.weight[:, :12], weight[:, :12] * ~solution.pruned[:, :12])


def test_the_result_does_not_depend_on_the_modes_of_the_caller(problem, truth):
    weight, inputs = problem()
    hessian = truth.hessian_of(inputs).float()
    plain = prune_weight(weight, hessian, pattern="2:4", block_size=16)
    parameter = torch.nn.Parameter(weight.clone())
    with torch.enable_grad():
        results = [prune_weight(parameter, hessian, pattern="2:4", block_size=16)]
    with torch.inference_mode():
        results += [prune_weight(weight + 0, hessian + 0, pattern="2:4", block_size=16)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results += [prune_weight(weight, hessian, pattern="2:4", block_size=16)]
    torch.set_float32_matmul_precision("medium")
    try:
        results += [prune_weight(weight, hessian, pattern="2:4", block_size=16)]
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    state = torch.get_rng_state()
    results += [prune_weight(weight, hessian, pattern="2:4", block_size=16)]
    assert torch.equal(torch.get_rng_state(), state)
    for result in results:
        assert torch.equal(result.weight, plain.weight)
        assert type(result.weight) is torch.Tensor
        assert not result.weight.requires_grad
        assert not result.weight.is_inference()
        assert result.weight.is_contiguous()
        assert result.pruned.is_contiguous()
        assert result.loss == plain.loss
    assert parameter.grad is None
    copy.deepcopy(plain)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plain.loss = 0.0


def test_weights_whose_result_equals_them_are_still_copies(problem, truth):
    weight, inputs = problem(rows=2, columns=4)
    weight[:, :2] = 0
    solution = prune_weight(weight, truth.hessian_of(inputs), pattern="2:4", method="magnitude")
    assert solution.loss == 0
    solution.weight.zero_()
    assert weight.any()


@pytest.mark.parametrize("method", NAMED)
def test_a_weight_without_anything_to_lose(problem, truth, method):
    _, inputs = problem(rows=3, columns=16)
    solution = prune_weight(
        torch.zeros(3, 16), truth.hessian_of(inputs), pattern="2:4", method=method
    )
    assert solution.loss == 0
    assert solution.gap in (None, 0)
    assert not solution.weight.any()


# ---- Hessians in trouble


def test_a_rank_deficient_hessian_is_damped_step_by_step(problem, truth):
    weight, inputs = problem(rows=6, columns=32, tokens=10)
    hessian = truth.hessian_of(inputs).float()
    with pytest.warns(NumericalWarning, match="not positive definite with damping 0; trying 1e-06"):
        solution = prune_weight(weight.double(), hessian, pattern="2:4", damping=0)
    assert solution.damping_used >= 1e-6 * float(hessian.diagonal().mean()) * 0.999
    assert solution.gap <= 1e-6


def test_each_step_of_the_ladder_is_told(problem, truth):
    weight, inputs = problem(rows=6, columns=32)
    hessian = truth.hessian_of(inputs)
    mean = hessian.diagonal().mean()
    # Indefinite by a little: positive definite only from a damping of about 2e-4.
    hessian -= (torch.linalg.eigvalsh(hessian)[0] + 2e-4 * mean) * torch.eye(32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        solution = prune_weight(weight, hessian, pattern="2:4", damping=2e-6)
    steps = [str(w.message) for w in caught if issubclass(w.category, NumericalWarning)]
    assert len(steps) == 3
    assert "with damping 2e-06; trying 2e-05" in steps[0]
    assert "with damping 0.0002; trying 0.002" in steps[2] or "trying 0.002" in steps[2]
    mean = float(hessian.diagonal().mean())
    assert solution.damping_used == pytest.approx(2e-3 * mean)
    assert solution.damping_ratio == pytest.approx(2e-3)


def test_a_healthy_hessian_without_damping_gives_no_warning(problem, truth):
    weight, inputs = problem()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        solution = prune_weight(weight, truth.hessian_of(inputs).float(), pattern="2:4", damping=0)
    assert solution.damping_used == 0


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda h: h * 0, "the Hessian is zero"),
        (lambda h: h.index_fill(0, torch.tensor(3), torch.nan), "NaN or Inf"),
        (lambda h: h.index_fill(0, torch.tensor(3), torch.inf), "NaN or Inf"),
        (lambda h: h[:, :-1], r"must be square.*\(64, 63\)"),
        (lambda h: h[0], r"must be square.*\(64,\)"),
        (lambda h: h[:60, :60], "64 columns, its Hessian 60"),
        (lambda h: h.triu(), "not symmetric"),
        (lambda h: -h, "negative diagonal"),
        (lambda h: h.long(), "floating point"),
        (lambda h: torch.full((64, 64), 100.0).fill_diagonal_(1.0), "not positive definite"),
    ],
)
@pytest.mark.filterwarnings("ignore::mrp_lightning.errors.NumericalWarning")
def test_an_unusable_hessian_is_a_typed_error(problem, truth, spoil, message):
    weight, inputs = problem()
    hessian = truth.hessian_of(inputs).float()
    with pytest.raises(HessianError, match=message):
        prune_weight(weight, spoil(hessian), pattern="2:4")


def test_errors_and_warnings_name_the_layer(problem, truth):
    with pytest.raises(
        HessianError, match=r"layer `model\.fc1`: the Hessian is zero.*Likely causes"
    ):
        InputHessian(torch.zeros(4, 4), name="model.fc1")
    weight, inputs = problem(tokens=3)
    checked = InputHessian(truth.hessian_of(inputs).float(), name="model.fc1")
    with pytest.warns(NumericalWarning, match="layer `model.fc1`"):
        prune(weight, checked, Recipe.of(method="SM", sparsity=0.5, damping=0))


def test_layers_of_one_input_share_its_factor(problem, truth):
    weight, inputs = problem(tokens=3)
    checked = InputHessian(truth.hessian_of(inputs).float())
    with pytest.warns(NumericalWarning):
        first = prune(weight, checked, Recipe.of(method="SM", pattern="2:4", damping=0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # settled already
        second = prune(weight, checked, Recipe.of(method="SS", pattern="2:4", damping=0))
    assert second.damping_ratio == first.damping_ratio > 0


def test_nothing_of_a_hessian_outlives_it(problem, truth):
    weight, inputs = problem()
    checked = InputHessian(truth.hessian_of(inputs).float())
    prune(weight, checked, Recipe.of(method="SM", pattern="2:4"))
    factor = weakref.ref(checked.damped(0.01).factor)
    gc.disable()  # cycles would keep gigabytes until the collector comes by
    try:
        del checked
        assert factor() is None
    finally:
        gc.enable()


def test_the_loss_is_right_where_the_changes_cancel(problem, truth):
    weight, inputs = problem(rows=6, columns=32, tokens=10)
    hessian = truth.hessian_of(inputs).float()
    for damping in (1e-4, 1e-3):
        solution = prune_weight(weight, hessian, pattern="2:4", damping=damping)
        expected = truth.loss(solution.weight, weight, hessian)
        assert solution.loss == pytest.approx(expected, rel=1e-4)


# ---- arguments


def test_columns_must_split_into_groups(problem, truth):
    weight, inputs = problem(rows=3, columns=18)
    with pytest.raises(
        PatternError, match='18 columns do not split into the groups of pattern "2:4"'
    ):
        prune_weight(weight, truth.hessian_of(inputs), pattern="2:4")


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.ones(4), r"expected a weight \(rows, columns\) in floating point"),
        (torch.ones(2, 4, dtype=torch.int8), "torch.int8"),
        (torch.full((2, 4), torch.nan), "NaN or Inf"),
    ],
)
def test_unusable_weights_are_refused(weight, message):
    with pytest.raises(TargetError, match=message):
        prune_weight(weight, torch.eye(4), pattern="2:4")


@pytest.mark.parametrize("method", NAMED)
def test_a_weight_without_rows(method):
    solution = prune_weight(torch.zeros(0, 8), torch.eye(8), pattern="2:4", method=method)
    assert solution.weight.shape == (0, 8)
    assert solution.loss == 0


@pytest.mark.parametrize("method", ["SS", "SM", "JM"])
def test_a_weight_out_of_the_range_of_its_dtype_is_refused(method):
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(2, (16, 32), generator=generator) * 2 - 1
    inputs = torch.randn(20, 32, generator=generator)
    hessian = 2 * inputs.T @ inputs / 20
    weight = 60000.0 * signs
    wide = prune_weight(weight, hessian, sparsity=0.5, method=method, damping=1e-4)
    assert float(wide.weight.abs().max()) > torch.finfo(torch.float16).max
    with pytest.raises(HessianError, match=r"out of the range of torch.float16. Raise `damping`"):
        prune_weight(weight.half(), hessian, sparsity=0.5, method=method, damping=1e-4)


def with_copies(copies, columns=64, rows=32):
    """A weight and the Hessian of inputs of which the last ones are copies of the first."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(8 * columns, columns, generator=generator)
    inputs[:, columns - copies :] = inputs[:, :copies]
    weight = torch.randn(rows, columns, generator=generator)
    return weight, 2 * inputs.T @ inputs / len(inputs)


@pytest.mark.parametrize("copies", [4, 16])
@pytest.mark.parametrize(("damping", "block_size"), [(1e-3, 16), (0.01, 16), (0.01, None)])
def test_the_smallest_weights_never_lose_less_even_without_compensation(
    truth, copies, damping, block_size
):
    weight, hessian = with_copies(copies)
    simple = prune_weight(weight, hessian, sparsity=0.5, method="magnitude")
    arguments = {"sparsity": 0.5, "damping": damping, "block_size": block_size}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        solution = prune_weight(weight, hessian, **arguments)
    assert solution.loss < simple.loss
    matrix = truth.damped(hessian, damping)
    _, pruned = truth.algorithm_1(weight, matrix, block_size or 64, sparsity=0.5)
    paper = truth.loss(truth.exact_optimum(weight, matrix, pruned), weight, hessian)
    assert solution.loss <= 1.005 * paper
    if paper > simple.loss:
        assert solution.fallback_mask == "magnitude"
        assert [w.category for w in told] == [NumericalWarning]
        for stop in range(block_size or 64, 65, block_size or 64):  # as of the method's own mask
            assert int(solution.pruned[:, :stop].sum()) == 0.5 * 32 * stop
        best = truth.exact_optimum(weight, matrix, solution.pruned)
        assert truth.loss(solution.weight, weight, matrix) == pytest.approx(
            truth.loss(best, weight, matrix), rel=1e-5
        )
    else:
        assert (solution.fallback_mask, told) == (None, [])


def test_the_warning_names_losses_and_the_way_out():
    weight, hessian = with_copies(4)
    message = r"layer: SM lost .* smallest weights lose .* with compensation.*copies.*method JM"
    with pytest.warns(NumericalWarning, match=message):
        fallen = prune_weight(weight, hessian, sparsity=0.5)
    assert torch.equal(
        fallen.pruned, prune_weight(weight, hessian, sparsity=0.5, method="magnitude").pruned
    )
    joint = prune_weight(weight, hessian, sparsity=0.5, method="JM")
    assert joint.loss < fallen.loss


@pytest.mark.parametrize("method", ["SS", "S+none", "magnitude+M"])
def test_other_methods_are_what_they_are_called(method):
    weight, hessian = with_copies(4)
    assert prune_weight(weight, hessian, sparsity=0.5, method=method).fallback_mask is None


def test_tensors_without_arithmetic_are_refused():
    with pytest.raises(TargetError, match=r"16 bits or more; got \(4, 4\) of torch.float8_e4m3fn"):
        prune_weight(torch.eye(4).to(torch.float8_e4m3fn), torch.eye(4), sparsity=0.5)
    with pytest.raises(HessianError, match="sparse_coo. Make them dense"):
        HessianAccumulator(4).update(torch.eye(4).to_sparse())
