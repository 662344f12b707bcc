"""Whole runs on a GPU that no stand-in can make; the CPU's show that the tests themselves hold."""

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
import warm
from second_device import trainer_on
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from callbacks import MRPCallback
from mrp_lightning import CausalLM, TextDataModule

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def windows() -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    return DataLoader(list(torch.randint(3, 2048, (8, 24), generator=generator)), batch_size=2)


def saved(directory: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(directory).state_dict()


def close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, weight in one.items():
        torch.testing.assert_close(weight.cpu(), other[name].cpu(), rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{"offload": True}, {"bits": 4, "targets": ["o_proj"]}])
def test_the_saved_model_is_the_one_in_memory(device, options, tiny_llama, tmp_path):
    lm = CausalLM(tiny_llama)
    prune = MRPCallback(pattern="2:4", save_dir=tmp_path / "run", **options)
    trainer_on(torch.device(device)).predict(lm, windows(), callbacks=[prune])
    close(saved(tmp_path / "run"), lm.model.state_dict())
    assert not (tmp_path / ".run.partial").exists()


@pytest.mark.parametrize("device", DEVICES)
def test_a_streamed_run_equals_the_one_in_memory(device, tiny_llama, tmp_path):
    for name, streaming in (("memory", False), ("streamed", True)):
        lm = CausalLM(tiny_llama, streaming=streaming)
        prune = MRPCallback(pattern="2:4", save_dir=tmp_path / name)
        trainer_on(torch.device(device)).predict(lm, windows(), callbacks=[prune])
    close(saved(tmp_path / "streamed"), saved(tmp_path / "memory"))


@pytest.mark.parametrize("device", DEVICES)
def test_own_text_calibrates(device, tiny_llama, tmp_path):
    text = {"num_samples": 4, "sequence_length": 32, "batch_size": 2}
    lm, prune = CausalLM(tiny_llama), MRPCallback(sparsity=0.5, method="JM", offload=True)
    data = TextDataModule(calibration="self", **text)
    trainer_on(torch.device(device)).predict(lm, datamodule=data, callbacks=[prune])
    assert prune.report.totals["sparsity"] == pytest.approx(0.5, abs=1e-3)


def prune_in_a_group(device: str, model: Path, out: Path) -> None:
    """Prune in a process group of one: NCCL on a GPU, gloo on a CPU."""
    from mrp_lightning import Trainer

    trainer = Trainer(
        accelerator=device, strategy="ddp", devices=1, logger=False, enable_checkpointing=False
    )
    prune = MRPCallback(pattern="2:4", save_dir=out)
    trainer.predict(CausalLM(model), windows(), callbacks=[prune])
    expected = "nccl" if device == "cuda" else "gloo"
    assert torch.distributed.get_backend() == expected
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("device", DEVICES)
def test_a_process_group_of_one_prunes_as_none(device, tiny_llama, tmp_path):
    with ProcessPoolExecutor(1, mp_context=warm.context) as pool:
        pool.submit(prune_in_a_group, device, tiny_llama, tmp_path / "group").result()
    prune = MRPCallback(pattern="2:4", save_dir=tmp_path / "alone")
    trainer_on(torch.device(device)).predict(CausalLM(tiny_llama), windows(), callbacks=[prune])
    close(saved(tmp_path / "group"), saved(tmp_path / "alone"))
