"""The Trainer's arguments."""

import pytest
from lightning.pytorch import Callback
from torch import nn

from mrp_lightning import Trainer

OTHER = {"__module__": "pytorch_lightning.core"}
"""What makes a class one of the other package, which need not be installed here."""


@pytest.fixture
def trainer() -> Trainer:
    return Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)


class Mine(type("LightningModule", (nn.Module,), OTHER)):
    """A user's module, of a base class of the other package."""


def test_a_module_of_the_other_lightning_is_refused(trainer):
    with pytest.raises(
        TypeError, match=r"`model`.*Mine of `pytorch_lightning`.*lightning\.pytorch"
    ):
        trainer.predict(Mine())


def test_data_of_the_other_lightning_is_refused(trainer):
    data = type("Data", (), OTHER)()
    for arguments in ({"datamodule": data}, {"dataloaders": data}):
        with pytest.raises(TypeError, match=r"Data of `pytorch_lightning`.*lightning\.pytorch"):
            trainer.predict(nn.Linear(2, 2), **arguments)


@pytest.mark.parametrize("alone", [True, False])
def test_callbacks_of_the_other_lightning_are_refused(alone, trainer):
    other = type("EarlyStopping", (), OTHER)()
    given = other if alone else [Callback(), other]
    with pytest.raises(TypeError, match="Got EarlyStopping of `pytorch_lightning`"):
        Trainer(accelerator="cpu", callbacks=given)
    with pytest.raises(TypeError, match="Got EarlyStopping of `pytorch_lightning`"):
        trainer.predict(nn.Linear(2, 2), callbacks=given)


def test_one_callback_is_taken_alone():
    mine = Callback()
    assert mine in Trainer(accelerator="cpu", logger=False, callbacks=mine).callbacks
