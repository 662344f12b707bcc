"""The rows of a report: what was done to a layer, and to a block."""

from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True)
class _Row:
    """A row of `pruning_report.json`."""

    _always: ClassVar[tuple[str, ...]] = ()
    """The keys that are written as null where there is nothing to say; all others are left out."""

    def to_dict(self) -> dict[str, Any]:
        """The row of `pruning_report.json`."""
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in vars(self).items()
            if key in self._always or not (value is None or value is False)
        }


@dataclass(frozen=True, kw_only=True)
class LayerReport(_Row):
    """The row of one layer in the report. The measures of a layer that was left dense are `None`.

    Attributes:
        name: The name of the layer in the checkpoint.
        shape: The shape of the weight, (rows, columns) if it is pruned.
        method: The mask and the compensation, such as `SM`.
        sparsity: The fraction of the weights that are removed, between 0 and 1.
        loss: The mean over the calibration tokens of ‖(w + δ)x − wx‖², summed over all rows.
        relative_loss: `loss` divided by the mean over the tokens of ‖wx‖².
        damping: The λ that was added to the diagonal of the Hessian.
        iterations: The number of iterations of the exact compensation.
        gap: The certified distance to the optimal loss, relative to that loss.
        seconds: The time that pruning the layer took. The first of the layers that share an input
            pays for preparing the Hessian.
        tokens: The number of calibration tokens that the layer saw.
        dead_inputs: The number of input features that were 0 in every token.
        skipped: The reason why the layer was left dense, `None` if it is pruned.
        already_pruned: Whether the weight had the pattern before it was pruned.
        zeros_before: The fraction of the weights that were zero before, above 0 and at most 1. The
            losses are against these weights, zeros and all. It is `None` where none were, and in
            reports of older versions.
        shared_hessian: The share of all experts' Hessian, between 0 and 1, in the Hessian by which
            an expert was pruned. It is above 0 where the expert saw too few tokens, and `loss` is
            then measured by that mixture. It is `None` for layers that are not experts.
        raised_damping: The fraction of the Hessian's mean diagonal that was added, if the requested
            fraction was too small. It is `None` if that was enough.
        peak_memory: The most memory, in bytes, that was allocated on the GPU while the layer was
            pruned. It is `None` on other devices.
        target_loss: The same as `loss`, against the weight that stands for the dense model's
            outputs. It is `None` where the layer's own outputs are the target.
        own_target: The reason why the layer's own outputs are its target in a run with
            `target="dense"`.
        fallback_mask: The mask that replaced that of `method`, such as `magnitude`, because it lost
            less. It is usually `None`.
        swaps: How often a removed column, or group of columns, was exchanged for a kept one, where
            whole columns are removed. It is `None` elsewhere.
        bits: The bits of a kept weight, `None` if the weights are on no grid.
        zeros_loss: The part of `loss` before the kept weights are put on their grid. It is `None`
            if they are on no grid, and so is `grid_loss`.
        grid_loss: The part of `loss` that the grid adds, which may be negative. For a tuned layer
            it is the loss against the tuned weights; the other losses are those before tuning.
        block: The name of the repeated block that the layer is in, such as `model.layers.3`. It is
            `None` outside the blocks, and in reports of older versions.

    Raises:
        ValueError: The layer is pruned, and its `shape` is not that of a matrix.
    """

    name: str
    shape: tuple[int, ...]
    method: str | None = None
    sparsity: float | None = None
    loss: float | None = None
    relative_loss: float | None = None
    damping: float | None = None
    iterations: int | None = None
    gap: float | None = None
    seconds: float | None = None
    tokens: int | None = None
    dead_inputs: int | None = None
    skipped: str | None = None
    already_pruned: bool = False
    zeros_before: float | None = None
    shared_hessian: float | None = None
    raised_damping: float | None = None
    peak_memory: int | None = None
    target_loss: float | None = None
    own_target: str | None = None
    fallback_mask: str | None = None
    swaps: int | None = None
    bits: int | None = None
    zeros_loss: float | None = None
    grid_loss: float | None = None
    block: str | None = None

    _always = (
        *("name", "shape", "method", "sparsity", "loss", "relative_loss", "damping", "iterations"),
        *("gap", "seconds", "tokens", "dead_inputs", "skipped"),
    )

    def __post_init__(self) -> None:
        is_matrix = len(self.shape) == 2 and self.shape[0] >= 0 and self.shape[1] > 0
        if self.skipped is None and not is_matrix:
            raise ValueError(
                f"the `shape` of {self.name} is {list(self.shape)}, expected (rows, columns)"
            )


@dataclass(frozen=True, kw_only=True)
class BlockReport(_Row):
    """The row of a block in the report. Values of parts that the run does not use are `None`.

    Attributes:
        name: The name of the block in the model.
        sparsity: The fraction of its weights that was to be removed, between 0 and 1.
        error_before: ‖y − y_d‖² / ‖y_d‖² over the held-out windows before tuning, for the outputs y
            of the block, and y_d of the block in the dense model.
        error_after: The same after tuning; never more.
        epoch: The epoch whose weights were kept, 0 for those before tuning.
        seconds: The time that tuning took.
    """

    name: str
    sparsity: float | None = None
    error_before: float | None = None
    error_after: float | None = None
    epoch: int | None = None
    seconds: float | None = None
