"""What the processes of a run are to each other: one speaks for all, and none outlives another."""

import logging
import os
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch.distributed import PrefixStore, distributed_c10d

from mrp_lightning.errors import NumericalWarning
from mrp_lightning.processes import Processes

log = logging.getLogger(__name__)

_SECONDS = 2.0
"""Between two beats of a process, and between two looks at those of the others."""
_GRACE = 6.0
"""Seconds in which a process may end by itself before it is ended."""
_MISSED = 15
"""Beats in turn after which a process is taken for dead."""
_FAILED = "failed: "


@contextmanager
def one_voice(processes: Processes) -> Iterator[None]:
    """Let process 0 alone log and warn: the others would say the same."""
    if processes.rank == 0:
        yield
        return
    loggers = [
        logging.getLogger(n) for n in ("mrp_lightning", "callbacks", "lightning.pytorch.pruning")
    ]
    before = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NumericalWarning)
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


@contextmanager
def all_or_none(processes: Processes) -> Iterator[None]:
    """End this process if another fails or dies while all of them are in this context.

    Who launches processes ends some of them when one dies, on one machine; the others would wait
    in a collective, on a GPU for many minutes. Each process says to the group's store that it
    lives, and looks at what the others say.
    """
    if processes.size == 1:
        yield
        return
    started = processes.all(time.time_ns())[0]  # tells this run from others of the same group
    store = PrefixStore(f"mrp_lightning/{started}", distributed_c10d._get_default_store())
    left = threading.Event()
    watch = threading.Thread(target=_watch, args=(processes, store, left), daemon=True)
    watch.start()
    try:
        yield
    except BaseException as error:
        left.set()
        watch.join()
        with suppress(RuntimeError):  # the others may be gone
            store.set(str(processes.rank), f"{_FAILED}{type(error).__name__}: {error}")
            if processes.rank == 0:
                time.sleep(1.5 * _SECONDS)  # the store ends with this process
        raise
    else:
        processes.numbers(0.0)  # all are through
        left.set()
        watch.join()


def _watch(processes: Processes, store: Any, left: threading.Event) -> None:
    """Beat, and end this process when another does not."""
    others = [rank for rank in range(processes.size) if rank != processes.rank]
    seen, missed = dict.fromkeys(others, ""), dict.fromkeys(others, 0)
    beat = 0
    while not left.wait(_SECONDS if beat else 0.0):
        beat += 1
        try:
            store.set(str(processes.rank), str(beat))
            said = {n: store.get(str(n)).decode() for n in others if store.check([str(n)])}
        except RuntimeError as error:
            why = str(error).partition("\n")[0]
            return _end(left, processes, f"the process that keeps the group has ended ({why})")
        for rank in others:
            now = said.get(rank, "")
            missed[rank] = 0 if now != seen[rank] else missed[rank] + 1
            seen[rank] = now
            if now.startswith(_FAILED):
                return _end(left, processes, f"process {rank} {now}")
            if missed[rank] >= _MISSED:
                return _end(left, processes, f"process {rank} gives no sign of life")
    return None


def _end(left: threading.Event, processes: Processes, reason: str) -> None:
    if left.wait(_GRACE):
        return  # the main thread has found out, and says more
    log.error(
        "Process %d of %d ends: %s. Mend that, and run all of them again.",
        processes.rank,
        processes.size,
        reason,
    )
    os._exit(1)
