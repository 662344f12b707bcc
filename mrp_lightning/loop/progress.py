"""Where a pruning is: a second line in the trainer's bar, and a log where nobody sees a bar."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.utilities.rank_zero import rank_zero_info


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


def block_log(trainer: Trainer, blocks: int) -> Callable[[int, float | None], None]:
    """Log a line for each finished block where nobody sees a bar, with an estimate of the rest.

    Args:
        trainer: The trainer, whose bar may be switched off, or go to a file.
        blocks: The number of blocks in all.

    Returns:
        A function that takes the number of finished blocks and the relative loss of the last one,
        `None` if no layer of it is pruned. The time is counted from here.
    """
    if _has_bar(trainer) and sys.stdout.isatty():
        return lambda *_: None
    start = time.monotonic()

    def log(done: int, relative_loss: float | None) -> None:
        seconds = time.monotonic() - start
        parts = [f"block {done}/{blocks}"]
        if relative_loss is not None:
            parts.append(f"relative loss {relative_loss:.3g}")
        rest = seconds / done * (blocks - done)
        left = f", about {_duration(rest)} left" if done < blocks else ""
        rank_zero_info(" · ".join([*parts, _duration(seconds) + left]))

    return log


def _has_bar(trainer: Trainer) -> bool:
    bar = trainer.progress_bar_callback
    return bar is not None and not getattr(bar, "is_disabled", False)


def _duration(seconds: float) -> str:
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if seconds < 99.5 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
