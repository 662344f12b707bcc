"""Where a pruning is: a second line in the trainer's bar, and a log where nobody sees a bar."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

log = logging.getLogger("lightning.pytorch.pruning")
"""Below Lightning's, which writes to the terminal."""

_BAR_SECONDS = 0.1
_LINE_SECONDS = 30


@contextmanager
def nested_progress(trainer: Trainer, total: int) -> Iterator[Callable[[int, str], None]]:
    """Show a task below the running one, in Rich or in tqdm, or nowhere if the trainer has no bar.

    Yields:
        A function that takes how much is done, in layers, and a description of what is being done.
    """
    bar = trainer.progress_bar_callback
    if not _has_bar(trainer) or not trainer.is_global_zero:
        yield lambda *_: None
    elif isinstance(bar, RichProgressBar) and bar.progress is not None:
        rich = bar.progress
        task = rich.add_task("pruning", total=total)

        def update_rich(done: int, text: str) -> None:
            rich.update(task, completed=done, description=text)
            bar.refresh()

        try:
            yield update_rich
        finally:
            bar.refresh()
    else:
        position = 2 * getattr(bar, "process_position", 0) + 1
        line = Tqdm(
            total=total,
            desc="pruning",
            position=position,
            dynamic_ncols=True,
            file=sys.stdout,
            miniters=0,  # by time: the text changes more often than the count
        )

        def update_tqdm(done: int, text: str) -> None:
            line.set_description_str(text, refresh=False)
            line.update(done - line.n)

        try:
            yield update_tqdm
        finally:
            line.close()


class PlainLog:
    """Lines where nobody sees a bar: for each finished block, and where a block takes long.

    Args:
        trainer: The trainer, whose bar may be switched off, or go to a file. The time is counted
            from here.
        blocks: The number of blocks in all.
    """

    def __init__(self, trainer: Trainer, blocks: int) -> None:
        self._silent = _has_bar(trainer) and sys.stdout.isatty()
        self._blocks = blocks
        self._start = self._last = time.monotonic()
        self._pace = _Pace(blocks, self._start)

    def finish(self, done: int, relative_loss: float | None, *, resumed: bool = False) -> None:
        """Log a finished block, with an estimate of the rest.

        Args:
            done: The number of finished blocks.
            relative_loss: That of the last one, `None` if no layer of it is pruned.
            resumed: Whether it was finished by an interrupted run before this one.
        """
        self._last = time.monotonic()
        self._pace.finish(done, self._last, resumed=resumed)
        parts = [f"block {done}/{self._blocks}"]
        if relative_loss is not None:
            parts.append(f"relative loss {relative_loss:.3g}")
        rest = self._pace.rest(self._last)
        left = f", about {_duration(rest)} left" if rest is not None else ""
        parts.append("from the journal" if resumed else _duration(self._last - self._start) + left)
        self._say(" · ".join(parts))

    @property
    def left(self) -> str:
        """How long it will take yet, empty until a block is finished."""
        rest = self._pace.rest(time.monotonic())
        return "" if rest is None else f" · about {_duration(rest)} left"

    def move(self, text: str) -> None:
        """Log what is being done, if there was no line for half a minute."""
        now = time.monotonic()
        if now - self._last >= _LINE_SECONDS:
            self._last = now
            self._say(f"{text} · {_duration(now - self._start)}")

    def _say(self, line: str) -> None:
        if not self._silent:
            log.info(line)


@dataclass
class _Pace:
    """How long blocks take, those apart that came from a journal.

    Attributes:
        blocks: The number of blocks in all.
        since: When the first block was started that this run prunes itself.
        done: The number of finished blocks.
        resumed: How many of them came from a journal.
        last: When the last one was finished.
    """

    blocks: int
    since: float
    done: int = 0
    resumed: int = 0
    last: float = 0.0

    def finish(self, done: int, now: float, *, resumed: bool) -> None:
        """Count finished blocks."""
        self.resumed += (done - self.done) * resumed
        self.done, self.last = done, now
        if self.done == self.resumed:
            self.since = now

    def rest(self, now: float) -> float | None:
        """How many seconds it takes yet if all blocks are alike, `None` where that is not known."""
        made = self.done - self.resumed
        if not made or self.done >= self.blocks:
            return None
        rest = (self.last - self.since) / made * (self.blocks - self.done)
        return max(0.0, rest - (now - self.last))


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


def _has_bar(trainer: Trainer) -> bool:
    bar = trainer.progress_bar_callback
    return bar is not None and not getattr(bar, "is_disabled", False)


def _duration(seconds: float) -> str:
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if seconds < 99.5 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
