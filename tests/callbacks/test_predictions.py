"""Whoever takes predictions is named before a run that has none, and gets them in the next."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter, LambdaCallback, Timer

from callbacks import MRPCallback
from mrp_lightning import CausalLM, Trainer


class Writer(BasePredictionWriter):
    def __init__(self):
        super().__init__("batch_and_epoch")
        self.shapes, self.indices = [], None

    def write_on_batch_end(self, trainer, module, prediction, *_):
        self.shapes.append(tuple(prediction.shape))

    def write_on_epoch_end(self, trainer, module, predictions, batch_indices):
        self.indices = batch_indices


class Reader(pl.Callback):
    def on_predict_batch_end(self, trainer, module, outputs, batch, *_):
        self.last = outputs


class Judge(CausalLM):
    def on_predict_batch_end(self, outputs, *_):
        self.last = outputs


def test_a_writer_is_warned_of_and_gets_the_predictions_of_the_next_run(
    llama, loader, quiet, caplog
):
    writer, module, prune = Writer(), CausalLM(llama()), MRPCallback(pattern="2:4")
    trainer = Trainer(callbacks=[writer, prune], **quiet)
    trainer.predict(module, loader)
    assert "Writer will be given no predictions" in caplog.text
    assert "with MRPCallback, this `predict` prunes" in caplog.text
    assert {*writer.shapes} == {(0,)}
    writer.shapes.clear()
    caplog.clear()
    trainer.predict(module, loader)
    assert "no predictions" not in caplog.text
    batch = next(iter(loader))
    assert writer.shapes == [tuple(module.predict_step(batch, 0).shape)] * len(loader)
    assert len(writer.indices[0]) == len(loader)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda llama: (CausalLM(llama()), [Reader(), Writer()]), "Reader and Writer will"),
        (lambda llama: (Judge(llama()), []), "Judge will"),
        (
            lambda llama: (
                CausalLM(llama()),
                [LambdaCallback(on_predict_batch_end=lambda *_: None)],
            ),
            "LambdaCallback will",
        ),
        (lambda llama: (CausalLM(llama()), [Timer()]), None),
    ],
)
def test_all_who_take_predictions_are_named_before_the_data_is_read(
    make, names, llama, quiet, caplog
):
    class ReadError(Exception): ...

    def read():
        raise ReadError
        yield torch.zeros(1)

    module, callbacks = make(llama)
    with pytest.raises(ReadError):
        Trainer(callbacks=[*callbacks, MRPCallback(pattern="2:4")], **quiet).predict(module, read())
    assert (f"{names} be given no predictions" in caplog.text) == (names is not None)
    assert ("no predictions" in caplog.text) == (names is not None)
