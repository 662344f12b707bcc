"""The arguments of pruning a model, each with its type, default and text.

They are apart from their checks, in `settings`, so that a command's help need not wait for torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mrp_ground.arguments import is_count, is_number
from mrp_lightning.errors import OptionError
from mrp_lightning.solver.arguments import LayerSettings


@dataclass(frozen=True, kw_only=True)
class BlockTuning:
    """The tuning of each block's kept weights after the block is pruned.

    Adam, with a learning rate that falls linearly to zero, minimises ‖y − y_d‖² over the
    calibration data, where y is the output of the block in the pruned model, and y_d its output in
    the dense model. Only the kept weights of pruned layers change (with `structure`, those of all
    layers of the block); removed weights stay zero. Where weights are put on a grid and none are
    removed, only the scales change, by ten times the learning rate relative to their size, and the
    error of each token is relative to its own ‖y_d‖²; the codes stay. Some windows are held out:
    the epoch with the lowest error on them is chosen, or the untuned block if no epoch is better.
    Tuning costs about 3·epochs forwards of the calibration data, and memory for
    five copies of one block's weights in float32.

    Args:
        epochs: The number of passes over the calibration windows, ≥ 1.
        learning_rate: The learning rate of the first step, > 0.
        batch_size: The number of windows in a step, ≥ 1. A step takes whole batches of the
            calibration data, at least one of each process that has some left.
        held_out: The fraction of the windows, in (0, 1), that is held out: the last windows, at
            least one and at most all but one.

    Raises:
        OptionError: Values are out of range; all are listed.
    """

    epochs: int = 5
    learning_rate: float = 5e-4
    batch_size: int = 8
    held_out: float = 0.1

    def __post_init__(self) -> None:
        counts = {"epochs": self.epochs, "batch_size": self.batch_size}
        mistakes = [
            f"`tuning.{name}` must be a whole number ≥ 1; got {value!r}"
            for name, value in counts.items()
            if not is_count(value)
        ]
        limits = {"learning_rate": (self.learning_rate, math.inf), "held_out": (self.held_out, 1)}
        mistakes += [
            f"`tuning.{name}` must be a number above 0 and below {limit:g}; got {value!r}"
            for name, (value, limit) in limits.items()
            if not is_number(value) or not 0 < value < limit
        ]
        if mistakes:
            raise OptionError(". ".join(mistakes) + ".")


@dataclass(frozen=True, kw_only=True)
class PruningArguments(LayerSettings):
    """The arguments of pruning a model: those of a single layer, and of all layers together."""

    balance: bool = False
    """Whether columns are scaled before they are put on a grid, by factors that cancel in the norm
    or the linear layer before them, so that the dense model's outputs stay. Each group of the grid
    then shares out its rounding errors with the least loss. It takes a pass over the calibration
    data, and changes weights of norms in the checkpoint. For `bits` and `grid` only."""

    target: str = "own"
    """A layer's target: "own", the output of its dense weight on its inputs in the pruned model, or
    "dense", its output in the dense model, which compensates for losses of earlier blocks. The
    latter runs each block twice as often, and needs a method with compensation.
    docs/methods.md describes this argument and the next two."""

    allocation: str = "uniform"
    """"uniform": all blocks get the same sparsity; "output": a lower one where pruning changes the
    model's output more, at the same total. The latter takes a dry run of the pruning. For
    `sparsity` only."""

    tuning: bool | BlockTuning = False
    """Whether the kept weights of each pruned block are tuned towards its outputs in the dense
    model, and with which options. The report has the layers' losses before tuning."""

    targets: Sequence[str] | str | None = None
    """The names of the linear layers to prune; by default all layers in the blocks except routers.
    A name is one or more whole parts of a layer's name, such as `q_proj`, `mlp` or `layers.3`, with
    shell wildcards. After `re:` it is a regular expression that matches names of layers from their
    start, such as `re:.*q_proj$`. A layer outside the blocks, such as `lm_head`, is calibrated
    after the blocks."""

    ignore: Sequence[str] | str | None = None
    """The names of layers to leave dense, in the form of `targets`."""

    blocks: Sequence[str] | str | None = None
    """The names of the lists of blocks (`model.layers`), or of single blocks, if the outermost
    `ModuleList`s are not the right ones."""

    offload: bool = False
    """Whether blocks and stored activations stay in CPU memory, with one block at a time on the
    accelerator."""

    skip_indivisible: bool = False
    """Whether layers whose number of input features is no multiple of M, or of the columns that a
    `grid` stores together, stay dense; otherwise they are an error."""

    structure: str | None = None
    """"neurons", "heads" or "experts": remove a fraction `sparsity` of each block's MLP neurons, of
    its key-value groups with their query heads, or of its experts with their rows of the router;
    "blocks": of the model's blocks, those whose absence changes the model's output least.
    The result is a smaller dense model, described by an ordinary configuration. The number of
    remaining neurons is a multiple of 32; of experts, at least as many remain as each token uses.
    For `sparsity` and the methods SM, magnitude, wanda, magnitude+M and wanda+M only; experts and
    blocks are measured, and take SM alone. A second run can put the smaller model on a grid; see
    docs/smaller.md."""
