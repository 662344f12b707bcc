"""The progress of a pruning: a line in the trainer's bar, and a log where nobody sees a bar."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from mrp_lightning.environment import progress_log as log

_BAR_SECONDS = 0.1
_LINE_SECONDS = 30


@contextmanager
def nested_progress(
    trainer: Trainer, total: int, name: str = "pruning"
) -> Iterator[Callable[[int, str], None]]:
    """Show a task below the running one, in Rich or in tqdm, or nowhere if the trainer has no bar.

    Yields:
        A function that takes how much is done of the total, such as the number of layers, and what
        is being done.
    """
    bar = trainer.progress_bar_callback
    if not _has_bar(trainer) or not trainer.is_global_zero:
        yield lambda *_: None
    elif isinstance(bar, RichProgressBar) and bar.progress is not None:
        rich = bar.progress
        task = rich.add_task(name, total=total)

        def update_rich(done: int, text: str) -> None:
            rich.update(task, completed=done, description=text)
            bar.refresh()

        yield update_rich
    else:
        with Tqdm(
            total=total,
            desc=name,
            position=2 * getattr(bar, "process_position", 0) + 1,
            dynamic_ncols=True,
            file=sys.stdout,
            miniters=0,  # by time: the text changes more often than the count
        ) as line:

            def update_tqdm(done: int, text: str) -> None:
                line.set_description_str(text, refresh=False)
                line.update(done - line.n)

            yield update_tqdm


class PlainLog:
    """Lines where nobody sees a bar: for each finished block, and where a block takes long.

    It counts the time from here, and estimates the rest as if all blocks were alike, but for those
    that came from a journal.

    Args:
        trainer: The trainer, whose bar may be switched off, or go to a file.
        blocks: The number of blocks in all.
    """

    def __init__(self, trainer: Trainer, blocks: int) -> None:
        self._silent = is_seen(trainer)
        self._blocks = blocks
        self._done = self._resumed = 0
        self._start = self._last_line = time.monotonic()
        self._pruning_since = self._last_block = self._start

    def finish(self, done: int, relative_loss: float | None, *, resumed: bool = False) -> None:
        """Log a finished block, with an estimate of the rest.

        Args:
            done: The number of finished blocks.
            relative_loss: That of the last one, `None` if no layer of it is pruned.
            resumed: Whether it was finished by an interrupted run before this one.
        """
        now = self._last_line = self._last_block = time.monotonic()
        self._resumed += (done - self._done) * resumed
        self._done = done
        if done == self._resumed:
            self._pruning_since = now
        parts = [f"block {done}/{self._blocks}"]
        if relative_loss is not None:
            parts.append(f"relative loss {relative_loss:.3g}")
        rest = self._rest(now)
        left = f", {rest}" if rest else ""
        parts.append("from the journal" if resumed else roughly(now - self._start) + left)
        self._say(" · ".join(parts))

    @property
    def left(self) -> str:
        """The time that is left, as a text; empty until a block is finished."""
        rest = self._rest(time.monotonic())
        return f" · {rest}" if rest else ""

    def move(self, text: str) -> None:
        """Log what is being done, if there was no line for half a minute."""
        now = time.monotonic()
        if now - self._last_line >= _LINE_SECONDS:
            self._last_line = now
            self._say(f"{text} · {roughly(now - self._start)}")

    def _rest(self, now: float) -> str:
        pruned = self._done - self._resumed
        if not pruned or self._done >= self._blocks:
            return ""
        seconds_each = (self._last_block - self._pruning_since) / pruned
        rest = seconds_each * (self._blocks - self._done) - (now - self._last_block)
        return f"about {roughly(max(0.0, rest))} left"

    def _say(self, line: str) -> None:
        if not self._silent:
            log.info(line)


class Seldom:
    """True at most ten times a second: a bar that is drawn more often costs more than it shows."""

    def __init__(self) -> None:
        self._last = 0.0

    def __call__(self) -> bool:
        """Whether it is time again."""
        now = time.monotonic()
        due = now - self._last >= _BAR_SECONDS
        self._last = now if due else self._last
        return due


def is_seen(trainer: Trainer) -> bool:
    """Whether a trainer has a bar that is drawn on a terminal."""
    return _has_bar(trainer) and sys.stdout.isatty()


def _has_bar(trainer: Trainer) -> bool:
    bar = trainer.progress_bar_callback
    return bar is not None and not getattr(bar, "is_disabled", False)


def roughly(seconds: float) -> str:
    """A time that is an estimate, in its largest unit."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if seconds < 99.5 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
