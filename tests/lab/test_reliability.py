"""The trials of reliability find a fault that is planted, and none where there is none."""

import os
import random
import shutil
import signal
import time
from collections import deque
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

pytest.importorskip("gguf")
pytest.importorskip("jsonargparse")
if shutil.which("strace") is None:
    pytest.skip("system calls are recorded by strace", allow_module_level=True)

from trouble import disk, kills, power, runs

from export.gguf import file as gguf_file
from mrp_lightning.storage import files, outputs


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """A GGUF file takes the place of an older one."""
    inputs = tmp_path_factory.mktemp("inputs")
    runs.import_all()
    runs.write_inputs(inputs)
    return runs.commands(inputs)["gguf --overwrite"]


def last(steps):
    (step,) = deque(steps, maxlen=1)
    return step


def test_a_file_that_is_not_flushed_is_lost_in_a_power_cut(command, monkeypatch):
    cuts = last(power.cut(command, 100, random.Random(0), rerun=False))
    assert cuts.states.keys() == {"old", "new"}
    assert not cuts.faults
    for module in (files, gguf_file):
        monkeypatch.setattr(module, "flush", lambda path: None)
    cuts = last(power.cut(command, 100, random.Random(0), rerun=False))
    assert any("neither the old nor the new result" in fault for fault in cuts.faults)


def test_an_error_without_a_file_is_a_fault(command, monkeypatch):
    failures = last(disk.fail(command, 2, random.Random(1)))
    assert failures.refused
    assert not failures.faults
    for module in (files, outputs):
        monkeypatch.setattr(module, "naming", lambda path: nullcontext())
    failures = last(disk.fail(command, 2, random.Random(1)))
    assert any("names no file" in fault for fault in failures.faults)


def test_the_moment_of_a_kill_is_one_of_processor_time(tmp_path):
    child = os.fork()
    if not child:
        time.sleep(0.5)  # as beside other work
        while True:
            pass
    end = runs.finish(child, tmp_path / "output.txt", 0.2)
    assert end.status == -signal.SIGKILL
    assert end.cpu_seconds >= 0.2


@pytest.mark.parametrize(("longest", "hangs"), [(0.1, True), (runs.LIMIT, False)])
def test_a_command_that_takes_longer_than_it_may_hangs(longest, hangs, tmp_path):
    child = os.fork()
    if not child:
        time.sleep(0.5)  # as a compiler that waits for other work
        os._exit(0)
    end = runs.finish(child, tmp_path / "output.txt", longest=longest)
    assert (end.status != 0) == ("it hangs" in end.output) == hangs


def test_a_result_that_is_written_in_its_place_is_half_there_after_a_kill(command, monkeypatch):
    assert not last(kills.kill(command, 1, random.Random(0))).faults

    def write(staging, path):
        path.write_bytes(staging.read_bytes()[:1000])
        os.kill(os.getpid(), 9)

    start = runs.start

    def killed(*arguments):
        with monkeypatch.context() as patch:
            patch.setattr(outputs, "move_durably", write)
            return start(*arguments)

    monkeypatch.setattr(kills, "start", killed)
    late = SimpleNamespace(uniform=lambda *_: 100.0)  # it has died by then
    assert any("half a result" in fault for fault in last(kills.kill(command, 1, late)).faults)
