"""Where the result of a pruning comes from: the command, and the calibration data."""

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Trainer

from mrp_lightning.environment import command
from mrp_lightning.loop.capture import Step
from mrp_lightning.loop.data_module import TextDataModule
from mrp_lightning.models.batch import token_ids
from mrp_lightning.processes import Processes
from mrp_lightning.upstream import predict_data


def provenance(trainer: Trainer, steps: Sequence[Step], processes: Processes) -> dict[str, Any]:
    """Say what a report cannot know by itself.

    Args:
        trainer: The trainer whose `predict` gives the data.
        steps: The calibration batches of this process.
        processes: The processes that share the calibration batches; all call this.

    Returns:
        The `command`, `None` where there is none; and the calibration `data`: `samples` and
        `sequence_length` (the longest) of token ids, `source`, `seed` and `bos` of a
        `TextDataModule`, each `None` where it is not known.
    """
    mine = [list(ids.shape) for step in steps if (ids := token_ids(step.batch)) is not None]
    shapes = [shape for theirs in processes.all(mine) for shape in theirs]
    data: dict[str, Any] = {
        "source": None,
        "samples": sum(samples for samples, _ in shapes) or None,
        "sequence_length": max((length for _, length in shapes), default=None),
        "seed": None,
        "bos": None,
    }
    module = predict_data(trainer)
    if isinstance(module, TextDataModule):
        data |= {"source": module.calibration_source, "seed": module.seed, "bos": module.bos}
    return {"command": command(), "data": data}
