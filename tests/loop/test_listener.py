"""What the walk logs of a trainer's layers."""

from types import SimpleNamespace

from mrp_lightning.loop.listener import TrainerListener
from mrp_lightning.records.report import PruningReport
from mrp_lightning.records.rows import LayerReport


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
    listener = TrainerListener(trainer, 1, PruningReport({}), lambda *_: None)
    listener.log_layers(pruned, pruned[40:])
    assert logged == [(i, float(i)) for i in range(40, 100)]
    assert len(compared) < 100  # as many as the layers of a model, not of them squared
