"""Several processes that prune one model together, against one process with all of the data."""

import pytest
import torch
from slow_pruning import prune_model
from thread_processes import together

from mrp_lightning.errors import DataError, TargetError
from mrp_lightning.pruning.settings import BlockTuning

BALANCED = {"bits": 4, "group_size": 16, "balance": True}


def prune_together(build, family, batches, size, options):
    """Models and reports of processes that take batches in turn, and of one that takes all."""
    models = [build(family) for _ in range(size)]  # not in threads, which share the random state

    def run(processes):
        model = models[processes.rank]
        mine = batches[processes.rank :: size]
        return model, prune_model(model, mine, processes=processes, **options)

    one = build(family)
    return together(size, run), (one, prune_model(one, batches, **options))


def assert_alike(found, expected):
    """Same bits in all processes, and up to rounding and near-ties those of one process."""
    (model, report), (one, of_one) = found[0], expected
    for other, their_report in found:
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b)
        assert [(x.name, x.loss, x.target) for x in their_report.layers] == [
            (x.name, x.loss, x.target) for x in report.layers
        ]
    theirs = {row.name: row for row in of_one.layers}
    assert theirs.keys() == {row.name for row in report.layers}
    for n, row in enumerate(report.layers):
        same = theirs[row.name]
        assert (row.tokens, row.skipped) == (same.tokens, same.skipped)
        assert (row.target is None) == (same.target is None)
        if row.target is not None:
            assert row.target.own == same.target.own
        assert row.shared_hessian == pytest.approx(same.shared_hessian)
        if row.skipped is None:
            # Behind the first layers all depends on which near-ties went otherwise.
            exact = 1e-4 if n < 4 else 0.03 * same.relative_loss
            assert row.relative_loss == pytest.approx(same.relative_loss, abs=exact)
    for a, b in zip(model.parameters(), one.parameters(), strict=True):
        assert ((a == 0) != (b == 0)).float().mean() < 0.03


@pytest.mark.parametrize(
    ("family", "size", "options"),
    [
        ("llama", 4, {"beyond": {"target": "dense"}}),  # one process has no batch
        ("mixtral", 2, {"beyond": {"target": "dense"}}),  # experts that not both call
        ("mamba", 2, {}),  # a weight that is used without calling its module
        ("gemma3n_text", 2, {}),  # full re-runs
        (
            "llama",
            2,
            {"pattern": None, "sparsity": 0.5, "targets": ["up_proj", "lm_head"]},  # one outside
        ),
        ("llama", 2, {"pattern": None, "beyond": BALANCED}),
    ],
)
@torch.no_grad()
def test_gives_what_one_process_gives(family, size, options, build, batches):
    found, expected = prune_together(build, family, batches, size, options)
    assert_alike(found, expected)
    assert found[0][1].config["walk"] == expected[1].config["walk"]


def windows(batches):
    return [{key: value[i : i + 1] for key, value in b.items()} for b in batches for i in (0, 1)]


@torch.no_grad()
def test_tuning_takes_the_steps_of_one_process(build, batches):
    # All windows are one step, so nothing depends on which of them stand together in a step.
    tuning = BlockTuning(epochs=4, learning_rate=2e-3, batch_size=100, held_out=0.3)
    options = {
        "pattern": None,
        "sparsity": 0.5,
        "beyond": {"allocation": "output", "tuning": tuning},
    }
    found, expected = prune_together(build, "llama", windows(batches), 4, options)
    assert_alike(found, expected)
    of_one = {row.name: row for row in expected[1].blocks}
    for _, report in found:
        for row in report.blocks:
            same = of_one[row.name]
            assert row.epoch == same.epoch
            assert row.sparsity == pytest.approx(same.sparsity, abs=1e-3)
            assert row.error_before == pytest.approx(same.error_before, rel=0.03)
            assert row.error_after == pytest.approx(same.error_after, rel=0.03)
        assert any(row.epoch for row in report.blocks)


@torch.no_grad()
def test_all_processes_refuse_what_one_cannot_do(build, batches):
    other = build("llama")
    other.model.layers = other.model.layers[:-1]
    models = [build("llama"), other]
    with pytest.raises(TargetError, match="first batches of the processes run other blocks"):
        together(2, lambda p: prune_model(models[p.rank], batches, processes=p))
    few = windows(batches)[:1]
    with pytest.raises(DataError, match="at least 2, got 1"):
        prune_together(build, "llama", few, 2, {"beyond": {"tuning": BlockTuning()}})
