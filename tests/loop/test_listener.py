"""What the walk logs of a trainer's layers."""

from types import SimpleNamespace

import pytest

from mrp_lightning.loop.progress import ProgressReporter, PruningProgress
from mrp_lightning.pruning.job import Progress
from mrp_lightning.records.report import LayerReport, PruningReport


def test_many_layers_are_logged_each_once_with_its_place():
    compared, logged = [], []

    class Row(LayerReport):
        def __eq__(self, other: object) -> bool:
            compared.append(other)
            return self is other

    pruned = [Row(name=str(i), shape=(1, 1), loss=float(i)) for i in range(100)]
    logger = SimpleNamespace(
        log_metrics=lambda metrics, step: logged.append((step, metrics["prune_layer/loss"])),
        save=lambda: None,
    )
    trainer = SimpleNamespace(loggers=[logger], progress_bar_callback=None)
    job = SimpleNamespace(report=SimpleNamespace(pruned=pruned))
    PruningProgress(job, ProgressReporter(trainer))._log_layers(pruned[40:])
    assert logged == [(i, float(i)) for i in range(40, 100)]
    assert len(compared) < 100  # as many as the layers of a model, not of them squared


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
    job = SimpleNamespace(report=PruningReport({}), steps=32)
    PruningProgress(job, ProgressReporter(trainer)).progress(Progress(12, 32, task, 7))
    assert shown == [f"block 12/32 · {brief}"]
    assert len(shown[0]) <= 28
