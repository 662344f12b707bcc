"""Processes that are threads of one process: what each says reaches the others, in memory."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mrp_lightning.calibration.walks import every_layer_called
from mrp_lightning.processes import Processes


class Thread(Processes):
    """One of several threads that prune together; it exchanges what processes would."""

    def __init__(self, rank: int, size: int, board: list[Any], barrier: threading.Barrier) -> None:
        super().__init__(rank, size)
        object.__setattr__(self, "board", board)
        object.__setattr__(self, "barrier", barrier)

    def all(self, mine: Any) -> list[Any]:
        self.barrier.wait()
        self.board[self.rank] = mine
        self.barrier.wait()
        return list(self.board)

    def numbers(self, *mine: float) -> list[list[float]]:
        return [list(found) for found in self.all(mine)]

    def gather_rows(self, mine: Tensor, rows: int) -> Tensor:
        everything = torch.cat(self.all(mine.clone()))
        assert len(everything) == rows
        return everything

    def sum_(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(sum(self.all(tensor.clone())))

    def like_first_(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(self.all(tensor.clone())[0])


def together(size: int, run: Callable[[Processes], Any]) -> list[Any]:
    """Call `run` in so many threads, and return what each returns, or raise what one raises."""
    barrier, board = threading.Barrier(size, timeout=60), [None] * size
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            results[rank] = run(Thread(rank, size, board, barrier))
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    # torch keeps one such switch for all threads: each would put back what another one set.
    with every_layer_called():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return results
