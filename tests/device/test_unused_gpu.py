"""A build of torch for CUDA that finds no GPU says so, loudly and once."""

import pytest
import torch

from mrp_lightning import Trainer, environment
from mrp_lightning.devices import device_named, warn_of_unused_gpu


@pytest.fixture
def cuda_build(monkeypatch):
    """torch as it comes from PyPI, on a machine whose driver is too old for it."""

    def init():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12040).")

    monkeypatch.setattr(torch.version, "cuda", "13.2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    warn_of_unused_gpu.cache_clear()
    yield
    warn_of_unused_gpu.cache_clear()


def test_it_warns_once_with_the_reason_and_the_next_step(cuda_build, caplog):
    caplog.set_level("WARNING", environment.progress_log.name)
    assert device_named(None) == torch.device("cpu")
    Trainer(enable_progress_bar=False)
    (message,) = [r.message for r in caplog.records if "THE CPU DOES ALL THE WORK" in r.message]
    for part in (
        "CUDA 13.2",
        "driver on your system is too old",
        "580",
        "--gpus all",
        "/whl/cu126",
    ):
        assert part in message


@pytest.mark.parametrize("choice", ["named", "hidden", "CPU build"])
def test_whoever_chose_the_cpu_is_not_warned(choice, cuda_build, monkeypatch, caplog):
    if choice == "hidden":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    if choice == "CPU build":
        monkeypatch.setattr(torch.version, "cuda", None)
    name, accelerator = ("cpu", "cpu") if choice == "named" else (None, "auto")
    assert device_named(name) == torch.device("cpu")
    Trainer(accelerator=accelerator, enable_progress_bar=False)
    assert "THE CPU" not in caplog.text
