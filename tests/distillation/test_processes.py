"""Two processes on the CPU, whole (ddp) or sharded (FSDP2), against one."""

import socket
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from warm import Piped

WORKER = Path(__file__).parent / "worker.py"
ROOT = WORKER.parents[2]


@pytest.fixture(scope="module")
def models(tiny_llama, tmp_path_factory):
    """A random LLaMA, and the same with every second column of its layers removed."""
    directory = tmp_path_factory.mktemp("pair")
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype="float32")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "proj" in name:
                parameter[:, ::2] = 0
    model.save_pretrained(directory / "pruned")
    return str(tiny_llama), str(directory / "pruned")


def run(command, devices):
    """Run processes with the environment of those that Lightning starts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    paths = f"{ROOT}:{WORKER.parent}"
    env = {"PYTHONPATH": paths, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = [Piped(command, env | {"LOCAL_RANK": str(rank)}) for rank in range(devices)]
    outputs = [process.communicate() for process in started]
    assert [process.returncode for process in started] == [0] * devices, outputs


def distilled(models, out, strategy, devices):
    """The weights that processes have written."""
    run([WORKER, *models, out, strategy, devices], devices)
    return load_file(out)


@pytest.fixture(scope="module")
def alone(models, tmp_path_factory):
    return distilled(models, tmp_path_factory.mktemp("one") / "one.safetensors", "one", 1)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_give_what_one_gives(models, alone, tmp_path, strategy):
    together = distilled(models, tmp_path / "two.safetensors", strategy, 2)
    dense = load_file(Path(models[0]) / "model.safetensors")
    for name, weight in alone.items():
        torch.testing.assert_close(together[name], weight, rtol=0, atol=1e-12)
        if "proj" in name:
            assert not together[name][:, ::2].any()
            assert not torch.equal(weight.float(), dense[name.removeprefix("base.")].float())


def test_two_processes_that_resume_read_on_where_they_were(models, tmp_path):
    text = tmp_path / "words.txt"
    text.write_text(" ".join(map(str, range(4000))))
    run([WORKER.with_name("resume_worker.py"), *models, text, tmp_path], 2)
