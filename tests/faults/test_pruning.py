"""A pruning that is killed, or that cannot write, goes on and ends with the same bits."""

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from faulty import at_call, changed, contents, die, in_child, small_files, torn, weights

from mrp_lightning import Trainer
from mrp_lightning.errors import HessianError, JournalError, OutOfMemoryError, SaveError
from mrp_lightning.journal import journal, manifest
from mrp_lightning.journal.journal import Journal, journal_path
from mrp_lightning.loop import pruned_module
from mrp_lightning.records import block_result
from mrp_lightning.solver.conjugate_gradients import ConjugateGradients
from mrp_lightning.storage import outputs

BLOCKS = {
    "before a block is written": (block_result, "save_file", at_call(2, lambda *_: die())),
    "while it is written": (block_result, "save_file", at_call(2, torn)),
    "before it is renamed": (journal, "move_durably", at_call(2, lambda *_: die())),
    "after it": (journal, "move_durably", at_call(2, None, die)),
    "before the manifest is": (manifest, "move_durably", at_call(3, lambda *_: die())),
    "after that": (manifest, "move_durably", at_call(3, None, die)),
}


@pytest.mark.parametrize("kill", BLOCKS.values(), ids=BLOCKS)
def test_killed_at_a_block(kill, prune, out):
    with changed(kill):
        assert in_child(prune) == signal.SIGKILL
    assert not out.exists()
    assert prune().report.resumed_blocks in (1, 2)


END = {
    "before it is written": (pruned_module, "save_pretrained", at_call(1, lambda *_, **__: die())),
    "before it has a report": (pruned_module, "_save_report", at_call(1, lambda *_: die())),
    "before it is moved into place": (outputs, "_move_into_place", at_call(1, lambda *_: die())),
}


@pytest.mark.parametrize("kill", END.values(), ids=END)
def test_killed_at_the_end(kill, prune, out):
    with changed(kill):
        assert in_child(prune) == signal.SIGKILL
    assert not out.exists()
    assert prune().report.resumed_blocks == 3


def test_killed_when_the_result_is_there(prune, out, expected):
    with changed((Journal, "remove", at_call(1, lambda *_: die()))):
        assert in_child(prune) == signal.SIGKILL
    assert weights(out) == weights(expected)
    with pytest.raises(FileExistsError, match="exists and is not empty"):
        prune()
    prune(overwrite=True)


@pytest.mark.parametrize("rename", [1, 2])
def test_killed_while_an_older_result_is_replaced(rename, prune, out, expected, tmp_path):
    shutil.copytree(expected, out)
    before = contents(out)
    with changed((Path, "rename", at_call(rename, lambda *_: die()))):
        assert in_child(lambda: prune(overwrite=True)) == signal.SIGKILL
    (old,) = [path for path in tmp_path.rglob("out") if path.is_dir()]
    assert contents(old) == before  # under its own name, or aside
    assert prune(overwrite=True).report.resumed_blocks == 3  # it is put back, and then replaced
    assert weights(out) == weights(expected)
    assert not list(tmp_path.glob(".out.*.old"))


def test_a_full_disk_in_the_journal(prune, out):
    with small_files(20_000), pytest.raises(SaveError, match=r"is pruned, but could not be kept"):
        prune()
    assert not out.exists()
    prune()


def test_a_full_disk_when_the_result_is_saved(prune, out, tmp_path):
    size = max(path.stat().st_size for path in out_sizes(prune, tmp_path))
    with small_files(size + 8000), pytest.raises(SaveError, match="could not be saved in"):
        prune()
    assert not out.exists()
    assert prune().report.resumed_blocks == 3


def out_sizes(prune, tmp_path):
    """The files of a whole journal."""
    with changed((pruned_module, "save_pretrained", at_call(1, lambda *_, **__: die()))):
        assert in_child(prune) == signal.SIGKILL
    return list((tmp_path / ".out.partial").iterdir())


def test_a_journal_that_vanishes(prune, out):
    def vanish(*_):
        shutil.rmtree(journal_path(out))

    with (
        changed((Journal, "write", at_call(2, vanish))),
        pytest.raises(SaveError, match=r"could not be kept in the journal .*No such file"),
    ):
        prune()
    assert not out.exists()
    assert prune().report.resumed_blocks == 0


def test_a_directory_that_cannot_be_written(prune, out, tmp_path):
    journal_path(out).write_text("")  # a file where the journal is to be
    with pytest.raises(SaveError, match="cannot be written"):
        prune()
    journal_path(out).unlink()
    if os.system(f"chattr +i {tmp_path} 2>/dev/null") != 0:
        tmp_path.chmod(0o500)
        if os.access(tmp_path, os.W_OK):
            tmp_path.chmod(0o700)
            prune()
            pytest.skip("nothing can be made read-only here")
    try:
        with pytest.raises(PermissionError, match="cannot be made in"):
            prune()
    finally:
        os.system(f"chattr -i {tmp_path} 2>/dev/null")
        tmp_path.chmod(0o700)
    prune()


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:-9] + bytes(9)])
def test_a_damaged_block_is_made_again(damage, prune, out, tmp_path, caplog):
    shard = out_sizes(prune, tmp_path)[0].with_name("block-00001.safetensors")
    shard.write_bytes(damage(shard.read_bytes()))
    assert prune().report.resumed_blocks == 2
    assert "block-00001.safetensors is damaged" in caplog.text


def test_a_second_run_into_the_same_directory(prune, out):
    begun, go_on = os.pipe(), os.pipe()

    def wait(*_):
        os.write(begun[1], b"x")
        os.read(go_on[0], 1)

    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            with changed((Journal, "write", at_call(2, wait))):
                prune()
        finally:
            os._exit(0)
    os.read(begun[0], 1)
    with pytest.raises(JournalError, match="Another process is making this run"):
        prune()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert prune().report.resumed_blocks == 1


def test_what_is_not_a_number_in_a_block(prune, out, source):
    def spoil(trainer, module, *_, **__):
        layer = module.model.model.layers[2].mlp
        layer.register_forward_pre_hook(lambda _, inputs: (inputs[0] * torch.nan,))

    with (
        changed((Trainer, "predict", at_call(1, spoil))),
        pytest.raises(HessianError, match=r"`model\.layers\.2\.mlp\.gate_proj`: .* NaN"),
    ):
        prune()
    assert not out.exists()
    assert prune().report.resumed_blocks == 2


def test_no_memory_in_a_solve(prune, out, caplog):
    def fail(*_):
        raise torch.OutOfMemoryError("out of memory")

    with (
        changed((ConjugateGradients, "step", lambda _: fail)),
        pytest.raises(OutOfMemoryError, match="Not enough memory to prune on cpu. Lower"),
    ):
        prune()
    assert not out.exists()
    assert "No memory for 2 rows at a time: going on with 1." in caplog.messages
    prune()
