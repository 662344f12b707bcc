"""How far the output of a model is from the dense model's, on some of the calibration data."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mrp_lightning.calibration.padding import Padding
from mrp_lightning.calibration.walks import Walk
from mrp_lightning.errors import TargetError
from mrp_lightning.processes import Processes

TOKENS = 4096
"""After how many rows of the output no further batch is run."""
_CHUNK = 256  # rows that are compared at once, in float32


class OutputChange:
    """Compares what a model returns with what the dense model returned, row by row.

    A row of logits over the vocabulary of a language model of transformers stands for the
    distribution p of a token, and its change is the divergence KL(p_d ‖ p) in nats. That of a row
    y of any other output is ‖y − y_d‖² / ‖y_d‖².

    The first batches are run, until they have `TOKENS` rows, and padding counts nowhere. What the
    dense model returned for them is kept in memory.

    Args:
        model: The module whose forward the walk runs.
        walk: A walk over the dense model, at its start.
        padding: What tells tokens from padding.
        processes: The processes that share the batches.

    Raises:
        TargetError: The model returns nothing that can be compared.
    """

    def __init__(
        self, model: nn.Module, walk: Walk, padding: Padding, processes: Processes
    ) -> None:
        self._walk, self._padding, self._processes = walk, padding, processes
        self._vocabularies = _vocabularies(model)
        self._dense: list[Tensor] = []
        enough = TOKENS / processes.size
        while len(self._dense) < len(self._walk.batches) and sum(map(len, self._dense)) < enough:
            self._dense.append(self._rows(0, len(self._dense)).clone())

    def of(self, k: int) -> float:
        """The mean change of the rows where the model, as it is now, runs on from block k.

        Args:
            k: The number of a block, which the walk of the pass has reached.
        """
        total = 0.0
        for i, dense in enumerate(self._dense):
            change = _divergence if dense.shape[1] in self._vocabularies else _relative_error
            for now, before in zip(
                self._rows(k, i).split(_CHUNK), dense.split(_CHUNK), strict=True
            ):
                total += float(change(now.float(), before.float()).sum())
        found = self._processes.numbers(total, sum(map(len, self._dense)))
        changes, rows = map(math.fsum, zip(*found, strict=True))
        return changes / rows

    def _rows(self, k: int, i: int) -> Tensor:
        """The rows (tokens, columns) that the model returns for batch i."""
        returned = self._walk.finish(k, i)
        output = _found_in(returned)
        if output is None:
            raise TargetError(
                "`allocation: output` compares what `predict_step` returns, with and without each "
                "block pruned: expected a tensor of floating point numbers, or a mapping, tuple or "
                f"list that holds one; got {type(returned).__name__}. Let it return the logits, "
                "or leave `allocation` out."
            )
        kept = self._padding.rows_of_output(output)
        rows = output.reshape(-1, output.shape[-1] if output.ndim else 1)
        return rows if kept is None else rows[kept]


def _found_in(returned: Any) -> Tensor | None:
    """The logits, or else the first floating-point tensor."""
    if isinstance(returned, Tensor):
        return returned if returned.is_floating_point() else None
    if isinstance(returned, Mapping):
        logits = _found_in(returned.get("logits"))
        return _found_in(list(returned.values())) if logits is None else logits
    if isinstance(returned, Sequence) and not isinstance(returned, str):
        return next((x for x in map(_found_in, returned) if x is not None), None)
    return None


def _divergence(now: Tensor, dense: Tensor) -> Tensor:
    expected, found = dense.log_softmax(1), now.log_softmax(1)
    # Logits of -inf, by which models rule tokens out, would give 0 · nan.
    return torch.where(expected > -torch.inf, expected.exp() * (expected - found), 0.0).sum(1)


def _relative_error(now: Tensor, dense: Tensor) -> Tensor:
    energy = dense.square().sum(1).clamp_min(torch.finfo(dense.dtype).tiny)
    return (now - dense).square().sum(1) / energy


def _vocabularies(model: nn.Module) -> set[int]:
    """The numbers of tokens of which the language models in a module give logits."""
    found = (getattr(module, "get_output_embeddings", None) for module in model.modules())
    heads = [head() for head in found if callable(head)]
    return {len(head.weight) for head in heads if hasattr(head, "weight")}
