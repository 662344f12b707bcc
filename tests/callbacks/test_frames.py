"""Few of our own calls lie between Lightning and the choice of the weights."""

import traceback

import pytest

from mrp_lightning import Trainer
from mrp_lightning.callbacks import MRPCallback
from mrp_lightning.solver.problem import Problem


@pytest.mark.parametrize("method", ["SM", "JM"])
def test_at_most_twelve_calls_lead_from_the_callback_to_a_mask(
    method, llama, loader, quiet, monkeypatch
):
    stacks, select = [], Problem.select

    def seen(problem, scores, start):
        stacks.append([f for f in traceback.extract_stack() if "/mrp_lightning/" in f.filename])
        return select(problem, scores, start)

    monkeypatch.setattr(Problem, "select", seen)
    Trainer(**quiet).predict(llama(), loader, callbacks=[MRPCallback(pattern="2:4", method=method)])
    # The first choice of the first layer; `Problem.select` itself, replaced above, is one more.
    names = [frame.name for frame in stacks[0]]
    assert len(names[names.index("on_predict_epoch_end") :]) + 1 <= 12, names
