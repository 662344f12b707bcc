"""Where the result of a pruning comes from: the command, and the calibration data."""

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Trainer

from mrp_lightning.calibration.padding import token_ids
from mrp_lightning.environment import command
from mrp_lightning.loop.capture import Step
from mrp_lightning.loop.data_module import TextDataModule


def provenance(trainer: Trainer, steps: Sequence[Step]) -> dict[str, Any]:
    """Say what a report cannot know by itself.

    Args:
        trainer: The trainer whose `predict` gives the data.
        steps: All calibration batches.

    Returns:
        The `command`, `None` where there is none; and the calibration `data`: `samples` and
        `sequence_length` (the longest) of token ids, `source`, `seed` and `bos` of a
        `TextDataModule`, each `None` where it is not known.
    """
    ids = [found for step in steps if (found := token_ids(step.batch)) is not None]
    data: dict[str, Any] = {
        "source": None,
        "samples": sum(map(len, ids)) or None,
        "sequence_length": max((batch.shape[1] for batch in ids), default=None),
        "seed": None,
        "bos": None,
    }
    module: Any = trainer.datamodule  # type: ignore[attr-defined]
    if isinstance(module, TextDataModule):
        data |= {"source": module.calibration_source, "seed": module.seed, "bos": module.bos}
    return {"command": command(), "data": data}
