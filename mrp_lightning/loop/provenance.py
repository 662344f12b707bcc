"""What a pruning was calibrated on, as its report says it."""

from typing import Any, Protocol, runtime_checkable

from lightning.pytorch import Trainer

from mrp_lightning.loop.capture import Step
from mrp_lightning.models.batch import token_ids
from mrp_lightning.processes import Processes
from mrp_lightning.upstream import predict_data


@runtime_checkable
class TextSource(Protocol):
    """A data module that can say what it calibrates on, such as `TextDataModule`."""

    seed: int
    bos: str

    @property
    def calibration_source(self) -> str:
        """The name of the text."""
        ...


def about_data(trainer: Trainer, steps: list[Step], processes: Processes) -> dict[str, Any]:
    """Describe the calibration data, `None` where it is not known; all processes call this.

    Returns:
        `samples` and `sequence_length` (the longest) of token ids, and `source`, `seed` and `bos`
        of a `TextSource`, such as `TextDataModule`.
    """
    mine = [list(ids.shape) for step in steps if (ids := token_ids(step.batch)) is not None]
    shapes = [shape for theirs in processes.all(mine) for shape in theirs]
    # What this call was given: the trainer remembers the datamodule of an earlier one.
    data = predict_data(trainer)
    text = data if isinstance(data, TextSource) else None
    return {
        "source": text and text.calibration_source,
        "samples": sum(samples for samples, _ in shapes) or None,
        "sequence_length": max((length for _, length in shapes), default=None),
        "seed": None if text is None else text.seed,
        "bos": text and text.bos,
    }
