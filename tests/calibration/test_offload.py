import platform
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mrp_lightning.calibration.offload import Offload, explained_out_of_memory, held_on_cpu
from mrp_lightning.calibration.walk_choice import choose_walk
from mrp_lightning.calibration.walks import Inject
from mrp_lightning.devices import peak_rss, return_freed_memory
from mrp_lightning.errors import OutOfMemoryError
from mrp_lightning.targets.blocks import Block

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


class Recorder(nn.Module):
    """Notes where it is told to go, and where it runs; it has nothing to move."""

    def __init__(self, name: str, log: list[str]) -> None:
        super().__init__()
        self.name, self.log, self.place = name, log, "cpu"

    def to(self, device: torch.device, non_blocking: bool = False) -> "Recorder":
        if device.type != self.place:
            self.place = device.type
            self.log.append(f"{self.name} to {self.place}")
        return self

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(f"{self.name} runs on {self.place}")
        return x + 1


def test_a_block_is_on_the_device_only_while_it_runs():
    log: list[str] = []
    blocks = [Recorder("a", log), Recorder("b", log)]
    with Offload(blocks, CUDA).active():
        for block in blocks:
            block(torch.zeros(1))
    assert log == [
        *("a to cuda", "a runs on cuda", "a to cpu"),
        *("b to cuda", "b runs on cuda", "b to cpu"),
    ]
    assert not any("forward" in block.__dict__ for block in blocks)


def test_a_pinned_block_moves_once():
    log: list[str] = []
    blocks = [Recorder("a", log), Recorder("b", log)]
    offload = Offload(blocks, CUDA)
    with offload.active(), offload.pinned(blocks[1]):
        for _ in range(2):
            blocks[1](torch.zeros(1))
    assert log == ["b to cuda", "b runs on cuda", "b runs on cuda", "b to cpu"]


def test_blocks_go_back_after_an_error():
    log: list[str] = []
    block = Recorder("a", log)
    block.register_forward_hook(lambda *_: 1 / 0)
    try:
        with Offload([block], CUDA).active():
            block(torch.zeros(1))
    except ZeroDivisionError:
        log.append("error")
    assert log[-2:] == ["a to cpu", "error"]


def test_a_walk_moves_each_block_once_and_choosing_it_twice():
    log: list[str] = []
    model = nn.Sequential(nn.Linear(4, 4), *(Recorder(name, log) for name in "abc"))
    blocks = [Block(str(k), model[k], "") for k in (1, 2, 3)]
    batches = [torch.randn(2, 4) for _ in range(4)]
    offload = Offload([block.module for block in blocks], CUDA)

    def moves() -> list[str]:
        found = [line for line in log if " to " in line]
        log.clear()
        return found

    with offload.active():
        walk = choose_walk(model, batches, blocks)
        assert isinstance(walk, Inject)
        once = [f"{name} to {place}" for name in "abc" for place in ("cuda", "cpu")]
        assert moves() == 2 * once  # the whole forward, then each block alone
        for k, block in enumerate(walk.blocks):
            with offload.pinned(block.module):
                for i in range(4):
                    walk.output(k, i)
                assert list(walk.advance(k)) == [0, 1, 2, 3]
        assert moves() == once


def test_held_blocks_change_dtype_and_can_be_let_go():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied = model[0].weight
    with held_on_cpu(model, lambda: [model[0]]):
        model.to(torch.float64)
        assert {p.dtype for p in model.parameters()} == {torch.float64}
        assert model[0].weight is tied
    model.to("meta")
    assert model[0].weight.device.type == "meta"
    assert not any("_apply" in module.__dict__ for module in model.modules())


class Counting(nn.Module):
    """Two layers that share a weight, and a buffer that a forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.second(self.first(x))


@torch.no_grad()
def test_a_forward_copies_no_weight_back_and_a_pinned_block_does(second):
    block = Counting()
    weight, x = block.first.weight, torch.randn(2, 4)
    expected, address = block(x), weight.data_ptr()
    offload = Offload([block], second)
    with offload.active():
        for _ in range(2):
            torch.testing.assert_close(block(x.to(second)).cpu(), expected)
            assert block.first.weight is block.second.weight is weight
            assert weight.device == CPU
        # On a GPU the weight was moved once, to page-locked memory.
        assert second.type == "cuda" or weight.data_ptr() == address
        assert block.calls.tolist() == [3]
        doubled = 2 * weight
        with offload.pinned(block):
            block.first.weight.mul_(2)
        assert block.first.weight.device == CPU
        torch.testing.assert_close(block.first.weight.detach(), doubled.detach())
    assert block(x).shape == (2, 4)


@torch.inference_mode()
def test_weights_of_an_evaluated_model_are_put_back():
    """Lightning evaluates in inference mode, in which `to` leaves tensors of another kind."""
    with torch.inference_mode(False):
        block = nn.Linear(4, 4)
    with Offload([block], torch.device("meta")).active():
        assert block(torch.zeros(2, 4, device="meta")).is_meta
    with torch.inference_mode(False), torch.enable_grad():
        block(torch.randn(2, 4)).sum().backward()
    assert block.weight.grad is not None


def test_all_blocks_stay_on_a_device_that_holds_them(monkeypatch):
    log: list[str] = []
    blocks = [Recorder("a", log), Recorder("b", log)]
    offload = Offload(blocks, CUDA)
    for free, fits in ((100, True), (-2, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, 100))
        with offload.active(), offload.resident() as resident:
            assert resident is fits
            for _ in range(3):
                blocks[0](torch.zeros(1))
        moves = [line for line in log if line.startswith("a to")]
        assert len(moves) == (2 if fits else 6)
        log.clear()


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
