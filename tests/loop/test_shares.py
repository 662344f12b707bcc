"""Sharing windows out to processes."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn
from thread_processes import together

from mrp_lightning.errors import DataError
from mrp_lightning.loop.capture import Step
from mrp_lightning.loop.repeats import warn_of_repeats
from mrp_lightning.loop.shares import one_share_each


def trainer(rank: int, size: int, fn: TrainerFn = TrainerFn.TESTING) -> SimpleNamespace:
    return SimpleNamespace(global_rank=rank, world_size=size, state=SimpleNamespace(fn=fn))


def test_each_window_is_in_one_share():
    shares = [one_share_each(range(7), trainer(rank, 3)) for rank in range(3)]
    assert sorted(i for share in shares for i in share) == list(range(7))
    assert one_share_each(range(7), trainer(0, 1)) is None
    assert one_share_each(range(7), trainer(0, 3, TrainerFn.FITTING)) is None


def test_fewer_windows_than_processes():
    with pytest.raises(DataError, match="3 processes need at least as many windows.*got 2"):
        one_share_each(range(2), trainer(0, 3))


@pytest.mark.parametrize(("starts", "repeated"), [((0, 4), 0), ((0, 3), 1)])
def test_windows_that_two_processes_have(starts, repeated, caplog):
    windows = torch.arange(40).view(8, 5)

    def run(processes):
        start = starts[processes.rank]
        steps = [
            Step((windows[start : start + 2],), {}),
            Step((windows[start + 2 : start + 4],), {}),
        ]
        warn_of_repeats(steps, processes)

    together(2, run)
    said = [record.message for record in caplog.records]
    assert all("1 of 7 calibration windows" in message for message in said)
    assert len(said) == 2 * repeated  # `one_voice` lets one of them pass
