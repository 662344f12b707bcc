"""Several processes: which windows each is given, what they exchange, and how they end."""

import logging
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from lightning.pytorch.trainer.states import TrainerFn
from warm import Piped

from mrp_lightning.errors import DataError, NumericalWarning
from mrp_lightning.loop.distributed import one_share_each, rank_zero_logging
from mrp_lightning.processes import Processes

ROOT = Path(__file__).parents[2]


def trainer(rank: int, size: int, fn: TrainerFn = TrainerFn.TESTING) -> SimpleNamespace:
    return SimpleNamespace(global_rank=rank, world_size=size, state=SimpleNamespace(fn=fn))


def test_each_window_is_in_one_share():
    shares = [one_share_each(range(7), trainer(rank, 3)) for rank in range(3)]
    assert sorted(i for share in shares for i in share) == list(range(7))
    assert one_share_each(range(7), trainer(0, 1)) is None
    assert one_share_each(range(7), trainer(0, 3, TrainerFn.FITTING)) is None
    with pytest.raises(DataError, match="3 processes need at least as many windows.*got 2"):
        one_share_each(range(2), trainer(0, 3))


def test_three_processes_exchange_and_end_together(tmp_path):
    worker = ROOT / "tests" / "gloo_worker.py"
    started = [Piped([worker, rank, 3, tmp_path], {"OMP_NUM_THREADS": "1"}) for rank in range(3)]
    errors = [process.communicate() for process in started]
    assert all((tmp_path / f"done-{rank}").exists() for rank in range(3)), errors
    assert [process.returncode for process in started] == [1, 1, 1]
    for rank in (0, 1):
        said = f"Process {rank} of 3 ends: process 2 failed: ValueError: the reason."
        assert said in errors[rank]


def test_one_process_speaks_for_all(caplog, recwarn):
    log = logging.getLogger("mrp_lightning.test")
    with caplog.at_level("INFO", "mrp_lightning"):
        for rank in (0, 1):
            with rank_zero_logging(Processes(rank, 2)):
                log.warning("from %d", rank)
                log.error("error of %d", rank)
                warnings.warn(f"warning of {rank}", NumericalWarning, stacklevel=1)
        log.info("afterwards")
    said = [record.message for record in caplog.records]
    assert said == ["from 0", "error of 0", "error of 1", "afterwards"]
    assert [str(w.message) for w in recwarn] == ["warning of 0"]
