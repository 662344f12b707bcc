"""An interrupted run goes on where it was, and ends with the bits of an uninterrupted one."""

import json
import shutil
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import pytest
import torch
from slow_pruning import Killed, killed_after
from torch import nn
from torch.utils.data import DataLoader

from callbacks import MRPCallback
from mrp_lightning import CausalLM, Trainer
from mrp_lightning.errors import JournalError, OptionError, SaveError
from mrp_lightning.journal.journal import Journal, journal_path
from mrp_lightning.journal.manifest import Manifest
from mrp_lightning.loop.pruned_module import num_bytes
from mrp_lightning.pruning.settings import BlockTuning


@pytest.fixture
def prune(llama, loader, quiet, tmp_path):
    """Prune a fresh model of four blocks into `out`, and die after some of them."""

    def run(
        survives: int | None = None, *, module: nn.Module | None = None, **arguments: Any
    ) -> tuple[nn.Module, MRPCallback]:
        module = llama(num_hidden_layers=4) if module is None else module
        options = {"sparsity": 0.5, "save_dir": tmp_path / "out"} | arguments
        callback = MRPCallback(**options)
        with nullcontext() if survives is None else killed_after(survives):
            Trainer(**quiet).predict(CausalLM(module), loader, callbacks=[callback])
        return module, callback

    return run


def assert_same_bits(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, a), b in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name


TUNING = BlockTuning(epochs=1, learning_rate=1e-3, batch_size=2)


@pytest.mark.parametrize(
    ("survives", "arguments"),
    [
        (1, {"target": "dense", "tuning": TUNING, "allocation": "output"}),
        (4, {}),  # all but the final write
        (2, {"offload": True, "method": "MM", "sparsity": None, "pattern": "2:4",
             "target": "dense"}),
        (5, {"targets": ["mlp", "lm_head"]}),  # a step beyond the blocks
    ],
)  # fmt: skip
def test_an_interrupted_run_ends_with_the_same_bits(survives, arguments, prune, tmp_path):
    whole, reference = prune(**arguments, save_dir=None)
    prune(survives, **arguments)
    assert journal_path(tmp_path / "out").is_dir()
    resumed, callback = prune(**arguments)
    assert_same_bits(resumed, whole)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]

    stored = json.loads((tmp_path / "out" / "pruning_report.json").read_text())
    assert stored["totals"]["resumed_blocks"] == survives
    times = ("seconds",)

    def rows(found: Any) -> list[dict[str, Any]]:
        return [{k: v for k, v in asdict(row).items() if k not in times} for row in found]

    assert rows(callback.report.layers) == rows(reference.report.layers)
    assert rows(callback.report.blocks) == rows(reference.report.blocks)
    assert "resumed_blocks" not in reference.report.totals


def test_what_differs_is_named(prune, llama, loader, quiet, tmp_path):
    prune(2, method="SS", damping=0.02)
    other = llama(num_hidden_layers=4)
    with torch.no_grad():
        other.model.layers[3].mlp.up_proj.weight[0, 0] += 1
    with pytest.raises(JournalError) as caught:
        prune(module=other, method="SM", damping=0.02)
    message = str(caught.value)
    assert '`method` was "SS", is "SM"' in message
    assert "`weights of the model` differ" in message
    assert "`resume: false`" in message
    assert not {"damping", "calibration data", "sparsity"} & set(message.split("`"))

    callback = MRPCallback(sparsity=0.5, method="SS", damping=0.02, save_dir=tmp_path / "out")
    fewer = DataLoader(loader.dataset[:6], batch_size=2)
    with pytest.raises(JournalError, match=r"differs:(?s:.*)`calibration data` differ"):
        Trainer(**quiet).predict(CausalLM(llama(num_hidden_layers=4)), fewer, callbacks=[callback])

    _, callback = prune(resume=False)
    assert callback.report.complete
    assert callback.report.resumed_blocks == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_journal_without_a_block_refuses_no_other_command(prune, monkeypatch, tmp_path, quiet):
    def stop(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("mrp_lightning.pruning.block.LayerSolver.prune", stop)
        with pytest.raises(Killed):
            prune(method="SS")
        assert not list(tmp_path.iterdir())
        # A process that is killed removes nothing.
        patch.setattr(Journal, "remove", lambda _: None)
        with pytest.raises(Killed):
            prune(method="SS")
    journal = journal_path(tmp_path / "out")
    assert Manifest.load(journal).shards == {}
    (journal / "manifest.json").write_text("cut off")
    _, callback = prune(method="SM")
    assert callback.report.complete
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_where_and_how_long_does_not_matter(prune, tmp_path):
    prune(2, offload=False)
    manifest = Manifest.load(journal_path(tmp_path / "out"))
    _, callback = prune(offload=True, overwrite=True)
    assert callback.report.resumed_blocks == 2
    assert callback.report.seconds > manifest.seconds > 0
    assert callback.report.cpu_seconds > manifest.cpu_seconds > 0


def test_a_second_process_is_refused(prune, llama, loader, quiet, tmp_path):
    prune(1)
    code = (
        "import sys; from filelock import FileLock; lock = FileLock(sys.argv[1]); lock.acquire();"
        "print('held', flush=True); sys.stdin.read()"
    )
    lock = str(journal_path(tmp_path / "out") / ".lock")
    with subprocess.Popen(
        [sys.executable, "-c", code, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout.readline() == b"held\n"
        ran = []
        model = llama(num_hidden_layers=4)
        model.register_forward_pre_hook(lambda *_: ran.append(1))
        with pytest.raises(JournalError, match="Another process is making this run"):
            prune(module=model)
        assert not ran  # before any work
        other.stdin.close()
    _, callback = prune()
    assert callback.report.resumed_blocks == 1


def test_files_of_others_in_a_journal_stay_and_links_are_not_followed(prune, tmp_path, caplog):
    mine = tmp_path / "mine"
    mine.write_text("precious")
    journal = journal_path(tmp_path / "out")
    journal.mkdir()
    for name in ("block-00000.safetensors.partial", "manifest.json.partial"):
        (journal / name).symlink_to(mine)
    (journal / "thesis.txt").write_text("precious")
    prune()
    assert mine.read_text() == "precious"
    assert [path.name for path in journal.iterdir() if path.name != ".lock"] == ["thesis.txt"]
    assert "thesis.txt is not ours, and stays in" in caplog.text


def test_what_stands_where_the_lock_is_to_be_is_named(prune, tmp_path):
    (journal_path(tmp_path / "out") / ".lock").mkdir(parents=True)
    with pytest.raises(SaveError, match=r"cannot be written: .*\.lock.*another `save_dir`"):
        prune()


def test_a_journal_that_is_a_link_is_refused(prune, tmp_path):
    (tmp_path / "mine").mkdir()
    journal_path(tmp_path / "out").symlink_to(tmp_path / "mine")
    with pytest.raises(SaveError, match="is a link, and is not followed"):
        prune()
    assert list((tmp_path / "mine").iterdir()) == []


def test_without_a_directory_there_is_no_journal(prune, llama, loader, quiet, tmp_path):
    prune(save_dir=None)
    callback = MRPCallback(sparsity=0.5, save_dir=tmp_path / "out")
    Trainer(fast_dev_run=True, **quiet).predict(llama(), loader, callbacks=[callback])
    assert list(tmp_path.iterdir()) == []


def test_room_for_the_journal_is_asked_for(prune, llama, tmp_path, monkeypatch):
    model = llama(num_hidden_layers=4)
    usage = shutil.disk_usage(tmp_path)
    need = num_bytes(model) + sum(p.nbytes for p in model.parameters())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=need - 1))
    with pytest.raises(OptionError, match="GB left"):
        prune()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=need))
    prune(2)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=need - 8000))
    prune()  # half of the journal is there
