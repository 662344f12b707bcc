"""The arguments of pruning one layer, each with its type, default and text; the names of methods.

They are apart from their meaning, in `recipe`, so that a command's help need not wait for torch.
"""

from dataclasses import dataclass

from mrp_lightning.errors import MethodError

GROUP_SIZE = 64
"""Default of `group_size`, the columns that share a scale; read by commands without torch."""
MASK_NAMES = ("magnitude", "wanda", "S", "M", "J")
COMPENSATION_NAMES = ("none", "S", "M")
NAMED = {
    "magnitude": "magnitude+none",
    "wanda": "wanda+none",
    "SS": "S+S",
    "sparsegpt": "S+S",
    "SM": "S+M",
    "MS": "M+S",
    "MM": "M+M",
    "JM": "J+M",
}
"""The pair MASK+COMPENSATION of each method that has a name of its own."""


def method_parts(name: str) -> tuple[str, str]:
    """Return the names of the mask and the compensation of a method.

    Raises:
        MethodError: There is no such method; the message lists all.
    """
    parts = NAMED.get(name, name).split("+") if isinstance(name, str) else []
    if len(parts) != 2 or parts[0] not in MASK_NAMES or parts[1] not in COMPENSATION_NAMES:
        raise MethodError(
            f"`method` must be one of {', '.join(NAMED)}, or MASK+COMPENSATION with MASK in "
            f"{'|'.join(MASK_NAMES)} and COMPENSATION in {'|'.join(COMPENSATION_NAMES)} (case "
            f"matters); got {name!r}."
        )
    return parts[0], parts[1]


@dataclass(frozen=True, kw_only=True)
class LayerSettings:
    """The arguments of pruning one layer, as a user gives them.

    `prune_weight` takes all but `head_grid` as keywords, and the `Settings` of a model extend them.
    """

    method: str
    """magnitude, wanda, SS (the same as sparsegpt), SM, MS, MM, JM, or a pair MASK+COMPENSATION,
    with MASK magnitude, wanda, S, M or J, and COMPENSATION none, S or M. Case matters."""

    sparsity: float | None = None
    """The fraction of the weights to remove, in (0, 1)."""

    pattern: str | int | None = None  # int, to explain that YAML reads an unquoted 2:4 as a number
    """"N:M" keeps N of every M consecutive input features. Quoted in YAML, which reads an unquoted
    2:4 as a number."""

    block_size: int | None = 128
    """The number of columns (input features) whose weights are chosen together; for an N:M pattern,
    a multiple of M. `None` means all columns."""

    damping: float = 0.01
    """The fraction (≥ 0) of the mean of the Hessian's diagonal that is added to the diagonal."""

    tolerance: float | None = None
    """The relative distance (> 0) to the optimal loss at which the exact compensation M stops.
    `None` means 1e-6, and 1e-4 for 16-bit weights, whose rounding alone costs about 1e-4."""

    bits: int | None = None
    """3, 4 or 8: the kept weights are quantised to a grid of this many bits, with a scale for each
    row and `group_size` columns, so that the layer's outputs change least. The checkpoint keeps its
    dtype, and its values lie exactly on the grid. Without `sparsity` and `pattern`, quantisation is
    all that happens. `None` means no quantisation."""

    group_size: int = GROUP_SIZE
    """The number of columns (input features) of a row that share a scale, for `bits`."""

    grid: str | None = None
    """The type of an inference engine, to whose grid the kept weights are quantised: q3_k, q4_0,
    q4_1, q4_k, q5_0, q5_1, q5_k, q8_0, iq4_nl or mxfp4 of llama.cpp; int4-g32, int4-g64, int4-g128,
    int8-g32, int8-g64 or int8-g128 of compressed-tensors. iq4_nl and the types with minima, q4_1,
    q4_k, q5_1 and q5_k, hold no removed weights. It implies `bits` and `group_size`. An export to
    that type (`export.to_gguf`, `--format compressed-tensors`) is then exact. `None` means this
    project's own grid of `bits`."""

    head_grid: str | None = None
    """The type of an engine, as for `grid`, to whose grid the output head of a transformers model
    is quantised, last, by the Hessian of its inputs in the pruned model, so that its logits change
    least. Embeddings that are tied to the head change with it; others stay as they are. It goes
    with any pruning, or alone. `None` leaves the head as it is."""
