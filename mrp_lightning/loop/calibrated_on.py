"""What a pruning is calibrated on: whether that is enough, and what its report says of it."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from mrp_lightning.environment import progress_log as log
from mrp_lightning.loop.capture import Step
from mrp_lightning.models.batch import token_ids
from mrp_lightning.processes import Processes
from mrp_lightning.targets.layers import ExpertStack
from mrp_lightning.targets.plan import Plan
from mrp_lightning.upstream.lightning_names import predict_data

_FEW_WORDS = 8
"""Different tokens up to which a text is no language."""


def warn_of_little(steps: Sequence[Step], plan: Plan, processes: Processes) -> None:
    """Warn before the work of fewer tokens than a layer has columns, and of a text of a few words.

    A window that is there several times counts once, and padding not at all. Data that are no token
    ids are not looked at. All processes call this.
    """
    mine = [window for step in steps for window in _windows(step.batch)]
    sizes = {hashlib.sha1(window.numpy().tobytes()).hexdigest(): len(window) for window in mine}
    words = torch.cat(mine).unique().tolist() if mine else []
    windows: dict[str, int] = {}
    known: set[int] = set()
    for their_sizes, their_words in processes.all((sizes, words)):
        windows |= their_sizes
        known |= set(their_words)
    if not windows:
        return
    layers = [*plan.outside, *(layer for layers in plan.layers.values() for layer in layers)]
    solved = [layer for layer in layers if not isinstance(layer, ExpertStack)]
    widest = max(solved, key=lambda layer: layer.columns, default=None)
    tokens = sum(windows.values())
    if widest is not None and tokens < widest.columns:
        log.warning(
            "The calibration data hold %s tokens in %d different windows, and %s, the widest of "
            "the layers to prune, has %s columns: with fewer tokens than columns, the text says "
            "nothing of some of its inputs. Give more or longer windows (`data.num_samples`, "
            "`data.sequence_length`), several times as many tokens as columns.",
            f"{tokens:,}",
            len(windows),
            widest.name,
            f"{widest.columns:,}",
        )
    if len(known) <= _FEW_WORDS:
        log.warning(
            "All %s tokens of the calibration data are repetitions of %d different ones, which is "
            "no text that a model reads. Give text of the kind that it is to be used on "
            "(`data.train_files`, `data.dataset` or `data.calibration`).",
            f"{tokens:,}",
            len(known),
        )


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


def _windows(batch: Any) -> list[Tensor]:
    """The token ids of each window of a batch, without padding; none where it has no such."""
    ids = token_ids(batch)
    if ids is None:
        return []
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if mask is None or mask.shape != ids.shape:
        return list(ids)
    return [row[kept] for row, kept in zip(ids, mask != 0, strict=True)]
