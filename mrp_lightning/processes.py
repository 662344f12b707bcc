"""Processes that prune one model together, each with its share of the batches and of the rows.

Each process holds the whole model. All processes call the methods that communicate (collectives) in
the same order, and get the same bits.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from mrp_lightning.errors import ProcessError

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Processes:
    """The processes of torch's default group, or this process alone.

    `rank` is the number of this process, from 0, and `device` that of tensors to exchange. All
    methods but `share` raise a `ProcessError` if another process has ended or is out of reach.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = _CPU

    def share(self, rows: int) -> slice:
        """Return the slice of this process's rows; the shares differ by at most one row."""
        return slice(self._start(self.rank, rows), self._start(self.rank + 1, rows))

    def gather_rows(self, own: Tensor, rows: int) -> Tensor:
        """Concatenate the shares of all processes, (rows, …), on the device of `own`, this one's.

        `rows` is their total number.
        """
        if self.size == 1:
            return own
        # `all_gather` needs equal shapes: shares are padded by at most one row, cut off below.
        largest_share = -(-rows // self.size)
        padded = own.new_zeros(largest_share, *own.shape[1:], device=self.device)
        padded[: len(own)] = own
        # As bytes, since no backend communicates all dtypes.
        shares = self._gather(padded.view(largest_share, -1).view(torch.uint8))
        parts = [
            share.view(own.dtype)[: self._start(rank + 1, rows) - self._start(rank, rows)]
            for rank, share in enumerate(shares)
        ]
        return torch.cat(parts).view(rows, *own.shape[1:]).to(own.device)

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all processes in place; it must be contiguous and on `device`."""
        if self.size > 1:
            with self._explained():
                distributed.all_reduce(tensor)
        return tensor

    def like_first_(self, tensor: Tensor) -> Tensor:
        """Overwrite a tensor with that of process 0; it must be contiguous and on `device`."""
        if self.size > 1:
            with self._explained():
                # As bytes, so that all dtypes are sent and all processes get the same bits. The
                # views share the tensor's memory, so it is overwritten itself.
                distributed.broadcast(tensor.detach().view(-1).view(torch.uint8), 0)
        return tensor

    def numbers(self, *own: float) -> list[list[float]]:
        """Return the numbers of all processes, one list a process, in float64."""
        if self.size == 1:
            return [list(own)]
        sent = torch.tensor(own, dtype=torch.float64, device=self.device)
        return [received.tolist() for received in self._gather(sent)]

    def all(self, value: Any) -> list[Any]:
        """Return the values of all processes, in the order of ranks; they must be picklable."""
        if self.size == 1:
            return [value]
        received: list[Any] = [None] * self.size
        with self._explained():
            distributed.all_gather_object(received, value)
        return received

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        received = [torch.empty_like(tensor) for _ in range(self.size)]
        with self._explained():
            distributed.all_gather(received, tensor)
        return received

    def _start(self, rank: int, rows: int) -> int:
        # start(r) = ⌊rows·r/size⌋: start(0) = 0 and start(size) = rows, so the shares cover all
        # rows without overlap, and differ by at most one row.
        return rows * rank // self.size

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise ProcessError(
                f"Process {self.rank} of {self.size} could not reach the others. As a rule one of "
                "them has ended: look for its own message, mend what it says, and run all of them "
                f"again. ({error})"
            ) from error


ALONE = Processes()
"""A single process, which communicates with no other."""
