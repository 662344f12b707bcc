"""A command silences some messages of other packages, and none after it."""

import logging
import warnings

import lightning.pytorch as lightning
import pytest
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning_utilities.core import rank_zero

from mrp_lightning import Trainer
from mrp_lightning.environment import quiet_lightning, without_noise


@pytest.mark.parametrize("context", [without_noise, quiet_lightning])
def test_noise_is_silenced_in_a_command_and_shown_after_it(context, caplog):
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")

    def say():
        logger.warning("GPU available: %s", False)
        logger.warning("GPU available: %s", True)
        with warnings.catch_warnings(record=True) as seen:
            warnings.warn("The 'x' does not have many workers which", stacklevel=1)
            warnings.warn("another", stacklevel=1)
        messages = [*caplog.messages, *(str(each.message) for each in seen)]
        caplog.clear()
        return messages

    before, levels = (
        say(),
        [logging.getLogger(f"lightning.{x}").level for x in ("pytorch", "fabric")],
    )
    with context():
        assert say() == ["GPU available: True", "another"]
    assert say() == before
    assert len(before) == 4
    assert levels == [logging.getLogger(f"lightning.{x}").level for x in ("pytorch", "fabric")]


def test_a_trainer_of_ours_names_no_device_that_is_absent_and_shows_a_bar_on_a_terminal_alone(
    caplog, monkeypatch
):
    caplog.set_level(logging.INFO, rank_zero.log.name)
    for is_terminal in (False, True):
        monkeypatch.setattr("sys.stdout.isatty", lambda is_terminal=is_terminal: is_terminal)
        trainer = Trainer(accelerator="cpu")
        assert (trainer.progress_bar_callback is not None) == is_terminal
        assert Trainer(accelerator="cpu", enable_progress_bar=True).progress_bar_callback
        assert Trainer(accelerator="cpu", callbacks=TQDMProgressBar()).progress_bar_callback
    assert "available: False" not in caplog.text
    lightning.Trainer(accelerator="cpu", logger=False)
    assert "TPU available: False" in caplog.text
