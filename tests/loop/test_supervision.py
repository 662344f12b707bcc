"""Processes without a trainer, which are started in no time: what they exchange, and their end."""

import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

from mrp_lightning.errors import NumericalWarning
from mrp_lightning.loop.supervision import one_voice
from mrp_lightning.processes import Processes

ROOT = Path(__file__).parents[2]


def test_three_processes_exchange_and_end_together(tmp_path):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    worker = [sys.executable, str(ROOT / "tests" / "gloo_worker.py")]
    started = [
        subprocess.Popen(
            [*worker, str(rank), "3", str(tmp_path)], env=env, stderr=subprocess.PIPE, text=True
        )
        for rank in range(3)
    ]
    errors = [process.communicate(timeout=120)[1] for process in started]
    assert all((tmp_path / f"done-{rank}").exists() for rank in range(3)), errors
    assert [process.returncode for process in started] == [1, 1, 1]
    for rank in (0, 1):
        said = f"Process {rank} of 3 ends: process 2 failed: ValueError: the reason."
        assert said in errors[rank]


def test_one_process_speaks_for_all(caplog, recwarn):
    log = logging.getLogger("mrp_lightning.test")
    with caplog.at_level("INFO", "mrp_lightning"):
        for rank in (0, 1):
            with one_voice(Processes(rank, 2)):
                log.warning("from %d", rank)
                log.error("error of %d", rank)
                warnings.warn(f"warning of {rank}", NumericalWarning, stacklevel=1)
        log.info("afterwards")
    said = [record.message for record in caplog.records]
    assert said == ["from 0", "error of 0", "error of 1", "afterwards"]
    assert [str(w.message) for w in recwarn] == ["warning of 0"]
