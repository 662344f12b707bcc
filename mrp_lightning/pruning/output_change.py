"""The change of a model's output against that of the dense model, on some calibration batches."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mrp_lightning.calibration.padding import Padding
from mrp_lightning.calibration.walks import Walk
from mrp_lightning.errors import TargetError
from mrp_lightning.pruning.job import Job

TOKENS = 4096
"""The number of output rows that are compared, or all if there are fewer."""
_CHUNK = 128  # rows that are compared at a time, in float32


class OutputChange:
    """Compares the output of a model, row by row, with that of the dense model.

    If rows are logits over the vocabulary of a transformers language model, the change of a row is
    the divergence KL(p_d ‖ p) of its distributions, in nats. For any other output y it is ‖y −
    y_d‖² / ‖y_d‖².

    The first `TOKENS` rows without padding are compared, whatever the size of the batches. Each
    process compares its share. The dense model's output of these rows stays in memory.

    Args:
        job: The job, whose model is dense.
        walk: A walk over the model, at its start; another over the same batches may replace it.
        padding: Separates tokens from padding.
        option: The option that needs the comparison, for messages, such as "structure: blocks".

    Raises:
        TargetError: The model returns no floating-point tensor.
    """

    def __init__(self, job: Job, walk: Walk, padding: Padding, option: str) -> None:
        self.walk = walk
        self._padding, self._processes, self._option = padding, job.processes, option
        self._vocabularies = _vocabularies(job.model)
        self._dense: list[Tensor] = []
        # The shares are of one size, rounded up, so that no process waits for the counts of others,
        # and at least `TOKENS` rows are compared in all if every process has its share of them.
        missing = math.ceil(TOKENS / job.processes.size)
        while missing > 0 and len(self._dense) < len(walk.batches):
            # A clone, since a slice would keep the logits of the whole batch in memory.
            self._dense.append(self._rows(0, len(self._dense))[:missing].clone())
            missing -= len(self._dense[-1])
        counts = job.processes.numbers(sum(map(len, self._dense)))
        self._count = sum(count for (count,) in counts)

    def of(self, k: int, limit: float = math.inf) -> float:
        """Return the mean change, over all processes' rows, if the model runs from block k.

        The forwards end once the mean exceeds `limit` for sure, with any number above it.
        """
        total = 0.0
        for i, dense in enumerate(self._dense):
            change = _divergence if dense.shape[1] in self._vocabularies else _relative_error
            rows = self._rows(k, i)[: len(dense)].split(_CHUNK)
            for now, expected in zip(rows, dense.split(_CHUNK), strict=True):
                total += float(change(now.float(), expected.float()).sum())
            # One process decides for itself: its part alone makes the sum of all too large, however
            # little the others add.
            if total > limit * self._count:
                break
        # Added in one order in all processes, which have to decide by the same bits.
        totals = self._processes.numbers(total)
        return math.fsum(total for (total,) in totals) / self._count

    def _rows(self, k: int, i: int) -> Tensor:
        """Return the rows (tokens, columns) of the model's output for batch i."""
        returned = self.walk.finish(k, i)
        output = first_output(returned)
        if output is None:
            raise TargetError(
                f"`{self._option}` compares what `predict_step` returns with what the dense model "
                "returns: expected a tensor of floating point numbers, or a mapping, tuple or list "
                f"that holds one; got {type(returned).__name__}. Let it return the logits, or "
                "leave the option out."
            )
        is_token = self._padding.rows_of_output(output)
        rows = output.reshape(-1, output.shape[-1] if output.ndim else 1)
        return rows if is_token is None else rows[is_token]


def first_output(returned: Any) -> Tensor | None:
    """Return the logits, else the first floating-point tensor, of an output; `None` without one."""
    if isinstance(returned, Tensor):
        return returned if returned.is_floating_point() else None
    if isinstance(returned, Mapping):
        logits = first_output(returned.get("logits"))
        return first_output(list(returned.values())) if logits is None else logits
    if isinstance(returned, Sequence) and not isinstance(returned, str):
        return next((x for x in map(first_output, returned) if x is not None), None)
    return None


def _divergence(now: Tensor, dense: Tensor) -> Tensor:
    """Return KL(p ‖ q) of each row, as Σ p·(eᵘ − 1 − u) with u = ln q − ln p.

    p and q are the softmax of the logits `dense` and `now`, (rows, vocabulary). Unlike those of
    Σ p·ln(p/q), the terms are not negative: there they cancel, and the float32 rounding of the
    logarithms is 1e-3 of a divergence of 1e-5.
    """
    log_p, log_q = dense.log_softmax(1), now.log_softmax(1)
    p, q, u = log_p.exp(), log_q.exp(), log_q - log_p
    # For large u, q − p stands for p·(eᵘ − 1), which may overflow. Logits of -inf, which models use
    # to exclude tokens, make u infinite or nan, and 0 · u would be nan.
    far = q - p - torch.where(p > 0, p * u, 0.0)
    return torch.where(u.abs() < 1, p * (u.expm1() - u), far).sum(1)


def _relative_error(now: Tensor, dense: Tensor) -> Tensor:
    # A row of zeros has no energy to divide by; all others have far more than this bound.
    energy = dense.square().sum(1).clamp_min(torch.finfo(dense.dtype).tiny)
    return (now - dense).square().sum(1) / energy


def _vocabularies(model: nn.Module) -> set[int]:
    """Return the sizes of the vocabularies of the language models in a module."""
    getters = (getattr(module, "get_output_embeddings", None) for module in model.modules())
    heads = [get() for get in getters if callable(get)]
    return {len(head.weight) for head in heads if hasattr(head, "weight")}
