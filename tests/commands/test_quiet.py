"""Importing the package leaves other packages' messages alone; a command silences some of them."""

import logging
import subprocess
import sys
import warnings

import lightning.pytorch as lightning
import pytest
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning_utilities.core import rank_zero

from mrp_lightning import Trainer
from mrp_lightning.environment import quiet_lightning, without_noise

_ASK = """
import logging, pkgutil, sys, warnings
from contextlib import suppress
from importlib import import_module
import lightning.pytorch, transformers

OURS = ("mrp_ground", "mrp_sparse", "mrp_lightning", "export", "callbacks")

def watch(owner, name):
    method = getattr(owner, name)
    def watched(*args, **kwargs):
        caller = sys._getframe(1).f_globals["__name__"]
        if caller.partition(".")[0] in OURS:
            print(caller, name, args)
        return method(*args, **kwargs)
    setattr(owner, name, watched)

for name in ("filterwarnings", "simplefilter"):
    watch(warnings, name)
for name in ("setLevel", "addFilter", "addHandler", "removeHandler"):
    watch(logging.Logger, name)
shown_by = warnings.showwarning, warnings.formatwarning
number = 0
for package in OURS:
    for module in pkgutil.walk_packages(import_module(package).__path__, f"{package}."):
        if not module.name.endswith("__main__"):
            with suppress(ImportError):  # vLLM is not installed everywhere
                import_module(module.name)
                number += 1
assert shown_by == (warnings.showwarning, warnings.formatwarning)
assert number > 150, number
"""


def test_importing_changes_no_other_packages_messages():
    asked = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True)
    assert (asked.returncode, asked.stdout) == (0, ""), asked.stderr


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
