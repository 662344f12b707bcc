import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrp_lightning.errors import PatternError
from mrp_lightning.solver.patterns import SemiStructured, Unstructured, lowest, make_pattern


def test_exactly_one_of_the_two_arguments_is_needed():
    with pytest.raises(PatternError, match="exactly one of `sparsity` and `pattern`; got neither"):
        make_pattern(None, None)
    with pytest.raises(PatternError, match="got sparsity=0.5 and pattern='2:4'"):
        make_pattern(0.5, "2:4")


@pytest.mark.parametrize("value", [0, 1, 0.0, 1.0, -0.1, 1.5, 50, float("nan"), "0.5", True, "2:4"])
def test_a_sparsity_outside_of_0_and_1_is_refused(value):
    with pytest.raises(PatternError, match="`sparsity` must be a number between 0 and 1"):
        make_pattern(value, None)


@pytest.mark.parametrize("value", ["2:", ":4", "2/4", "a:b", "", "2:4:8", "-1:4", "2.0:4", "50%"])
def test_a_malformed_pattern_is_refused(value):
    with pytest.raises(PatternError, match='`pattern` must be "N:M"'):
        make_pattern(None, value)


@pytest.mark.parametrize("value", ["4:4", "0:4", "5:4", "0:0"])
def test_a_pattern_that_removes_nothing_or_all_is_refused(value):
    with pytest.raises(PatternError, match="1 ≤ N < M"):
        make_pattern(None, value)


@pytest.mark.parametrize(
    ("value", "written"), [(124, "2:4"), (248, "4:8"), (64, "1:4"), ("124", "2:4"), (2.5, "2:4")]
)
def test_an_unquoted_yaml_pattern_is_told_apart(value, written):
    with pytest.raises(PatternError, match=f'write `pattern: "{written}"`'):
        make_pattern(None, value)


def test_patterns_print_as_users_write_them():
    assert str(make_pattern(0.5, None)) == "50%"
    assert str(make_pattern(0.625, None)) == "62.5%"
    assert str(make_pattern(None, " 2:4 ")) == "2:4"
    assert make_pattern(None, "1:4").sparsity == 0.75
    assert make_pattern(None, "2:4") == SemiStructured(2, 4)


def test_divides():
    assert SemiStructured(2, 4).divides(8)
    assert not SemiStructured(2, 4).divides(6)
    assert Unstructured(0.5).divides(7)


def test_holds_for_a_zero_map():
    pattern = SemiStructured(2, 4)
    assert pattern.holds(torch.tensor([[True, True, False, False], [True, True, True, False]]))
    assert not pattern.holds(torch.tensor([[True, False, False, False] + [True] * 4]))
    assert not pattern.holds(torch.ones(2, 6, dtype=torch.bool))
    assert Unstructured(0.5).holds(torch.tensor([[True, True, False, False]]))
    assert not Unstructured(0.5).holds(torch.tensor([[True, False, False, False]]))


# Few distinct scores, so that ties abound.
scores = st.lists(st.sampled_from([-1.0, 0.0, 0.5, 0.5000001, 2.0, 3e30]), min_size=1, max_size=60)


@given(scores, st.data())
def test_lowest_is_a_stable_sort(values, data):
    count = data.draw(st.integers(0, len(values)))
    expected = sorted(range(len(values)), key=lambda i: (values[i], i))[:count]
    chosen = lowest(torch.tensor(values, dtype=torch.float64), count)
    assert chosen.nonzero().flatten().tolist() == sorted(expected)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(2, 8), st.data())
def test_groups_are_ranked_stably(rows, groups, group, data):
    kept = data.draw(st.integers(1, group - 1))
    width = groups * group
    values = data.draw(
        st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=rows * width, max_size=rows * width)
    )
    table = torch.tensor(values).view(rows, width)
    pruned = SemiStructured(kept, group).select(table, 0)
    for row in range(rows):
        for first in range(0, width, group):
            members = table[row, first : first + group].tolist()
            expected = sorted(range(group), key=lambda i: (members[i], i))[: group - kept]
            found = pruned[row, first : first + group].nonzero().flatten().tolist()
            assert found == sorted(expected)


@pytest.mark.parametrize("group", [127, 128, 300])
def test_long_groups_are_ranked_too(group):
    # More places than a signed byte has numbers.
    scores = torch.arange(2.0 * group).flip(0).view(2, group)
    pruned = SemiStructured(kept=1, group=group).select(scores, 0)
    assert pruned.sum() == 2 * (group - 1)
    assert not pruned[:, 0].any()


@given(
    st.floats(0.001, 0.999), st.integers(1, 9), st.lists(st.integers(1, 12), min_size=1, max_size=6)
)
def test_unstructured_blocks_add_up_to_the_budget(sparsity, rows, widths):
    pattern, done, total = Unstructured(sparsity), 0, 0
    for width in widths:
        total += int(pattern.select(torch.rand(rows, width), done).sum())
        done += width
        assert total == int(sparsity * rows * done + 0.5)
