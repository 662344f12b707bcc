"""The processes of one run: supported strategies, shares of the data, and failing together."""

import logging
import os
import threading
import time
import warnings
from collections.abc import Iterator, Sized
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed import PrefixStore
from torch.distributed import is_initialized as has_group

from mrp_lightning.environment import at_level, progress_log
from mrp_lightning.errors import FAILED, DataError, NumericalWarning, ProcessError, StrategyError
from mrp_lightning.processes import Processes
from mrp_lightning.upstream import torch_names
from mrp_lightning.upstream.other_names import works_in_children

log = logging.getLogger(__name__)

_SHARDING = ("FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy")
_SECONDS = 2.0
"""Seconds between two heartbeats of a process, and between two reads of the others' beats."""
_GRACE = 6.0
"""Seconds that a process has to end by itself before it is ended."""
_MISSED = 25
"""Number of missed heartbeats after which a process counts as dead."""
_FAILED = "failed: "
_LAUNCHER = "MRP_LIGHTNING_LAUNCHER"
"""The environment variable with the id of the process from which Lightning starts the others."""


def processes_of(trainer: Trainer) -> Processes:
    """Return the processes of a trainer that has set up its strategy."""
    return Processes(trainer.global_rank, trainer.world_size, trainer.strategy.root_device)


def require_whole_models(trainer: Trainer, caller: str) -> None:
    """Raise a StrategyError if a process does not hold the whole model during the whole run.

    `caller` is the name of the feature that needs whole models, for the message.
    """
    strategy: Any = trainer.strategy
    if works_in_children(trainer):
        problem = "runs in workers that are spawned or forked, whose pruned weights would be lost"
    elif _shards(strategy):
        problem = "shards the model"
    elif isinstance(strategy, DDPStrategy | SingleDeviceStrategy):
        return
    else:
        problem = "is none that it knows"
    raise StrategyError(
        f"{caller} needs the whole model in each process. The {type(strategy).__name__} "
        f"{problem}. Use strategy='ddp', in which several processes share the work, or "
        "Trainer(devices=1, strategy='auto'); for a model larger than the device, `offload: true`."
    )


def require_whole_parameters(trainer: Trainer, caller: str) -> None:
    """Raise a `StrategyError` if a process holds only parts of the weights, but for FSDP2."""
    if _shards(trainer.strategy) and not is_sharded_later(trainer):
        raise StrategyError(
            f"{caller} needs whole weights, or parameters that FSDP2 shards one by one. Got a "
            f"{type(trainer.strategy).__name__}. Use `strategy='ddp'`, a single device, or "
            "`ModelParallelStrategy`."
        )


def is_sharded_later(trainer: Trainer) -> bool:
    """Return whether the module shards its parameters by FSDP2, in `configure_model`."""
    return isinstance(trainer.strategy, ModelParallelStrategy)


def _shards(strategy: Any) -> bool:
    return any(kind.__name__ in _SHARDING for kind in type(strategy).__mro__)


def one_share_each(windows: Sized, trainer: Trainer | None) -> Any:
    """Return a sampler of the windows of this process; `None`, for Lightning's own, within `fit`.

    Lightning's own sampler for `test` and `validate` repeats windows to give each process the same
    number; repeated windows would count twice. Equal numbers are needed only within `fit`, where
    processes synchronise gradients. Without a trainer or other processes the result is `None`, too.
    Fewer windows than processes raise a DataError.
    """
    # In `fit`, a process with one window more would wait for gradients that no other sends.
    if trainer is None or trainer.world_size == 1 or trainer.state.fn == TrainerFn.FITTING:
        return None
    if len(windows) < trainer.world_size:
        raise DataError(
            f"{trainer.world_size} processes need at least as many windows of text; got "
            f"{len(windows)}. Give more text or samples, or use fewer `devices`."
        )
    return UnrepeatedDistributedSampler(
        windows, num_replicas=trainer.world_size, rank=trainer.global_rank, shuffle=False
    )


@contextmanager
def rank_zero_logging(processes: Processes) -> Iterator[None]:
    """Silence this process below errors unless it is process 0, whose messages it would repeat."""
    if processes.rank == 0:
        yield
        return
    # Errors stay, since another process may fail in its own way.
    loggers = [*map(logging.getLogger, ("mrp_lightning", "callbacks")), progress_log]
    with at_level(logging.ERROR, loggers), warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericalWarning)
        yield


def end_with_launcher() -> None:
    """End this process, with the status `FAILED`, if its launcher ends before their group exists.

    Lightning's `ddp` starts the other processes of a machine from the first one. Without it they
    would wait for half an hour to join the group. Once that exists, `fail_together` takes over.
    """
    launcher = os.environ.get(_LAUNCHER)
    if os.environ.get("LOCAL_RANK", "0") == "0" or launcher is None:
        os.environ[_LAUNCHER] = str(os.getpid())  # inherited by what Lightning starts
    elif launcher != str(os.getpid()) and not has_group():
        threading.Thread(target=_watch_launcher, args=(int(launcher),), daemon=True).start()


def _watch_launcher(launcher: int) -> None:
    while not has_group():
        if _has_ended(launcher):
            log.error(
                "This process ends: the one that started it has ended. Run all of them again."
            )
            os._exit(FAILED)
        time.sleep(_SECONDS)


def _has_ended(process: int) -> bool:
    """Return whether a process has ended, or is a zombie where `/proc` shows it."""
    if os.getppid() == process:
        return False
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


@contextmanager
def refuse_together(processes: Processes) -> Iterator[None]:
    """Raise in all processes if this context raises in one of them; a collective call.

    The others, which would otherwise fail in their next collective by a lost connection, raise a
    `ProcessError` with its error. Without a group, each process is alone.
    """
    if processes.size == 1 or not has_group():
        yield
        return
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    reasons = processes.all(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, reason in enumerate(reasons):
        if reason is not None:
            raise ProcessError(
                f"Process {processes.rank} of {processes.size} ends, because process {rank} "
                f"refused the run with {reason}"
            )


@contextmanager
def fail_together(processes: Processes) -> Iterator[None]:
    """End this process if another fails or dies while all of them are in this context.

    Entering, and leaving without an error, are collective calls. When a process dies, a launcher
    ends only the processes of its own machine; those of other machines would wait in a collective,
    on a GPU for many minutes. Therefore each process writes a heartbeat to the group's store, and
    reads the heartbeats of the others.
    """
    if processes.size == 1:
        yield
        return
    started = processes.all(time.time_ns())[0]  # distinguishes this run from others of the group
    store = PrefixStore(f"mrp_lightning/{started}", torch_names.group_store())
    left = threading.Event()
    watch = threading.Thread(target=_watch, args=(processes, store, left), daemon=True)
    watch.start()
    try:
        yield
    except BaseException as error:
        left.set()
        watch.join()
        with suppress(RuntimeError):  # the others may be gone
            # After the watch has ended, whose next beat would overwrite the message.
            store.set(str(processes.rank), f"{_FAILED}{type(error).__name__}: {error}")
            if processes.rank == 0:
                time.sleep(1.5 * _SECONDS)  # the others still read this store
        raise
    else:
        # The watch goes on until the barrier is passed: another process may still fail before it.
        processes.numbers(0.0)  # a barrier: all have left the context
        left.set()
        watch.join()


def _watch(processes: Processes, store: Any, left: threading.Event) -> None:
    """Write heartbeats, and end this process if another's stop or report a failure."""
    others = [rank for rank in range(processes.size) if rank != processes.rank]
    seen, missed = dict.fromkeys(others, ""), dict.fromkeys(others, 0)
    beat = 0
    # 1. Beats are counted, not timed: the clocks of machines differ.
    # 2. The own beat goes first: the others depend on it, whatever is read afterwards.
    # 3. A process is given up after `_MISSED` readings without a new beat in succession. One alone
    #    may be a busy machine, since both threads wake once in `_SECONDS`.
    while not left.wait(_SECONDS if beat else 0.0):
        beat += 1
        try:
            store.set(str(processes.rank), str(beat))
            beats = {n: store.get(str(n)).decode() for n in others if store.check([str(n)])}
        except RuntimeError as error:
            why = str(error).partition("\n")[0]
            return _end(left, processes, f"the process that keeps the group has ended ({why})")
        for rank in others:
            now = beats.get(rank, "")
            missed[rank] = 0 if now != seen[rank] else missed[rank] + 1
            seen[rank] = now
            if now.startswith(_FAILED):
                return _end(left, processes, f"process {rank} {now}")
            if missed[rank] >= _MISSED:
                return _end(left, processes, f"process {rank} gives no sign of life")
    return None


def _end(left: threading.Event, processes: Processes, reason: str) -> None:
    """End this process unless its main thread leaves the context within `_GRACE` seconds."""
    # The failure of one process usually raises an error of the others' collective, which explains
    # more.
    if left.wait(_GRACE):
        return
    log.error(
        "Process %d of %d ends: %s. Mend that, and run all of them again.",
        *(processes.rank, processes.size, reason),
    )
    os._exit(FAILED)
