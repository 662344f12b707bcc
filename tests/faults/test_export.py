"""An export that is killed, or that cannot write, leaves nothing, and can be made again."""

import os
import signal

import pytest
from faulty import at_call, changed, contents, die, in_child, small_files, torn, weights

from export import packing, to_sparse
from export.conversion import writing
from mrp_lightning.storage import outputs

pytestmark = pytest.mark.usefixtures("short_library")


@pytest.fixture
def export(expected, tmp_path):
    """Pack the pruned model; in the end a whole export is there, and nothing else."""
    before = contents(expected)
    out = tmp_path / "out"

    def run():
        to_sparse.main([str(expected), "--out", str(out), "--device", "cpu"])

    yield run
    assert not out.exists()
    run()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert weights(out).keys() == {"model.safetensors"}
    assert contents(expected) == before


KILLS = {
    "while weights are written": (writing, "save_file", at_call(1, torn)),
    "after it": (writing, "save_file", at_call(1, None, die)),
    "before it is compared": (packing, "check_parity", at_call(1, lambda *_, **__: die())),
    "before it is moved into place": (outputs, "_move_into_place", at_call(1, lambda *_: die())),
}


@pytest.mark.parametrize("kill", KILLS.values(), ids=KILLS)
def test_killed(kill, export):
    with changed(kill):
        assert in_child(export) == signal.SIGKILL


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_ended(sent, status, export, tmp_path, capfd):
    end = at_call(1, lambda *_, **__: os.kill(os.getpid(), sent))

    def run():
        # A shell starts what runs in the background with SIGINT ignored.
        signal.signal(sent, signal.default_int_handler)
        export()

    with changed((packing, "check_parity", end)), pytest.raises(SystemExit) as ended:
        in_child(run)
    assert ended.value.code == status
    message = "interrupted: nothing was written\n"
    assert capfd.readouterr().err.startswith(message) == (sent == signal.SIGINT)
    assert not list(tmp_path.iterdir())


def test_a_full_disk(export):
    def run():
        with small_files(20_000):
            export()

    with pytest.raises(SystemExit) as ended:
        in_child(run)
    assert ended.value.code == 2
