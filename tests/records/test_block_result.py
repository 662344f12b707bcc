"""Results are values: the report is made of them, wherever they come from."""

import dataclasses

import pytest
import torch
from slow_pruning import Dying, Killed, prune_model

from mrp_lightning import BlockResult, LayerReport, PruningReport
from mrp_lightning.journal.journal import Journal
from mrp_lightning.records.block_result import LayerResult
from mrp_lightning.solver.problem import Quality
from mrp_lightning.solver.recipe import Recipe

TUNED = {"target": "dense", "tuning": True, "grid": "q4_0"}
OPTIONS = {"pattern": None, "targets": ["q_proj", "o_proj"], "beyond": TUNED}


def timeless(report: PruningReport) -> list[object]:
    rows = [*report.layers, *report.blocks]
    return [dataclasses.replace(row, seconds=None) for row in rows]


@torch.no_grad()
def test_a_report_is_the_same_fold_of_results_from_memory_and_from_a_journal(
    build, batches, tmp_path
):
    made: list[BlockResult] = []

    class Keeping(Dying):
        def write(self, step, result):
            made.append(result)
            super().write(step, result)

    about = {"config": {"method": "SM"}, "versions": {}, "provenance": {}, "model_weights": 1}
    about |= {"blocks": 3}
    with pytest.raises(Killed), Keeping.open(tmp_path / "out", {}, about=about) as journal:
        prune_model(build("llama"), batches, journal=journal, **OPTIONS)
    with Journal.open(tmp_path / "out", {}) as again:
        restored = [again.read(step) for step in range(2)]
    of_memory, of_journal = (PruningReport.of(x, about["config"]) for x in (made, restored))
    assert timeless(of_memory) == timeless(of_journal)
    assert len(of_memory.layers) == 4
    assert [row.name for row in of_memory.blocks] == ["model.layers.0", "model.layers.1"]
    for result, other in zip(made, restored, strict=True):
        assert result.grid.keys() == other.grid.keys() == {row.name for row in result.rows}
        for name, parameters in result.grid.items():
            assert torch.equal(parameters.scales, other.grid[name].scales)


def test_results_cannot_be_changed():
    result = BlockResult("block", (LayerResult(LayerReport.left_dense("a", (2, 4), "why")),))
    for value, name in (
        (result, "row"),
        (result.layers[0], "grid"),
        (result.layers[0].row, "loss"),
    ):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, None)


def test_a_row_says_what_its_solution_and_recipe_say():
    recipe = Recipe.of(method="SM", pattern="2:4", damping=0.01, bits=4)
    quality = Quality(loss=3.0, damping_used=0.2, damping_ratio=0.1, iterations=7, zeros_loss=1.0)
    row = LayerReport.of(quality, recipe, name="a", shape=(2, 4), energy=12.0, tokens=5)
    assert (row.method, row.relative_loss, row.grid.grid_loss, row.tokens) == ("SM", 0.25, 2.0, 5)
    assert row.raised_damping == 0.1
    silent = LayerReport.of(quality, recipe, name="a", shape=(2, 4), energy=0.0, tokens=5)
    assert silent.relative_loss == 0.0
