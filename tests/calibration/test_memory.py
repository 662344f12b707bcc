"""How much memory there was need of, and what is said of a lack of it."""

import platform
import re
from pathlib import Path

import pytest
import torch

from mrp_lightning.calibration.offload import explained_out_of_memory
from mrp_lightning.devices import peak_rss, return_freed_memory
from mrp_lightning.errors import OutOfMemoryError


@pytest.mark.parametrize(
    ("device", "offload", "message"),
    [
        ("cuda", False, r"on cuda. Set `offload: true`.* Lower `batch_size` or"),
        ("cuda", True, r"on cuda. Lower `batch_size` or .*`offload` is on already"),
        ("cpu", False, r"on cpu. Lower `batch_size` or .*`dtype: bfloat16`"),
    ],
)
def test_the_next_step_is_one_that_helps(device, offload, message):
    with (
        pytest.raises(OutOfMemoryError, match=message),
        explained_out_of_memory(torch.device(device), offload=offload),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), ValueError("out of memory")])
def test_other_errors_are_as_they_were(error):
    with (
        pytest.raises(type(error)) as caught,
        explained_out_of_memory(torch.device("cpu"), offload=False),
    ):
        raise error
    assert caught.value is error


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_the_peak_is_that_of_the_kernel():
    def of_the_kernel() -> int:
        status = Path("/proc/self/status").read_text()
        return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])

    assert peak_rss() == pytest.approx(of_the_kernel(), rel=0.05)  # it counts in batches of pages


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries do it themselves")
def test_memory_between_pieces_in_use_is_returned():
    def resident() -> int:
        return 4096 * int(Path("/proc/self/statm").read_text().split()[1])

    # Below the least size for which glibc asks the system for memory of its own.
    pieces = [torch.ones(2**14) for _ in range(2000)]
    in_use = pieces[::100] + pieces[-1:]
    del pieces
    before = resident()
    return_freed_memory()
    assert before - resident() > 60e6  # of 131 MB
    assert all(bool((piece == 1).all()) for piece in in_use)
