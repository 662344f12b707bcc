"""Handle SIGTERM and Ctrl-C: a command ends within seconds, and a pruning can be resumed."""

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mrp_lightning.errors import ended_by

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)


class Interrupted(SystemExit):
    """A signal ended the run. The exit status is 128 plus the signal's number, as in shells."""

    def __init__(self, number: int) -> None:
        super().__init__(number)  # which a pickle passes again
        self.code, self.signal = ended_by(number), signal.Signals(number)


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
def interruptible(signals: Sequence[signal.Signals]) -> Iterator[None]:
    """Raise `Interrupted` in this context when one of the signals arrives; later ones are ignored.

    Python runs handlers between two operations of torch, most of which take less than a second. The
    signals are those of `unclaimed_signals` before a trainer installs its handlers.
    """
    # One handler for all signals: the first of them ends the run, and the others are ignored.
    stop = _Stop()
    earlier = {number: signal.signal(number, stop) for number in signals}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
