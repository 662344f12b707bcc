"""Solution 𝔐: against dense float64 solves, row by row."""

import warnings

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from mrp_lightning import prune_weight
from mrp_lightning.errors import NumericalWarning
from mrp_lightning.solver.compensations import _GAP_BETWEEN_BLOCKS
from mrp_lightning.solver.conjugate_gradients import (
    ConjugateGradients,
    LowRankModel,
    full_product,
    rounded_product,
)
from mrp_lightning.solver.hessian import InputHessian
from mrp_lightning.solver.masked_rows import MaskedRows

ENDING_IN_M = ["magnitude+M", "wanda+M", "SM", "MM", "JM"]
PATTERNS = [{"pattern": "2:4"}, {"pattern": "4:8"}]
SPARSITIES = [{"sparsity": 0.83}, {"sparsity": 0.07}]


def true_gap(truth, solution, weight, matrix):
    """Relative distance of the damped loss to that of the optimum, both in float64."""
    best = truth.exact_optimum(weight, matrix, solution.pruned)
    lowest = truth.loss(best, weight, matrix)
    return truth.loss(solution.weight, weight, matrix) / lowest - 1


@pytest.mark.parametrize("method", ENDING_IN_M)
def test_it_is_the_optimum_of_its_own_removed_set(problem, truth, method):
    weight, inputs = problem(rows=16, columns=96)
    hessian = truth.hessian_of(inputs).float()
    for arguments in PATTERNS if method == "MM" else PATTERNS + SPARSITIES:
        for block_size in (16, None) if method in ("SM", "MM") else (None,):
            solution = prune_weight(
                weight, hessian, method=method, block_size=block_size, **arguments
            )
            gap = true_gap(truth, solution, weight, truth.damped(hessian))
            assert gap - 1e-8 <= solution.gap <= 1e-6, (arguments, block_size)
            assert gap <= 1e-6


def test_the_certificate_is_honest_wherever_the_iteration_stops(problem, truth):
    weight, inputs = problem(rows=16, columns=96)
    hessian = truth.hessian_of(inputs).float()
    matrix = truth.damped(hessian)
    for tolerance in (10.0, 1.0, 0.1, 1e-2, 1e-3, 1e-4, 1e-5):
        for arguments in PATTERNS + SPARSITIES:
            solution = prune_weight(weight, hessian, tolerance=tolerance, **arguments)
            gap = true_gap(truth, solution, weight, matrix)
            assert gap - 1e-8 <= solution.gap <= tolerance


def test_float64_inputs_are_solved_in_float64(problem, truth):
    weight, inputs = problem(rows=8, columns=48)
    hessian = truth.hessian_of(inputs)
    matrix = truth.damped(hessian)
    for given_weight, given_hessian in ((weight.double(), hessian.float()), (weight, hessian)):
        solution = prune_weight(
            given_weight.double(), given_hessian, pattern="2:4", tolerance=1e-12
        )
        assert solution.weight.dtype == torch.float64
        assert true_gap(truth, solution, weight, truth.damped(given_hessian)) <= 1e-12
    in_single = prune_weight(weight, hessian, pattern="2:4", tolerance=1e-12)
    assert in_single.weight.dtype == torch.float32
    # The gap is that of the solution before it was rounded to float32.
    assert true_gap(truth, in_single, weight, matrix) <= 1e-11


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_get_the_optimum_rounded(problem, truth, dtype):
    weight, inputs = problem(rows=8, columns=48)
    weight = weight.to(dtype)
    hessian = truth.hessian_of(inputs).float()
    solution = prune_weight(weight, hessian, pattern="2:4", tolerance=1e-6)
    assert solution.weight.dtype == dtype
    best = truth.exact_optimum(weight, truth.damped(hessian), solution.pruned)
    torch.testing.assert_close(
        solution.weight.double(), best, rtol=torch.finfo(dtype).eps, atol=1e-3
    )
    expected = truth.loss(solution.weight, weight, hessian)
    assert solution.loss == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-4), (torch.float16, 1e-4)]
)
def test_the_default_tolerance_is_that_of_the_dtype(problem, truth, dtype, tolerance):
    weight, inputs = problem(rows=8, columns=48)
    weight, hessian = weight.to(dtype), truth.hessian_of(inputs).float()
    by_default = prune_weight(weight, hessian, pattern="2:4")
    explicit = prune_weight(weight, hessian, pattern="2:4", tolerance=tolerance)
    assert torch.equal(by_default.weight, explicit.weight)
    assert by_default.gap == explicit.gap <= tolerance
    other = prune_weight(weight, hessian, pattern="2:4", tolerance=tolerance / 100)
    assert other.iterations > by_default.iterations


@pytest.mark.parametrize(
    ("method", "arguments"),
    [("MM", {"pattern": "2:4"})]
    + [("SM", x) for x in ({"pattern": "2:4"}, {"sparsity": 0.5}, {"sparsity": 0.8})],
)
def test_blocks_are_chosen_as_by_exact_algorithm_1(problem, truth, monkeypatch, method, arguments):
    weight, inputs = problem(rows=24, columns=128, seed=5)
    hessian = truth.hessian_of(inputs)
    given = dict(arguments)
    if "pattern" in given:
        given["pattern"] = (2, 4)
    for block_size in (16, 32):
        best, pruned = truth.algorithm_1(
            weight, truth.damped(hessian), block_size, mask=method[0], **given
        )
        for gap, different in ((_GAP_BETWEEN_BLOCKS, 0.03), (1e-4, 0.003)):
            monkeypatch.setattr("mrp_lightning.solver.compensations._GAP_BETWEEN_BLOCKS", gap)
            solution = prune_weight(
                weight, hessian.float(), method=method, block_size=block_size, **arguments
            )
            assert solution.loss <= 1.005 * truth.loss(best, weight, hessian)
            assert (solution.pruned != pruned).float().mean() < different


def test_removing_one_weight_follows_the_single_removal_formula(problem, truth):
    weight, inputs = problem(rows=1, columns=40)
    hessian = truth.hessian_of(inputs)
    inverse = torch.linalg.inv(truth.damped(hessian))
    solution = prune_weight(weight.double(), hessian, sparsity=1 / 40, method="SM", tolerance=1e-12)
    (j,) = solution.pruned[0].nonzero().flatten().tolist()
    assert j == int((weight[0].double() ** 2 / inverse.diagonal()).argmin())
    expected = weight[0].double() - weight[0, j] / inverse[j, j] * inverse[j]
    torch.testing.assert_close(solution.weight[0], expected, rtol=1e-8, atol=1e-10)
    damped_loss = truth.loss(solution.weight, weight, truth.damped(hessian))
    assert damped_loss == pytest.approx(float(weight[0, j] ** 2 / inverse[j, j] / 2), rel=1e-6)


def test_an_ill_conditioned_hessian_is_refined_in_float64(problem, truth):
    weight, inputs = problem(rows=12, columns=64)
    inputs = inputs.double() * torch.logspace(0, -3, 64, dtype=torch.float64)
    inputs[:, 1] = inputs[:, 0] * 1.0005
    hessian = truth.hessian_of(inputs).float()
    for damping in (1e-6, 1e-8):
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            solution = prune_weight(weight, hessian, pattern="2:4", damping=damping)
        matrix = hessian.double() + solution.damping_used * torch.eye(64, dtype=torch.float64)
        gap = true_gap(truth, solution, weight, matrix)
        assert gap <= 1e-6
        assert solution.gap >= gap - 1e-8


def test_a_tolerance_out_of_reach_is_told(problem, truth):
    weight, inputs = problem(rows=8, columns=48)
    hessian = truth.hessian_of(inputs).float()
    with pytest.warns(NumericalWarning, match="certified gap to the optimum"):
        solution = prune_weight(weight, hessian, pattern="2:4", tolerance=1e-18)
    assert solution.gap > 1e-18
    gap = true_gap(truth, solution, weight, truth.damped(hessian))
    assert gap - 1e-14 <= solution.gap <= 1e-10


def test_many_rows_are_solved_in_chunks(problem, truth, monkeypatch):
    weight, inputs = problem(rows=30, columns=64)
    hessian = truth.hessian_of(inputs).float()
    for arguments in ({"pattern": "2:4"}, {"sparsity": 0.6}):
        whole = prune_weight(weight, hessian, block_size=16, **arguments)
        with monkeypatch.context() as patch:
            patch.setattr("mrp_lightning.solver.arithmetic.ELEMENTS", 7 * 64)
            patch.setattr("mrp_lightning.solver.masks.ELEMENTS", 1)
            chunks = prune_weight(weight, hessian, block_size=16, **arguments)
        assert (chunks.pruned != whole.pruned).float().mean() < 0.01
        assert chunks.loss == pytest.approx(whole.loss, rel=2e-3)
        assert true_gap(truth, chunks, weight, truth.damped(hessian)) <= chunks.gap + 1e-8 <= 2e-6


def test_rows_in_float64_are_solved_in_chunks_on_a_cpu(problem, truth, monkeypatch):
    weight, inputs = problem(rows=30, columns=64)
    hessian = truth.hessian_of(inputs)
    whole = prune_weight(weight.double(), hessian, pattern="2:4", block_size=16)
    monkeypatch.setattr("mrp_lightning.solver.compensations._ELEMENTS_ON_CPU", 7 * 64)
    sizes, solve = [], MaskedRows.solve
    monkeypatch.setattr(
        MaskedRows, "solve", lambda self, *rest: sizes.append(len(self.x)) or solve(self, *rest)
    )
    chunks = prune_weight(weight.double(), hessian, pattern="2:4", block_size=16)
    assert sizes == [7, 7, 7, 7, 2]
    assert torch.equal(chunks.pruned, whole.pruned)
    assert chunks.loss == pytest.approx(whole.loss, rel=2e-6)
    assert true_gap(truth, chunks, weight, truth.damped(hessian)) <= chunks.gap + 1e-12


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
@pytest.mark.parametrize("arguments", [{"pattern": "2:4"}], ids=str)
def test_fewer_rows_are_solved_where_memory_is_short(
    error, arguments, problem, truth, monkeypatch, caplog
):
    weight, inputs = problem(rows=30, columns=64)
    hessian = truth.hessian_of(inputs).float()
    whole = prune_weight(weight, hessian, block_size=16, **arguments)
    step, most = ConjugateGradients.step, []

    def step_of_few_rows(descent, energies):
        if descent.iterations == 2 and len(energies) > 7:  # in the middle of a solve
            raise error("out of memory")
        most.append(len(energies))
        step(descent, energies)

    monkeypatch.setattr(ConjugateGradients, "step", step_of_few_rows)
    solution = prune_weight(weight, hessian, block_size=16, **arguments)
    assert "No memory for 15 rows at a time: going on with 7." in caplog.messages
    assert min(most) == 2
    assert (solution.pruned != whole.pruned).float().mean() < 0.01
    assert true_gap(truth, solution, weight, truth.damped(hessian)) <= solution.gap + 1e-8 <= 2e-6

    monkeypatch.setattr(ConjugateGradients, "step", lambda *_: (_ for _ in ()).throw(error))
    with pytest.raises(error):
        prune_weight(weight, hessian, **arguments)


def test_a_float32_solve_that_fails_is_redone_in_float64(problem, truth, monkeypatch):
    weight, inputs = problem(rows=8, columns=48)
    hessian = truth.hessian_of(inputs).float()
    restrict = LowRankModel.on

    def spoilt(model, kept):
        preconditioner = restrict(model, kept)
        if kept.dtype == torch.float32:
            preconditioner.core.fill_(torch.nan)
        return preconditioner

    monkeypatch.setattr(LowRankModel, "on", spoilt)
    solution = prune_weight(weight, hessian, pattern="2:4")
    assert solution.gap <= 1e-6
    assert true_gap(truth, solution, weight, truth.damped(hessian)) <= 1e-6


def test_what_rounding_hides_from_float32_is_not_sought_there():
    # Fewer tokens than columns and a steep spectrum: the loss is so small beside the weights that
    # the residual's rounding alone exceeds the tolerance, however long float32 goes on.
    generator = torch.Generator().manual_seed(0)
    columns = 256
    rotation = torch.linalg.qr(torch.randn(columns, columns, generator=generator)).Q
    spectrum = torch.arange(1.0, columns + 1) ** -1.5
    channels = torch.exp(0.5 * torch.randn(columns, generator=generator))
    inputs = (torch.randn(128, columns, generator=generator) * spectrum) @ rotation * channels
    weight = torch.randn(64, columns, generator=generator)
    solution = prune_weight(weight, 2 * inputs.T @ inputs / 128, pattern="2:4")
    assert solution.gap <= 1e-6
    assert solution.iterations < 60


def units(monkeypatch, are_there):
    """Whether the device multiplies bfloat16 numbers fast; these tests run on any processor."""
    for module in ("compensations", "masked_rows"):
        monkeypatch.setattr(
            f"mrp_lightning.solver.{module}.has_bfloat16_units", lambda device: are_there
        )
    monkeypatch.setattr("mrp_lightning.solver.hessian._MANY_COLUMNS", 1)


@pytest.mark.parametrize("arguments", [{"pattern": "2:4"}, {"sparsity": 0.6}])
def test_products_may_be_rounded(problem, truth, monkeypatch, arguments):
    weight, inputs = problem(rows=32, columns=128)
    hessian = truth.hessian_of(inputs).float()
    losses = []
    for are_there in (False, True):
        units(monkeypatch, are_there)
        solution = prune_weight(weight, hessian, block_size=16, **arguments)
        assert solution.gap <= 1e-6
        losses.append(solution.loss)
    assert losses[0] != losses[1]
    assert losses[1] <= 1.005 * losses[0]


@pytest.mark.parametrize("arguments", [{"pattern": (2, 4)}, {"sparsity": 0.6}])
def test_brief_approaches_between_blocks_follow_algorithm_1(problem, truth, monkeypatch, arguments):
    weight, inputs = problem(rows=24, columns=128, seed=6)
    hessian = truth.hessian_of(inputs)
    units(monkeypatch, True)
    limits = []
    descend = ConjugateGradients.descend_rows
    monkeypatch.setattr(
        ConjugateGradients,
        "descend_rows",
        lambda self, targets, limit: limits.append(limit) or descend(self, targets, limit),
    )
    best, _ = truth.algorithm_1(weight, truth.damped(hessian), 8, **arguments)
    given = {"pattern": "2:4"} if "pattern" in arguments else arguments
    solution = prune_weight(weight, hessian.float(), block_size=8, **given)
    assert solution.loss <= 1.005 * truth.loss(best, weight, hessian)
    assert [limit == 2 for limit in limits] == [n > 4 and n % 4 > 0 for n in range(1, 16)]


def test_rounded_products_that_lead_astray_are_not_followed(problem, truth, monkeypatch):
    weight, inputs = problem(rows=16, columns=64)
    hessian = truth.hessian_of(inputs).float()
    units(monkeypatch, False)
    expected = prune_weight(weight, hessian, block_size=16, pattern="2:4")

    def wrong(matrix, delicate):
        opposed = matrix.flip(0)
        return lambda left, out: torch.mm(left, opposed @ opposed.T, out=out)

    units(monkeypatch, True)
    for module in ("compensations", "masked_rows"):
        monkeypatch.setattr(f"mrp_lightning.solver.{module}.rounded_product", wrong)
    solution = prune_weight(weight, hessian, block_size=16, pattern="2:4")
    assert torch.equal(solution.pruned, expected.pruned)
    assert solution.gap <= 1e-6
    torch.testing.assert_close(solution.weight, expected.weight, rtol=1e-2, atol=1e-3)
    assert solution.iterations > expected.iterations


def test_the_last_solve_rounds_its_products_where_that_helps(problem, truth, monkeypatch):
    weight, inputs = problem(rows=32, columns=128)
    hessian = truth.hessian_of(inputs).float()
    units(monkeypatch, True)
    damped = InputHessian(hessian).damped(0.01)
    assert damped.bfloat16_helps
    pruned = torch.rand(32, 128, generator=torch.Generator().manual_seed(0)) < 0.5
    exact = []
    full = []
    for helps in (False, True):
        damped.bfloat16_helps = helps
        x = weight.masked_fill(pruned, 0).float()
        system = MaskedRows(weight.float(), x, pruned, damped)
        products = []
        monkeypatch.setattr(
            "mrp_lightning.solver.masked_rows.full_product",
            lambda matrix, products=products: counted(full_product(matrix), products),
        )
        system.solve(1e-6, lambda _: None)
        assert system.gap <= 1e-6
        assert bool((x[pruned] == 0).all())
        exact.append(x)
        full.append(len(products))
    assert full[0] > 5
    assert full[1] == 0
    torch.testing.assert_close(exact[1], exact[0], rtol=1e-2, atol=1e-3)


def counted(product, calls):
    def times(left, out):
        calls.append(None)
        product(left, out)

    return times


def test_rounding_is_not_tried_where_it_is_inflated_or_saves_nothing(truth):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(900, 512, generator=generator)
    assert InputHessian(truth.hessian_of(inputs).float()).damped(0.01).bfloat16_helps
    assert not InputHessian(truth.hessian_of(inputs[:, :511]).float()).damped(0.01).bfloat16_helps
    for pairs, helps in ((4, True), (5, False)):
        inputs[:, :pairs] = inputs[:, -pairs:] + 0.02 * inputs[:, :pairs]
        damped = InputHessian(truth.hessian_of(inputs).float()).damped(1e-4)
        assert damped.bfloat16_helps == helps
        assert damped.delicate.tolist() == [*range(4), *range(508, 512)] or not helps


def massive(inputs, columns, scale):
    """Return inputs (tokens, features) whose first token is huge in some features.

    As in the second block of many models: one token, with the same few massive activations. Of such
    features each explains the others, but for what the other tokens differ.
    """
    inputs = inputs.double().clone()
    inputs[0, columns] = scale * torch.linspace(1, 2, len(columns), dtype=torch.float64)
    return inputs


def test_delicate_columns_are_multiplied_in_full(problem, truth):
    _, inputs = problem(rows=2, columns=96)
    matrix = truth.damped(truth.hessian_of(massive(inputs, [5, 40, 41], 1e4)))
    left = torch.randn(7, 96, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    left[:, 40] = -left[:, 5] * matrix[5, 5] / matrix[40, 5]  # the two terms cancel
    for dtype, precision in ((torch.float32, 1e-6), (torch.float64, 1e-13)):
        narrow, delicate = matrix.to(dtype), torch.tensor([5, 40, 41])
        found, scale = torch.empty(7, 96, dtype=dtype), left.abs() @ matrix.abs()
        rounded_product(narrow, delicate)(left.to(dtype), found)
        errors = (found.double() - left @ matrix).abs()
        assert float((errors / scale)[:, delicate].max()) < precision
        # Elsewhere only the products with the other columns are rounded.
        others = matrix.clone()
        others[delicate] = 0
        bound = 0.01 * (left.abs() @ others.abs()) + precision * scale
        errors[:, delicate] = 0
        assert bool((errors <= bound).all())
        rounded_product(narrow)(left.to(dtype), found)
        assert float((found.double() - left @ matrix)[:, 5].abs().max()) > 100 * float(errors.max())


@pytest.mark.parametrize("are_there", [True, False])
@pytest.mark.parametrize("arguments", [{"pattern": (2, 4)}, {"sparsity": 0.6}])
def test_massive_activations_are_solved_in_float64_at_the_end_alone(
    problem, truth, monkeypatch, arguments, are_there
):
    weight, inputs = problem(rows=16, columns=128, seed=6)
    hessian = truth.hessian_of(massive(inputs, [5, 40], 1e3))
    units(monkeypatch, are_there)
    damped = InputHessian(hessian.float()).damped(1e-3)
    assert not damped.float32_suffices
    assert damped.bfloat16_helps
    dtypes, rounds = [], []
    step, descend = ConjugateGradients.step, MaskedRows._descend_rounded

    def recorded(descent, energies):
        dtypes.append(descent._x.dtype)
        step(descent, energies)

    monkeypatch.setattr(ConjugateGradients, "step", recorded)
    monkeypatch.setattr(
        MaskedRows, "_descend_rounded", lambda *given: rounds.append(descend(*given)) or rounds[-1]
    )
    best, _ = truth.algorithm_1(weight, truth.damped(hessian, 1e-3), 16, **arguments)
    given = {"pattern": "2:4"} if "pattern" in arguments else arguments
    solution = prune_weight(weight, hessian.float(), block_size=16, damping=1e-3, **given)
    assert solution.loss <= 1.01 * truth.loss(best, weight, hessian)
    assert true_gap(truth, solution, weight, truth.damped(hessian.float(), 1e-3)) <= 1e-5
    # Float32 chooses the mask; float64 solves for it, by rounded products first.
    assert dtypes == sorted(dtypes, key=[torch.float32, torch.float64].index)
    assert set(dtypes) == {torch.float32, torch.float64}
    assert (len(rounds) > 0 and rounds[0] > 0) == are_there


@pytest.mark.parametrize("arguments", [{"pattern": "2:4"}, {"sparsity": 0.6}, {"sparsity": 0.97}])
@pytest.mark.parametrize("both", [False, True])
def test_slow_iterations_end_in_another_preconditioner_or_a_direct_solve(
    problem, truth, monkeypatch, arguments, both
):
    weight, inputs = problem(rows=16, columns=96)
    hessian = truth.hessian_of(inputs).float()
    generator = torch.Generator().manual_seed(0)

    def useless(model, kept):
        poor = torch.exp(6 * torch.randn(kept.shape[1], generator=generator)).to(kept.dtype)
        return lambda gradient, z, work: torch.mul(gradient, kept * poor, out=z)

    monkeypatch.setattr(LowRankModel, "on", useless)
    if both:
        monkeypatch.setattr(
            "mrp_lightning.solver.masked_rows.InverseOnKept",
            lambda inverse, kept: useless(None, kept),
        )
    solution = prune_weight(weight, hessian, block_size=None, **arguments)
    assert solution.gap <= 1e-6
    assert solution.iterations <= 200
    gap = true_gap(truth, solution, weight, truth.damped(hessian))
    assert gap <= 1e-6
    assert solution.gap >= gap - 1e-8


@given(
    rows=st.integers(1, 6),
    groups=st.integers(1, 8),
    tokens=st.integers(1, 60),
    seed=st.integers(0, 2**20),
    sparsity=st.floats(0.05, 0.95),
    block=st.sampled_from([4, 12, None]),
    damping=st.sampled_from([1e-4, 0.01, 1.0]),
    method=st.sampled_from(["SM", "MM", "wanda+M"]),
)
@example(  # a residual so small that its own rounding matters
    rows=1, groups=1, tokens=1, seed=116997, sparsity=0.5, block=4, damping=1e-4, method="wanda+M"
)
@example(  # a bound that is many times the preconditioner's energy
    rows=2, groups=8, tokens=1, seed=2950, sparsity=0.75, block=4, damping=0.01, method="wanda+M"
)
@example(  # slow modes hold the bound up, well above what rounding allows
    rows=1,
    groups=4,
    tokens=2,
    seed=1021004,
    sparsity=0.2921396651949033,
    block=4,
    damping=1e-4,
    method="wanda+M",
)
@pytest.mark.filterwarnings("ignore::mrp_lightning.errors.NumericalWarning")  # see `rounding`
def test_any_problem_ends_at_its_optimum(
    problem, truth, rows, groups, tokens, seed, sparsity, block, damping, method
):
    weight, inputs = problem(rows=rows, columns=4 * groups, tokens=tokens, seed=seed)
    hessian = truth.hessian_of(inputs).float()
    arguments = {"pattern": "2:4"} if method == "MM" else {"sparsity": sparsity}
    solution = prune_weight(
        weight, hessian, method=method, block_size=block, damping=damping, **arguments
    )
    matrix = hessian.double() + solution.damping_used * torch.eye(4 * groups).double()
    if solution.pruned.any():
        lowest = truth.loss(truth.exact_optimum(weight, matrix, solution.pruned), weight, matrix)
        found = truth.loss(solution.weight, weight, matrix)
        # The first float32 rounding of the kept weights is all that may remain.
        rounding = 1e-12 * truth.loss(weight * 0, weight, matrix)
        assert found <= lowest * (1 + 1e-6) + rounding
        assert found <= lowest * (1 + solution.gap + 1e-8) + rounding
