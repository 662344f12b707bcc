"""Two processes, as a user starts them, write a model's own text, are killed, and resume."""

import signal
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file
from warm import Piped, on_two_nodes

from callbacks import MRPCallback
from mrp_lightning import CausalLM, TextDataModule, Trainer

ROOT = Path(__file__).parents[2]
WINDOWS, TOKENS = 6, 64


def start_two(model: Path, out: Path) -> list[Piped]:
    options = {
        "model.model": model,
        "data.calibration": "self",
        "data.num_samples": WINDOWS,
        "data.sequence_length": TOKENS,
        "trainer.accelerator": "cpu",
        "trainer.strategy": "ddp",
        "trainer.num_nodes": 2,
        "trainer.devices": 1,
        "trainer.enable_progress_bar": "false",
        "trainer.callbacks": "callbacks.MRPCallback",
        "trainer.callbacks.pattern": "2:4",
        "trainer.callbacks.save_dir": out,
    }
    given = [f"--{name}={value}" for name, value in options.items()]
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return on_two_nodes(["-m", "mrp_lightning", "predict", *given], env)


def test_a_kill_loses_no_window_and_the_weights_are_those_of_one_process(tiny_llama, tmp_path):
    killed, other = start_two(tiny_llama, tmp_path / "two")
    while not list(tmp_path.glob(".two.partial/block-*")) and killed.returncode is None:
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    output = killed.communicate()
    other.communicate()  # it ends by itself
    assert killed.returncode == -signal.SIGKILL, output
    assert "of the model's own text" in output
    assert not (tmp_path / "two").exists()
    again = start_two(tiny_llama, tmp_path / "two")
    outputs = [process.communicate() for process in again]
    assert [process.returncode for process in again] == [0, 0], outputs
    assert "block 1/2 · " in outputs[0]
    assert "own text" not in "".join(outputs)

    data = TextDataModule(calibration="self", num_samples=WINDOWS, sequence_length=TOKENS)
    callback = MRPCallback(pattern="2:4", save_dir=tmp_path / "one")
    trainer = Trainer(accelerator="cpu", enable_progress_bar=False)
    trainer.predict(CausalLM(tiny_llama), datamodule=data, callbacks=[callback])
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("two", "one"))
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        # Sums in another order may decide between two weights that are as dispensable.
        assert ((weight == 0) != (theirs[name] == 0)).float().mean() < 1e-2
        same = (weight == 0) == (theirs[name] == 0)
        difference = (weight - theirs[name])[same].float().norm()
        assert difference == pytest.approx(0.0, abs=1e-2 * float(theirs[name].float().norm()))
