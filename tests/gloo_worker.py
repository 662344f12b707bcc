"""One of several processes without a trainer: tries all exchanges, then sees another one fail.

python gloo_worker.py RANK SIZE DIRECTORY
"""

import sys
import time
from pathlib import Path

import torch
from torch.distributed import init_process_group

from mrp_lightning.loop import distributed
from mrp_lightning.processes import Processes
from mrp_lightning.solver.hessian import InputHessian
from mrp_lightning.solver.pruning import prune
from mrp_lightning.solver.recipe import Recipe


def exchange(processes: Processes) -> None:
    rank, size = processes.rank, processes.size
    everything = torch.arange(7 * 3).view(7, 3)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.int64):
        whole = (everything % 2 == 0) if dtype is torch.bool else everything.to(dtype)
        assert torch.equal(processes.gather_rows(whole[processes.share(7)], 7), whole)
    two = torch.tensor([[1.5], [2.5]])
    assert torch.equal(processes.gather_rows(two[processes.share(2)], 2), two)
    total = processes.sum_(torch.full((2, 2), float(rank + 1)))
    assert torch.equal(total, torch.full((2, 2), size * (size + 1) / 2))
    first = processes.like_first_(torch.full((2,), float(rank + 5), dtype=torch.bfloat16))
    assert first.tolist() == [5, 5]
    assert processes.numbers(rank, 0.5) == [[n, 0.5] for n in range(size)]
    assert processes.all({"rank": [rank]}) == [{"rank": [n]} for n in range(size)]


def solve(processes: Processes) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(10, 32), torch.randn(100, 32)
    inputs, recipe = InputHessian(2 * x.T @ x / 100), Recipe.of(method="SM", sparsity=0.5)
    expected, found = (prune(weight, inputs, recipe, processes=p) for p in (Processes(), processes))
    assert torch.equal(found.pruned, expected.pruned)
    torch.testing.assert_close(found.weight, expected.weight, rtol=1e-3, atol=1e-3)


def main() -> None:
    rank, size, directory = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    init_process_group("gloo", init_method=f"file://{directory}/group", rank=rank, world_size=size)
    processes = Processes(rank, size)
    distributed._SECONDS = distributed._GRACE = 0.2
    distributed._MISSED = 1000  # a busy machine may give one of them no time for a while
    with distributed.fail_together(processes):
        exchange(processes)
        solve(processes)
    (directory / f"done-{rank}").touch()
    with distributed.fail_together(processes):
        if rank == size - 1:
            raise ValueError("the reason")
        time.sleep(60)  # as in a collective on a GPU, which waits for the one that failed


if __name__ == "__main__":
    main()
