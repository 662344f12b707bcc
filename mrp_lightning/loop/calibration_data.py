"""The batches that a trainer gives a pruning: warnings of what they lack, and their description."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from mrp_lightning.environment import progress_log as log
from mrp_lightning.errors import counted
from mrp_lightning.loop.module_parts import Step
from mrp_lightning.models.batch import token_ids
from mrp_lightning.processes import Processes
from mrp_lightning.targets.layers import ExpertStack
from mrp_lightning.targets.plan import Plan
from mrp_lightning.upstream.lightning_names import predict_data

_FEW_WORDS = 8
"""The number of different tokens up to which a text counts as degenerate."""


def warn_of_data(steps: Sequence[Step], plan: Plan, processes: Processes) -> None:
    """Warn of windows that several processes read, of too few tokens, and of degenerate text.

    Repeated windows count once, and padding does not count. Data other than token ids are not
    checked. All processes must call this: Lightning gives each window to one process, but a user's
    sampler may repeat windows, and each process reads an iterable dataset completely.
    """
    own_windows = [window for step in steps for window in _windows(step.batch)]
    # Digests are gathered in place of windows: 40 characters each, whatever the length.
    own_sizes = {
        hashlib.sha1(window.numpy().tobytes()).hexdigest(): len(window) for window in own_windows
    }
    # Different tokens, not their counts: a text of few words is degenerate however long it is.
    own_words = torch.cat(own_windows).unique().tolist() if own_windows else []
    # Within a process a window counts once by its digest, and between processes it counts for each
    # owner: only the second is a mistake in sharing the data.
    gathered = processes.all((own_sizes, own_words))
    owners = Counter(window for sizes, _ in gathered for window in sizes)
    windows = {window: size for sizes, _ in gathered for window, size in sizes.items()}
    known_words = {word for _, words in gathered for word in words}
    if repeated := sum(count > 1 for count in owners.values()):
        log.warning(
            "%d of %d calibration windows were given to more than one process, and count each "
            "time. Let Lightning share the data (a map-style dataset, without a distributed "
            "sampler), or share them so that none is repeated.",
            repeated,
            len(owners),
        )
    if windows:
        _warn_of_little_text(plan, [*windows.values()], len(known_words))


def _warn_of_little_text(plan: Plan, sizes: Sequence[int], words: int) -> None:
    """Warn of fewer tokens than columns, and of few different tokens (`words`).

    `sizes` are the numbers of tokens of the different windows.
    """
    layers = [*plan.outside, *(layer for layers in plan.layers.values() for layer in layers)]
    # XᵀX of fewer tokens than columns is singular: only damping decides about the other directions.
    # A stack of experts is no layer to solve, and its experts see a part of the tokens anyway.
    solved = [layer for layer in layers if not isinstance(layer, ExpertStack)]
    widest = max(solved, key=lambda layer: layer.columns, default=None)
    tokens = sum(sizes)
    if widest is not None and tokens < widest.columns:
        log.warning(
            "The calibration data hold %s in %s, and %s, the widest of the layers to prune, has %s "
            "columns: with fewer tokens than columns, the text says nothing of some of its inputs. "
            "Give more or longer windows (`num_samples`, `sequence_length`), several times as many "
            "tokens as columns.",
            counted(tokens, "token"),
            counted(len(sizes), "different window"),
            widest.name,
            f"{widest.columns:,}",
        )
    if words <= _FEW_WORDS:
        log.warning(
            "All %s tokens of the calibration data are repetitions of %d different ones, which is "
            "no text that a model reads. Give text of the kind that it is to be used on "
            "(`train_files` or `calibration`).",
            f"{tokens:,}",
            words,
        )


def describe_data(trainer: Trainer, steps: list[Step], processes: Processes) -> dict[str, Any]:
    """Describe the calibration data, with `None` for unknown facts; a collective call.

    Returns:
        `samples` and `sequence_length` (the longest) of token ids, and `source`, `files`, `seed`
        and `bos` of a data module such as `TextDataModule`.
    """
    own_shapes = [list(ids.shape) for step in steps if (ids := token_ids(step.batch)) is not None]
    shapes = [shape for process_shapes in processes.all(own_shapes) for shape in process_shapes]
    # The data of this call, since `trainer.datamodule` may be that of an earlier call.
    data: Any = predict_data(trainer)
    text = data if hasattr(data, "calibration_source") else None
    return {
        "source": text and text.calibration_source,
        "files": text and [str(file.absolute()) for file in text.train_files],
        "samples": sum(samples for samples, _ in shapes) or None,
        "sequence_length": max((length for _, length in shapes), default=None),
        "seed": None if text is None else text.seed,
        "bos": text and text.bos,
    }


def _windows(batch: Any) -> list[Tensor]:
    """Return the token ids of each window of a batch, without padding; none if it has no ids."""
    ids = token_ids(batch)
    if ids is None:
        return []
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if mask is None or mask.shape != ids.shape:
        return list(ids)
    return [row[kept] for row, kept in zip(ids, mask != 0, strict=True)]
