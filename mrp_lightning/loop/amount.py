"""Whether the calibration data are enough for the layers that are to be pruned on them."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mrp_lightning.environment import progress_log as log
from mrp_lightning.loop.capture import Step
from mrp_lightning.models.batch import token_ids
from mrp_lightning.processes import Processes
from mrp_lightning.targets.layers import ExpertStack
from mrp_lightning.targets.plan import Plan

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


def _windows(batch: Any) -> list[Tensor]:
    """The token ids of each window of a batch, without padding; none where it has no such."""
    ids = token_ids(batch)
    if ids is None:
        return []
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if mask is None or mask.shape != ids.shape:
        return list(ids)
    return [row[kept] for row, kept in zip(ids, mask != 0, strict=True)]
