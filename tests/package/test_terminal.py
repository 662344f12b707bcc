"""Names of files, models and layers reach the terminal as they are, whatever rich would read."""

import io

import pytest
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from rich.table import Table

from mrp_lightning.loop.progress import ProgressReporter
from mrp_lightning.terminal import Console


@pytest.mark.parametrize(
    "name", ["résultat [x] %d", "b[/r] x", "[bold]a[/]", ":smile: 12", "a\\[b"]
)
def test_names_are_printed_as_they_are(name):
    table = Table(title=name)
    table.add_column(name)
    table.add_row(name)
    stream = io.StringIO()
    console = Console(file=stream, width=80)
    console.print(name)
    console.print(table)
    assert stream.getvalue().count(name) == 4


def test_lightnings_bar_shows_the_name_of_a_layer_as_it_is(capsys):
    bar = RichProgressBar()
    trainer = Trainer(accelerator="cpu", logger=False, callbacks=[bar])
    bar.on_predict_start(trainer, LightningModule())
    reporter = ProgressReporter(trainer)
    with reporter.bar(2, "pruning [x]"):
        bar.progress.refresh()
        reporter.show(1, "experts[/0]")
        bar.progress.refresh()
    bar.teardown(trainer, LightningModule(), "predict")
    assert "experts[/0]" in capsys.readouterr().out
