"""Pruning in several processes, as users start them, against one process."""

import inspect
import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from ddp_worker import PRUNE, bits, data
from lightning.pytorch import Trainer
from quiet import QUIET
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from warm import Piped, on_two_nodes

from callbacks import MRPCallback
from mrp_lightning import CausalLM
from mrp_lightning.errors import JournalError
from mrp_lightning.records.grid_file import NAME

ROOT = Path(__file__).parents[2]
WORKER = ROOT / "tests" / "ddp_worker.py"
ENV = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def given(tiny_llama, tmp_path_factory):
    """The arguments of the worker."""
    out = tmp_path_factory.mktemp("processes")
    # Varied text: where windows repeat, Hessians are near-singular, and rounding picks the mask.
    (out / "text.txt").write_text(inspect.getsource(textwrap)[:7450])
    return tiny_llama, out / "text.txt", out


@pytest.fixture(scope="module")
def killed(given):
    """What a first run of two processes found, and their output; process 0 died in a second."""
    first, second = on_two_nodes([WORKER, *given, "--die"], ENV)
    outputs = [first.communicate(), second.communicate()]
    assert first.returncode < 0, outputs
    found = [json.loads((given[2] / f"first-{rank}.json").read_text()) for rank in (0, 1)]
    return found, outputs[1]


def test_two_processes_give_what_one_gives(killed, given):
    model, text, out = given
    one, callback = CausalLM(model), MRPCallback(**PRUNE)
    trainer = Trainer(devices=1, callbacks=[callback], **QUIET)
    trainer.predict(one, datamodule=data(text))
    (first, second), _ = killed
    assert first["bits"] == second["bits"]
    rows = first["report"]["layers"]
    assert [row["name"] for row in rows] == [row.name for row in callback.report.layers]
    for row, same in zip(rows, callback.report.layers, strict=True):
        assert row["tokens"] == same.tokens
        assert row["sparsity"] == same.sparsity
        # Sums in another order may decide between two weights that are as dispensable.
        assert row["relative_loss"] == pytest.approx(same.relative_loss, abs=1e-3)
    assert first["report"]["config"]["processes"] == 2
    assert first["report"]["config"]["batches"] == callback.report.config["batches"] == 4
    assert first["report"]["provenance"]["data"] == callback.report.provenance["data"]
    saved = AutoModelForCausalLM.from_pretrained(out / "first")
    for ours, theirs in zip(saved.parameters(), one.model.parameters(), strict=True):
        assert ((ours == 0) != (theirs == 0)).float().mean() < 1e-2

    # Process 0 alone looks at the directory, which is there by now: the other one has its reason.
    assert first["refused"].startswith("FileExistsError: `save_dir`: ")
    assert second["refused"] == (
        f"ProcessError: Process 1 of 2 ends, because process 0 refused the run with "
        f"{first['refused']}"
    )

    # No window counts twice in `test`, although the processes have unequal numbers of them.
    trainer.test(one, datamodule=data(text), verbose=False)
    ours, theirs = first["evaluation"]["text"], one.evaluation["text"]
    assert second["evaluation"]["text"] == ours
    assert ours["windows"] == theirs["windows"]
    assert ours["windows"] % 2 == 1
    assert ours["tokens"] == theirs["tokens"]
    assert ours["perplexity"] == pytest.approx(theirs["perplexity"], rel=1e-2)


def test_two_nodes_go_on_where_a_process_died(killed, given):
    (first, _), output = killed
    assert "Process 1 of 2" in output
    model, text, out = given
    with pytest.raises(JournalError, match="`processes` was 2, is null"):
        Trainer(
            devices=1, callbacks=[MRPCallback(**PRUNE, save_dir=out / "second")], **QUIET
        ).predict(CausalLM(model), datamodule=data(text))
    nodes = on_two_nodes([WORKER, *given, "--resume"], ENV)
    outputs = [node.communicate() for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    found = [json.loads((out / f"second-{rank}.json").read_text()) for rank in (0, 1)]
    assert [each["bits"] for each in found] == [first["bits"]] * 2
    assert found[0]["report"]["totals"]["resumed_blocks"] == 1
    assert bits(AutoModelForCausalLM.from_pretrained(out / "second")) == bits(
        AutoModelForCausalLM.from_pretrained(out / "first")
    )
    grids = [load_file(out / name / NAME) for name in ("second", "first")]
    assert grids[0].keys() == grids[1].keys()
    assert all(torch.equal(tensor, grids[1][name]) for name, tensor in grids[0].items())
    assert not (out / ".second.partial").exists()


WAITS_FOR_ITS_GROUP = """
import os, sys, subprocess
from callbacks import MRPCallback
MRPCallback(pattern="2:4")
if os.environ.get("LOCAL_RANK") is None:  # as Lightning starts the others of a machine
    other = subprocess.Popen([sys.executable, __file__], env={**os.environ, "LOCAL_RANK": "1"})
    print(other.pid, flush=True)
    other.wait()
import torch.distributed
torch.distributed.init_process_group(
    "gloo", init_method="tcp://127.0.0.1:1", rank=1, world_size=2
)
"""


def test_a_process_whose_launcher_is_killed_before_the_group_is_there_ends(tmp_path):
    (script := tmp_path / "waits.py").write_text(WAITS_FOR_ITS_GROUP)
    launcher = subprocess.Popen(
        [sys.executable, script],
        env=os.environ | ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    # Other lines are torch's and torchao's.
    other = next(int(line) for line in launcher.stdout if line.strip().isdigit())
    launcher.kill()
    output, _ = launcher.communicate(timeout=120)  # to whose end the other holds the pipe
    assert "the one that started it has ended" in output
    for _ in range(100):
        try:
            os.kill(other, 0)
        except ProcessLookupError:
            return
        if "State:\tZ" in Path(f"/proc/{other}/status").read_text():
            return
        time.sleep(0.1)
    raise AssertionError(f"{other} lives on")


@pytest.mark.gpu
def test_two_gpus_hold_the_same_bits(given, tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    model, text, _ = given
    worker = Piped([WORKER, model, text, tmp_path, "--accelerator=gpu", "--nodes=1"], ENV)
    output = worker.communicate()
    assert worker.returncode == 0, output
    first, second = (json.loads((tmp_path / f"first-{n}.json").read_text()) for n in (0, 1))
    assert first["bits"] == second["bits"]
    one, callback = CausalLM(model), MRPCallback(**PRUNE)
    trainer = Trainer(devices=1, callbacks=[callback], **QUIET | {"accelerator": "gpu"})
    trainer.predict(one, datamodule=data(text))
    for row, same in zip(first["report"]["layers"], callback.report.layers, strict=True):
        assert row["relative_loss"] == pytest.approx(same.relative_loss, abs=1e-3)
