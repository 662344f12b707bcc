"""What the walk logs of a trainer's layers."""

from types import SimpleNamespace

import pytest
import torch

from mrp_lightning.loop.progress import ProgressReporter, PruningProgress
from mrp_lightning.pruning.job import Progress
from mrp_lightning.records.block_result import BlockResult, LayerResult
from mrp_lightning.records.rows import LayerReport


def test_layers_are_logged_each_once_with_its_place():
    logged = []
    rows = [LayerReport(name=str(i), shape=(1, 1), loss=float(i)) for i in range(100)]
    logger = SimpleNamespace(
        log_metrics=lambda metrics, step: logged.append((step, metrics.get("prune_layer/loss"))),
        save=lambda: None,
    )
    trainer = SimpleNamespace(loggers=[logger], progress_bar_callback=None, is_global_zero=True)
    listener = PruningProgress(2, torch.device("cpu"), ProgressReporter(trainer))
    dense = LayerReport(name="router", shape=(1, 1), skipped="it routes tokens")
    for k, of_block in enumerate((rows[:40], rows[40:])):
        listener.block(BlockResult(str(k), tuple(map(LayerResult, [dense, *of_block]))))
        listener.finished(k, of_block, resumed=False)
    assert [entry for entry in logged if entry[1] is not None] == [(i, i) for i in range(100)]


@pytest.mark.parametrize(
    ("task", "brief"),
    [
        ("model.layers.11.mlp.down_proj, columns 8192/11008", "down_proj"),
        ("transformer.h.3.attn.c_attn", "c_attn"),
        ("model.layers.0, inputs 31/32", "inputs 31/32"),
        ("model.layers.3.mlp.experts.17.up_proj, iteration 4", "up_proj"),
        ("lm_head", "lm_head"),
    ],
)
def test_the_text_of_the_bar_fits_80_columns(task, brief, monkeypatch):
    shown: list[str] = []
    trainer = SimpleNamespace(loggers=[], progress_bar_callback=None)
    monkeypatch.setattr(ProgressReporter, "show", lambda _, done, text: shown.append(text))
    PruningProgress(32, torch.device("cpu"), ProgressReporter(trainer)).progress(
        Progress(12, 32, task)
    )
    assert shown == [f"block 12/32 · {brief}"]
    assert len(shown[0]) <= 28
