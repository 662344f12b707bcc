"""The rows of `pruning_report.json`: one for each layer, and one for each block."""

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

if TYPE_CHECKING:
    from mrp_lightning.solver.problem import Quality
    from mrp_lightning.solver.recipe import Recipe

log = logging.getLogger(__name__)

Fraction = Annotated[float, Field(ge=0, le=1)]
"""A number between 0 and 1; files with others are refused."""
Size = Annotated[int, Field(le=2**53)]
"""A number of rows or columns, at most the largest exact one in a float64."""


@dataclass(frozen=True, kw_only=True)
class GridReport:
    """The grid of a layer's weights, and its part in the loss.

    Attributes:
        bits: The bits of the code of a kept weight, without its share of scales.
        zeros_loss: The part of the layer's `loss` before the kept weights are put on the grid.
        grid_loss: The part that the grid adds, which may be negative. For a tuned layer it is
            measured against the tuned weights, but `zeros_loss` before tuning.
    """

    bits: int
    zeros_loss: float | None = None
    grid_loss: float | None = None


@dataclass(frozen=True, kw_only=True)
class TargetReport:
    """The target of a layer in a run with `target="dense"`.

    Attributes:
        loss: The same as the layer's `loss`, against the weight that stands for the dense model's
            outputs; `None` where the layer's own outputs are the target.
        own: The reason why the layer's own outputs are its target; `None` where they are not.
    """

    loss: float | None = None
    own: str | None = None


@dataclass(frozen=True, kw_only=True)
class ZerosReport:
    """The zeros of a layer that had some before it was pruned.

    Attributes:
        before: The fraction of the weights that were zero before. The losses are against these
            weights, zeros and all.
        after: The fraction that is zero now: the weights removed now, and those zero before that
            stayed zero. It is `None` where whole neurons or heads are removed.
        had_pattern: Whether the weight had the pattern before it was pruned.
    """

    before: Fraction
    after: Fraction | None = None
    had_pattern: bool = False


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """The row of one layer in the report. The measures of a layer that was left dense are `None`.

    Attributes:
        name: The name of the layer in the checkpoint.
        shape: The shape of the weight, (rows, columns) if it is pruned.
        method: The mask and the compensation, by the name that the user gave, such as `SM`.
        sparsity: The fraction of the weights that are removed, between 0 and 1. It is `None` for an
            output head on a grid of its own, which has no part in the pattern.
        loss: The mean over the calibration tokens of ‖(w + δ)x − wx‖², summed over all rows. Where
            whole experts are removed, wx stands for the routed sum of all experts.
        relative_loss: `loss` divided by the mean over the tokens of ‖wx‖².
        damping: λ, added to the diagonal of the Hessian. For a method that inverts no Hessian it is
            the λ of the requested damping, and `None` where whole experts are removed.
        iterations: The number of conjugate gradient iterations of the exact compensation, `None`
            for other methods.
        gap: A certified bound of (L − L*) / L for the damped loss L and its optimum L* for the
            removed weights, before a cast to a narrower dtype and before the grid; of whole columns
            (L − L*) / L*, which is computed exactly. `None` for methods that do not seek the
            optimum.
        seconds: The wall-clock time that pruning the layer took. The first of the layers that share
            an input pays for preparing the Hessian; with a grid, each has a share by its number of
            weights.
        tokens: The number of calibration tokens that the layer saw; where whole experts are
            removed, of those on which the loss was measured.
        dead_inputs: The number of input features that were 0 in every token; `None` where whole
            experts are removed.
        skipped: The reason why the layer was left dense, `None` if it is pruned.
        block: The name of the repeated block that the layer is in, such as `model.layers.3`; `None`
            outside the blocks.
        grid: The grid of the weights, `None` if they are on none.
        target: The target in a run with `target="dense"`, `None` in others.
        zeros: The zeros before and after, `None` if there were none before. They are not counted
            in output heads and removed experts.
        shared_hessian: The share of all experts' Hessian, between 0 and 1, in the Hessian by which
            an expert was pruned. It is above 0 where the expert saw too few tokens, and `loss` is
            then measured by that mixture. It is `None` for layers that are not experts.
        raised_damping: The fraction of the Hessian's mean diagonal that was added, if the requested
            fraction was too small; `None` if that was enough.
        fallback_mask: The mask that replaced that of `method`, such as `magnitude`, because it lost
            less. It is usually `None`.
        peak_memory: The most memory, in bytes, that was allocated on the GPU while the layer, and
            those solved with it, were pruned; `None` on other devices.

    Raises:
        ValueError: The layer is pruned, and its `shape` is not that of a matrix with columns.
    """

    name: str
    shape: tuple[Size, ...]
    method: str | None = None
    sparsity: Fraction | None = None
    loss: float | None = None
    relative_loss: float | None = None
    damping: float | None = None
    iterations: int | None = None
    gap: float | None = None
    seconds: float | None = None
    tokens: int | None = None
    dead_inputs: int | None = None
    skipped: str | None = None
    block: str | None = None
    grid: GridReport | None = None
    target: TargetReport | None = None
    zeros: ZerosReport | None = None
    shared_hessian: float | None = None
    raised_damping: float | None = None
    fallback_mask: str | None = None
    peak_memory: int | None = None

    @classmethod
    def of(
        cls,
        quality: "Quality",
        recipe: "Recipe",
        *,
        name: str,
        shape: Sequence[int],
        energy: float,
        tokens: int,
        own_target: str | None = None,
        zeros_before: float | None = None,
        zeros: float | None = None,
        already_pruned: bool = False,
        **others: Any,
    ) -> "LayerReport":
        """Return the row of a layer that is pruned, by its solution and recipe.

        `energy` is the mean over the calibration tokens of ‖wx‖², to which the loss is relative;
        `own_target` belongs to `TargetReport`, and `zeros_before`, `zeros` and `already_pruned` to
        `ZerosReport`. Further arguments are attributes of the row.
        """
        ratio, grid, target, had = quality.damping_ratio, None, None, None
        if recipe.grid is not None:
            losses = {"zeros_loss": quality.zeros_loss, "grid_loss": quality.grid_loss}
            grid = GridReport(bits=recipe.grid.bits, **losses)
        if quality.target_loss is not None or own_target is not None:
            target = TargetReport(loss=quality.target_loss, own=own_target)
        if zeros_before or already_pruned:
            had = ZerosReport(before=zeros_before or 0.0, after=zeros, had_pattern=already_pruned)
        return cls(
            name=name,
            shape=tuple(shape),
            method=recipe.method.name,
            loss=quality.loss,
            # A layer whose outputs were all zero has lost nothing.
            relative_loss=quality.loss / energy if energy else 0.0,
            damping=quality.damping_used,
            iterations=quality.iterations,
            gap=quality.gap,
            tokens=tokens,
            dead_inputs=quality.dead_inputs,
            grid=grid,
            target=target,
            zeros=had,
            raised_damping=ratio if ratio is not None and ratio > recipe.damping else None,
            fallback_mask=quality.fallback_mask,
            **others,
        )

    @classmethod
    def left_dense(
        cls, name: str, shape: Sequence[int], reason: str, block: str | None = None
    ) -> "LayerReport":
        """Return the row of a layer of `block` that stays dense, and log the reason."""
        log.info("%s is left dense: %s", name, reason)
        return cls(name=name, shape=tuple(shape), skipped=reason, block=block)

    def on_grid(self, lost: float, bits: int, seconds: float) -> "LayerReport":
        """Return the row of this layer after its kept weights were put on a grid of `bits`.

        `lost` is the loss of the grid alone: `loss` with δ measured from the weights before it. The
        `seconds` that this took are added to those of the row.
        """
        assert self.loss is not None
        # The sum is the whole loss, since `lost` is the part that the grid adds. `relative_loss`
        # grows in proportion, because the energy ‖wx‖² stays the same.
        whole, target = self.loss + lost, self.target
        if target is not None and target.loss is not None:
            target = replace(target, loss=target.loss + lost)
        return replace(
            self,
            loss=whole,
            relative_loss=(self.relative_loss or 0.0) * (whole / self.loss if self.loss else 1.0),
            seconds=(self.seconds or 0.0) + seconds,
            grid=GridReport(bits=bits, zeros_loss=self.loss, grid_loss=lost),
            target=target,
        )

    @property
    def num_weights(self) -> int:
        """The number of weights of a layer that is pruned, and so a matrix."""
        rows, columns = self.shape
        return rows * columns

    @property
    def num_removed(self) -> int:
        """The number of weights that are removed."""
        return round((self.sparsity or 0.0) * self.num_weights)

    @property
    def zero_fraction(self) -> float:
        """The fraction of the weights that are zero by this pruning or an earlier one."""
        after = None if self.zeros is None else self.zeros.after
        return (self.sparsity or 0.0) if after is None else after

    def to_dict(self) -> dict[str, Any]:
        """Return the row of `pruning_report.json`."""
        return asdict(self) | {"shape": list(self.shape)}

    def __post_init__(self) -> None:
        is_matrix = len(self.shape) == 2 and self.shape[0] >= 0 and self.shape[1] > 0
        if self.skipped is None and not is_matrix:
            raise ValueError(
                f"the `shape` of {self.name} is {list(self.shape)}, expected (rows, columns)"
            )


@dataclass(frozen=True, kw_only=True)
class BlockReport:
    """The row of a block in the report. Values of parts that the run does not use are `None`.

    Attributes:
        name: The name of the block in the model.
        sparsity: The fraction of its weights that was to be removed, between 0 and 1.
        error_before: ‖y − y_d‖² / ‖y_d‖² over the held-out windows before tuning, for the outputs y
            of the block, and y_d of the block in the dense model. In quantisation alone, it is the
            mean over the tokens of this quotient.
        error_after: The error after tuning, at most `error_before`.
        epoch: The epoch whose weights were chosen, 0 for those before tuning.
        seconds: The wall-clock time of the tuning.
    """

    name: str
    sparsity: float | None = None
    error_before: float | None = None
    error_after: float | None = None
    epoch: int | None = None
    seconds: float | None = None


def mean_relative_loss(rows: Sequence[LayerReport]) -> float | None:
    """Return the mean of `relative_loss` over the rows that have one, `None` if none has."""
    losses = [row.relative_loss for row in rows if row.relative_loss is not None]
    return sum(losses) / len(losses) if losses else None
