"""A second line in the trainer's own progress bar."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm


@contextmanager
def nested_progress(trainer: Trainer, total: int) -> Iterator[Callable[[int, str], None]]:
    """Show a task below the running one, in Rich or in tqdm, or nowhere if the trainer has no bar.

    Yields:
        A function that takes how much is done, in layers, and a description of what is being done.
    """
    bar = trainer.progress_bar_callback
    if bar is None or not trainer.is_global_zero or getattr(bar, "is_disabled", False):
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
