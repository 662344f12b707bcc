"""Limits of a machine are reported loudly and once: a GPU without a driver, 16 bits on old CPUs."""

import pytest
import torch

from mrp_lightning import Trainer, environment
from mrp_lightning.devices import device_named, warn_of_slow_dtype, warn_of_unused_gpu


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


@pytest.mark.parametrize(
    ("dtype", "capability", "is_slow"),
    [("bfloat16", "AVX2", True), ("float32", "AVX2", False), ("bfloat16", "AVX512", False)],
)
def test_16_bits_without_instructions_for_them(
    dtype, capability, is_slow, tiny_llama, monkeypatch, caplog
):
    from mrp_lightning import CausalLM

    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    warn_of_slow_dtype.cache_clear()
    caplog.set_level("WARNING", environment.progress_log.name)
    data = torch.zeros(2, 1, 8, dtype=torch.long)
    for _ in range(2):
        trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
        trainer.test(CausalLM(tiny_llama, dtype=dtype), data, verbose=False)
    warn_of_slow_dtype.cache_clear()
    assert sum("`--dtype float32`" in r.message for r in caplog.records) == is_slow
