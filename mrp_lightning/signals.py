"""Handle SIGTERM and Ctrl-C: a command ends within seconds, and a pruning can be resumed."""

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mrp_lightning.environment import progress_log as log
from mrp_lightning.errors import ended_by

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)
_PATIENCE = 8.0
"""Seconds after SIGTERM after which the process is ended within an operation of torch."""


class Interrupted(SystemExit):
    """A signal ended the run. The exit status is 128 plus the signal's number, as in shells."""

    def __init__(self, number: int) -> None:
        super().__init__(ended_by(number))
        self.signal = signal.Signals(number)


class _Stop:
    """A handler that raises `Interrupted` once."""

    def __init__(self) -> None:
        self._received = False

    def __call__(self, number: int, _: Any) -> None:
        # A second signal would interrupt the cleanup that the first one started.
        if not self._received:
            self._received = True
            raise Interrupted(number)


def unclaimed_signals() -> list[signal.Signals]:
    """Return the signals of SIGTERM and SIGINT for which the program has no handler of its own.

    Outside of the main thread, where Python runs no handlers, the list is empty.
    """
    if threading.current_thread() is not threading.main_thread():
        return []
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    return [
        n for n, handler in handlers.items() if handler in _DEFAULTS or isinstance(handler, _Stop)
    ]


@contextmanager
def interruptible(signals: Sequence[signal.Signals], *, at_once: bool = False) -> Iterator[None]:
    """Raise `Interrupted` in this context when one of the signals arrives; later ones are ignored.

    Python runs handlers between two operations of torch, most of which take less than a second.

    Args:
        signals: The signals, those of `unclaimed_signals` before a trainer installs its handlers.
        at_once: Whether SIGTERM ends the process, with the same status, if the context is not left
            within 8 seconds, as in a long operation. It has no effect if the program has set a
            wakeup file descriptor.
    """
    # One handler for all signals: the first of them ends the run, and the others are ignored.
    stop = _Stop()
    earlier = {number: signal.signal(number, stop) for number in signals}
    try:
        with _watched(at_once and signal.SIGTERM in signals):
            yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


@contextmanager
def _watched(enabled: bool) -> Iterator[None]:
    """End the process from a thread if SIGTERM arrives and this context is not left in time."""
    if not enabled or _is_watched():
        yield
        return
    reading, writing = os.pipe()
    # Python writes to the descriptor from within a signal handler of C, where a full pipe must not
    # block.
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    has_left = threading.Event()
    watch = threading.Thread(target=_end_in_time, args=(reading, has_left), daemon=True)
    watch.start()
    try:
        yield
    finally:
        # 1. The event, so that a thread that waits for the end of the context gives up.
        # 2. No more bytes, then the end of the pipe: `read` returns nothing, and the thread ends.
        # 3. The thread is joined before its descriptor is closed, whose number could be given to
        #    another file.
        has_left.set()
        signal.set_wakeup_fd(-1)
        os.close(writing)
        watch.join()
        os.close(reading)


def _is_watched() -> bool:
    """Return whether the program has set a wakeup file descriptor itself, as event loops do."""
    descriptor = signal.set_wakeup_fd(-1)
    if descriptor != -1:
        signal.set_wakeup_fd(descriptor)
    return descriptor != -1


def _end_in_time(reading: int, has_left: threading.Event) -> None:
    """End the process if SIGTERM's byte arrives and the context is not left in time.

    Python writes the number of each signal at once, even within an operation of torch.
    """
    while number := os.read(reading, 1):
        if number[0] == signal.SIGTERM and not has_left.wait(_PATIENCE):
            log.warning(
                "Stopped by SIGTERM in a long operation. What the journal has, it keeps: start the "
                "same run again, and it goes on there."
            )
            # Not `sys.exit`, which would end this thread alone, while the main thread is in an
            # operation of torch that returns too late.
            os._exit(ended_by(signal.SIGTERM))
